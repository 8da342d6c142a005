// Barriers between blocks of a cluster, loads of boxes by tensor maps, and the accesses to shared
// memory around them: thin over PTX, sm_90a.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "_shim/async_shim.cuh"

namespace rm::cuda_ops {

__device__ __forceinline__ float4 load_in_block(std::uint32_t address, std::uint32_t rank) {
  float4 v;
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(address), "r"(rank)
      : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(std::uint32_t address, const float* v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3])
               : "memory");
}

/// Without what this thread has written: to release that takes about a microsecond.
__device__ __forceinline__ void arrive_in_block(std::uint32_t bar, std::uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void load_box(std::uint32_t dst, const CUtensorMap* map,
                                         std::uint32_t bar, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5}], [%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
      : "memory");
}
/// To the same place in all blocks of the mask, completing on each one's barrier.
__device__ __forceinline__ void load_box_all(std::uint32_t dst, const CUtensorMap* map,
                                             std::uint32_t bar, int x, int y, int z,
                                             unsigned mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "h"(static_cast<std::uint16_t>(mask))
      : "memory");
}
/// From shared memory to where the map says; rows and columns beyond it are left out.
__device__ __forceinline__ void store_box(const CUtensorMap* map, std::uint32_t src, int x, int y,
                                          int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(src), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void store_boxes_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// What this thread's stores leave from has been read, but for the last kPending groups.
template <int kPending>
__device__ __forceinline__ void store_boxes_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ uint4 load_shared(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_matrix_x4(std::uint32_t row, std::uint32_t a, std::uint32_t b,
                                                std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace rm::cuda_ops
