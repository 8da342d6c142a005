// The launch that brings its bytes along.
#include <cstring>

#include "_shim/launch_shim.hpp"
#include "copy/api.hpp"
#include "copy/kernels/write_any.cuh"

namespace rm::cuda_ops {

bool writes(std::size_t bytes) { return bytes > 0 && bytes <= static_cast<std::size_t>(kWriteBytes); }

Status write(void* to, const void* from, std::size_t bytes, Stream stream) {
  if (!writes(bytes)) return invalid("[write] expected 1 to 1024 bytes, got " + std::to_string(bytes));
  WriteArgs args{};
  args.to = to, args.bytes = static_cast<std::uint32_t>(bytes);
  std::memcpy(args.word, from, bytes);
  return launch("write", write_bytes, Launch{1, kWriteThreads}, stream, args);
}

}  // namespace rm::cuda_ops
