// What an rm_stream of this plugin is.
#pragma once

#include <cuda_runtime_api.h>

#include "rm/plugin.hpp"

namespace rm::cuda {

struct CudaStream final : plugin::Stream {
  CudaStream(int device, cudaStream_t stream, bool owned)
      : device(device), stream(stream), owned(owned) {}
  ~CudaStream() override;
  void sync() override;
  void copy(const rm_tensor& src, rm_tensor& dst) override;

  const int device;
  const cudaStream_t stream;
  const bool owned;
};

/// Throws plugin::Error without one: a kernel on no stream would be ordered with nothing.
inline cudaStream_t stream_of(rm_stream* stream) {
  if (stream == nullptr) throw plugin::Error(RM_INVALID_ARGUMENT, "[cuda] expected a stream, got none");
  return static_cast<CudaStream*>(reinterpret_cast<plugin::Stream*>(stream))->stream;
}

}  // namespace rm::cuda
