// Hopper's bulk copies and the barriers they complete on (only in code that is compiled for sm_90),
// programmatic dependent launch (nothing before sm_90), and what sm_80 has: asynchronous copies and
// the warp-level tensor-core product. Thin over PTX.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace rm::cuda_ops {

/// Whether this pass of the compiler makes code that may use sm_90's instructions.
#if __CUDA_ARCH__ >= 900
inline constexpr bool kSm90 = true;
#else
inline constexpr bool kSm90 = false;
#endif

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(std::uint32_t bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to the copy engine; then synchronise the block.
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(std::uint32_t bar, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
/// `count` arrivals of the threads where `is`, without a branch.
__device__ __forceinline__ void barrier_arrive_where(bool is, std::uint32_t bar,
                                                     std::uint32_t count) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%1], %2;\n}" ::"r"(static_cast<int>(is)),
      "r"(bar), "r"(count)
      : "memory");
}
__device__ __forceinline__ void barrier_wait(std::uint32_t bar, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

/// The same, but ends the kernel with an error rather than hang for ever.
__device__ __forceinline__ void barrier_wait_or_trap(std::uint32_t bar, std::uint32_t parity) {
  std::uint32_t done = 0;
  for (int i = 0; !done; ++i) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    if (i > 1 << 26) __trap();
  }
}

/// bytes (a multiple of 16) from global to shared memory, both 16-byte aligned.
__device__ __forceinline__ void bulk_copy(std::uint32_t dst, const void* src, std::uint32_t bytes,
                                          std::uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}

/// True in one lane of the warp; unlike a test of the lane's number it keeps uniform operands in
/// uniform registers, which bulk copies want.
__device__ __forceinline__ bool elect_lane() {
  std::uint32_t chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(chosen));
  return chosen != 0;
}
/// The warp's number in its block, as a value the compiler knows to be the same in all lanes.
__device__ __forceinline__ int uniform_warp() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
}

/// The next kernel of the stream may start its prologue.
__device__ __forceinline__ void launch_dependents() {
  if constexpr (kSm90) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
/// The kernel before this one in the stream has finished and its writes are visible.
__device__ __forceinline__ void wait_for_previous() {
  if constexpr (kSm90) asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// Where what is at `at` in this block's shared memory is in that of block `rank` of the cluster.
__device__ __forceinline__ std::uint32_t cluster_address(std::uint32_t at, int rank) {
  std::uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}
/// Two or four floats to such an address, counted by the barrier at `counter` of the same block.
__device__ __forceinline__ void cluster_store(float2 x, std::uint32_t to, std::uint32_t counter) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];" ::"r"(to),
      "r"(counter), "f"(x.x), "f"(x.y)
      : "memory");
}
__device__ __forceinline__ void cluster_store(float4 x, std::uint32_t to, std::uint32_t counter) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::
          "r"(to),
      "r"(counter), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
      : "memory");
}
/// x to the shared memory of block `rank` of the cluster: to where `at` is there, counted by the
/// barrier that is there where `bar` is here.
__device__ __forceinline__ void cluster_send(float2 x, std::uint32_t at, std::uint32_t bar,
                                             int rank) {
  cluster_store(x, cluster_address(at, rank), cluster_address(bar, rank));
}

/// Waits for `threads` threads of the block on barrier `id` (1 .. 15; 0 is __syncthreads).
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// c[16x8] += a[16x16] b[16x8], fp32 sums.
template <class T>
__device__ __forceinline__ void mma_16816(float (&c)[4], std::uint32_t a0, std::uint32_t a1,
                                          std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                          std::uint32_t b1);
template <>
__device__ __forceinline__ void mma_16816<__nv_bfloat16>(float (&c)[4], std::uint32_t a0,
                                                         std::uint32_t a1, std::uint32_t a2,
                                                         std::uint32_t a3, std::uint32_t b0,
                                                         std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16816<__half>(float (&c)[4], std::uint32_t a0, std::uint32_t a1,
                                                  std::uint32_t a2, std::uint32_t a3,
                                                  std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// Four 8x8 blocks of 16-bit values; `row` is this lane's row address (lanes 8i .. 8i+7: block i).
__device__ __forceinline__ void load_matrix_x4(std::uint32_t (&r)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_matrix_x4_transposed(std::uint32_t (&r)[4],
                                                          std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

/// 16 bytes from global to shared memory, zeros where `valid` is false (nothing is read then).
__device__ __forceinline__ void copy_16_async(std::uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(valid ? 16 : 0)
               : "memory");
}
/// 8 bytes; both addresses are multiples of 8.
__device__ __forceinline__ void copy_8_async(std::uint32_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void copy_group_end() { asm volatile("cp.async.commit_group;" ::); }
template <int kPending>
__device__ __forceinline__ void copy_groups_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

template <class T>
__device__ __forceinline__ std::uint32_t pack_pair(float lo, float hi);
template <>
__device__ __forceinline__ std::uint32_t pack_pair<__nv_bfloat16>(float lo, float hi) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<const std::uint32_t*>(&v);
}
template <>
__device__ __forceinline__ std::uint32_t pack_pair<__half>(float lo, float hi) {
  const __half2 v = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<const std::uint32_t*>(&v);
}

}  // namespace rm::cuda_ops
