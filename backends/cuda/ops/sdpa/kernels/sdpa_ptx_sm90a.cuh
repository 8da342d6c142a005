// Hopper's warpgroup products and tensor copies, thin over PTX: sm_90a.
// Tiles in shared memory have rows of 128 bytes, swizzled by 128 bytes, at addresses of 1024 bytes.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "_shim/async_shim.cuh"
#include "_shim/wgmma_shim.cuh"

namespace rm::cuda_ops {

/// A box of a 4-axis tensor map to shared memory; out of bounds is 0. Called by one thread.
__device__ __forceinline__ void tensor_copy(std::uint32_t dst, const CUtensorMap* map, int c0,
                                            int c1, int c2, int c3, std::uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// A ring's place: its stage and the parity of its barriers.
template <int kStages>
struct RingPlace {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

/// Words of the four lanes of a quad change places: word j of lane t becomes word t of lane j.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&w)[4]) {
  const int lane = threadIdx.x;
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const std::uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? w[i] : w[i + bit], bit);
      (upper ? w[i] : w[i + bit]) = got;
    }
  }
}

/// Rows r and r + 8 of a warpgroup's sums [64, kD] times scale, 16 bytes a lane and store. Called
/// by whole warps; `to` and pitch are multiples of 16 bytes, dim of 8.
template <class T, int kD>
__device__ __forceinline__ void store_rows(const float (&from)[kD / 2], const float (&scale)[2],
                                           T* to, std::int64_t pitch, int r, int rows, int dim) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = r + 8 * half;
#pragma unroll
    for (int d = 0; d < kD / 8; d += 4) {
      std::uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (d + i) + 2 * half;
        w[i] = pack_pair<T>(from[at] * scale[half], from[at + 1] * scale[half]);
      }
      transpose_quad(w);
      const int column = (d + static_cast<int>(threadIdx.x % 4)) * 8;
      if (row < rows && column < dim) {
        *reinterpret_cast<uint4*>(to + row * pitch + column) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
}

/// Keeps the compiler from moving uses of accumulators across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// clang-format off
#define RM_REGS_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define RM_REGS_32 RM_REGS_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define RM_REGS_64 RM_REGS_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define RM_REGS_96 RM_REGS_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define RM_REGS_128 RM_REGS_96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define RM_ACC_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define RM_ACC_16(d, i) RM_ACC_4(d, i), RM_ACC_4(d, i + 4), RM_ACC_4(d, i + 8), RM_ACC_4(d, i + 12)
#define RM_ACC_ALL_16(d) RM_ACC_16(d, 0)
#define RM_ACC_ALL_32(d) RM_ACC_32(d)
#define RM_ACC_ALL_64(d) RM_ACC_64(d)
#define RM_ACC_ALL_96(d) RM_ACC_64(d), RM_ACC_16(d, 64), RM_ACC_16(d, 80)
#define RM_ACC_ALL_128(d) RM_ACC_128(d)
#define RM_ACC_32(d) RM_ACC_16(d, 0), RM_ACC_16(d, 16)
#define RM_ACC_64(d) RM_ACC_32(d), RM_ACC_16(d, 32), RM_ACC_16(d, 48)
#define RM_ACC_128(d) RM_ACC_64(d), RM_ACC_16(d, 64), RM_ACC_16(d, 80), RM_ACC_16(d, 96), RM_ACC_16(d, 112)

// N columns, N / 2 accumulators a thread; A0 ..: numbers of the operands after them.
#define RM_WGMMA_SS(N, R, A0, A1, A2, TYPE)                                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A2 ", 0;\n"                                    \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" RM_REGS_##R     \
               "}, %" #A0 ", %" #A1 ", p, 1, 1, 0, 0;\n}"                                          \
               : RM_ACC_ALL_##R(d) : "l"(a), "l"(b), "r"(add))
#define RM_WGMMA_RS(N, R, A0, A1, A2, A3, A4, TYPE)                                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                          \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" RM_REGS_##R     \
               "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #A4 ", p, 1, 1, 1;\n}"             \
               : RM_ACC_ALL_##R(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
// clang-format on

/// d = a b^T (+ d where add): a [64, 16], b [kN, 16], both with the summed axis in rows of a tile.
template <class T, int kN>
__device__ __forceinline__ void wgmma_ss(float (&d)[kN / 2], std::uint64_t a, std::uint64_t b,
                                         int add) {
  if constexpr (std::is_same_v<T, __half>) {
    if constexpr (kN == 32) RM_WGMMA_SS(32, 16, 16, 17, 18, "f16");
    if constexpr (kN == 64) RM_WGMMA_SS(64, 32, 32, 33, 34, "f16");
    if constexpr (kN == 128) RM_WGMMA_SS(128, 64, 64, 65, 66, "f16");
    if constexpr (kN == 192) RM_WGMMA_SS(192, 96, 96, 97, 98, "f16");
  } else {
    if constexpr (kN == 32) RM_WGMMA_SS(32, 16, 16, 17, 18, "bf16");
    if constexpr (kN == 64) RM_WGMMA_SS(64, 32, 32, 33, 34, "bf16");
    if constexpr (kN == 128) RM_WGMMA_SS(128, 64, 64, 65, 66, "bf16");
    if constexpr (kN == 192) RM_WGMMA_SS(192, 96, 96, 97, 98, "bf16");
  }
}

/// d += a b: a [64, 16] in registers, b [16, kN] with the summed axis down a tile's rows.
template <class T, int kN>
__device__ __forceinline__ void wgmma_rs(float (&d)[kN / 2], const std::uint32_t* a,
                                         std::uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    if constexpr (kN == 64) RM_WGMMA_RS(64, 32, 32, 33, 34, 35, 36, "f16");
    if constexpr (kN == 128) RM_WGMMA_RS(128, 64, 64, 65, 66, 67, 68, "f16");
    if constexpr (kN == 256) RM_WGMMA_RS(256, 128, 128, 129, 130, 131, 132, "f16");
  } else {
    if constexpr (kN == 64) RM_WGMMA_RS(64, 32, 32, 33, 34, 35, 36, "bf16");
    if constexpr (kN == 128) RM_WGMMA_RS(128, 64, 64, 65, 66, 67, 68, "bf16");
    if constexpr (kN == 256) RM_WGMMA_RS(256, 128, 128, 129, 130, 131, 132, "bf16");
  }
}

#undef RM_WGMMA_SS
#undef RM_WGMMA_RS

}  // namespace rm::cuda_ops
