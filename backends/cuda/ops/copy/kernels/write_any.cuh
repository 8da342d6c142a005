// Bytes that travel as a launch's arguments: a graph's numbers, which change from step to step.
#pragma once

#include <cstdint>

namespace rm::cuda_ops {

inline constexpr int kWriteBytes = 1024, kWriteThreads = 128;

struct WriteArgs {
  void* to;
  std::uint32_t bytes;
  std::uint64_t word[kWriteBytes / 8];
};

static __global__ void write_bytes(const __grid_constant__ WriteArgs p) {
  const std::uint32_t words = p.bytes / 8, t = threadIdx.x;
  const bool aligned = reinterpret_cast<std::uintptr_t>(p.to) % 8 == 0;
  if (aligned && t < words) static_cast<std::uint64_t*>(p.to)[t] = p.word[t];
  const char* from = reinterpret_cast<const char*>(p.word);
  for (std::uint32_t i = (aligned ? words * 8 : 0) + t; i < p.bytes; i += kWriteThreads) {
    static_cast<char*>(p.to)[i] = from[i];
  }
}

}  // namespace rm::cuda_ops
