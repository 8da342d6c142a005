// What every kernel on Hopper's warpgroup products needs around them, thin over PTX: sm_90a.
// The products themselves are each operator's, in the shapes it uses.
#pragma once

#include <cstdint>

namespace rm::cuda_ops {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Ordinary writes to shared memory before this are seen by tensor cores and copies after it.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// Arrives at a named barrier without waiting there.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Describes a tile of 128-byte rows in the 128-byte swizzle, 8-row groups 1024 bytes apart. Where
/// the summed axis runs down the rows, `step` is the bytes to the next 64 columns.
__device__ __forceinline__ std::uint64_t wgmma_descriptor(std::uint32_t address,
                                                          std::uint32_t step = 16) {
  return static_cast<std::uint64_t>((address & 0x3ffff) >> 4) |
         static_cast<std::uint64_t>(step >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

}  // namespace rm::cuda_ops
