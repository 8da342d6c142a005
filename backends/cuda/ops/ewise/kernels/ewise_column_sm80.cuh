// Where the chain kernel's values wait: a thread's column of shared memory, filled by asynchronous
// copies, and read as fp32 values whatever an operand's dtype is.
#pragma once

#include "_shim/async_shim.cuh"
#include "_shim/words_shim.cuh"
#include "ewise/kernels/ewise_args.hpp"

namespace rm::cuda_ops {

/// A thread's column, by addresses of 32 bits: generic ones would be made anew at each use.
struct ChainColumn {
  std::uint32_t base;
  /// Chunk c, of kBytes a thread; a chunk of all threads lies side by side.
  template <int kBytes>
  __device__ __forceinline__ std::uint32_t at(int place, int c = 0) const {
    return base + (place * 16 + c * kBytes) * kChainThreads + threadIdx.x * kBytes;
  }
  __device__ __forceinline__ uint4 load16(int place, int c) const {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at<16>(place, c)));
    return v;
  }
  __device__ __forceinline__ uint2 load8(int place, int c) const {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at<8>(place, c)));
    return v;
  }
  __device__ __forceinline__ std::uint32_t load4(std::uint32_t address) const {
    std::uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
  }
  __device__ __forceinline__ void store4(std::uint32_t address, float v) const {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
  }
  /// Value j of float32 values.
  __device__ __forceinline__ std::uint32_t value(int place, int j) const {
    return at<16>(place, j / 4) + j % 4 * 4;
  }
  __device__ __forceinline__ void keep(int place, const float (&v)[kChainValues]) const {
#pragma unroll
    for (int c = 0; c < kChainValues / 4; ++c) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at<16>(place, c)),
                   "f"(v[4 * c]), "f"(v[4 * c + 1]), "f"(v[4 * c + 2]), "f"(v[4 * c + 3])
                   : "memory");
    }
  }
  template <int kBytes>
  __device__ __forceinline__ void copy(int place, int c, const void* from) const {
    if constexpr (kBytes == 16) {
      copy_16_async(at<16>(place, c), from, true);
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at<kBytes>(place, c)),
                   "l"(from), "n"(kBytes)
                   : "memory");
    }
  }
};

/// Where a thread's vectors lie: their numbers, their rows over all outer axes, their columns. The
/// last ones again beyond the end, so that nothing has to be left out.
template <int V>
struct ChainPlaces {
  static constexpr int kVectors = kChainValues / V;
  std::uint32_t vector[kVectors], row[kVectors], column[kVectors];
  __device__ ChainPlaces(const EwiseChainArgs& p, std::uint32_t first) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      vector[u] = min(first + u * kChainThreads, p.vectors - 1);
      row[u] = p.row_magic ? __umulhi(vector[u], p.row_magic) >> p.row_shift : vector[u];
      column[u] = (vector[u] - row[u] * p.row_vectors) * V;
    }
  }
  __device__ __forceinline__ std::int64_t offset(const EwiseChainArgs& p,
                                                 const EwiseChainOperand& o, int mode, int inner,
                                                 int u) const {
    if (mode == kChainDense) return static_cast<std::int64_t>(vector[u]) * V;
    std::int64_t at = inner ? column[u] : 0;
    if (mode == kChainRow) return at;
    std::uint32_t rest = row[u];
#pragma unroll 1
    for (int d = p.rank - 2; d > 0; --d) {
      const std::uint32_t above = rest / p.shape[d];
      at += static_cast<std::int64_t>(rest - above * p.shape[d]) * o.stride[d];
      rest = above;
    }
    return p.rank > 1 ? at + rest * o.stride[0] : at;
  }
};

__device__ __forceinline__ float chain_scalar(const void* data, int kind, std::int64_t at) {
  if (kind == kFromF32) return static_cast<const float*>(data)[at];
  if (kind == kFromBf16) return to_float(static_cast<const __nv_bfloat16*>(data)[at]);
  if (kind == kFromF16) return to_float(static_cast<const __half*>(data)[at]);
  return static_cast<const unsigned char*>(data)[at] != 0 ? 1.0f : 0.0f;
}

/// Asks for a thread's vectors of operand o.
template <int V>
__device__ __forceinline__ void chain_stage(const EwiseChainArgs& p, const EwiseChainOperand& o,
                                            const ChainColumn& to, const ChainPlaces<V>& places) {
  const auto* data = static_cast<const unsigned char*>(o.data);
  const int kind = o.kind, mode = o.mode, inner = o.inner, place = o.place;
#pragma unroll
  for (int u = 0; u < kChainValues / V; ++u) {
    const std::int64_t at = places.offset(p, o, mode, inner, u);
    if (inner == 0) {
      to.store4(to.at<4>(place, u), chain_scalar(data, kind, at));
    } else if (V == 4 && kind == kFromF32) {
      to.copy<16>(place, u, data + at * 4);
    } else if (kind == kFromBool) {
      to.copy<V>(place, u, data + at);
    } else {
      to.copy<2 * V>(place, u, data + at * 2);
    }
  }
}

template <int V, class T>
__device__ __forceinline__ void chain_fetch_half(const ChainColumn& from, int place,
                                                 float (&out)[kChainValues]) {
#pragma unroll
  for (int u = 0; u < kChainValues / V; ++u) {
    float v[V];
    if constexpr (V == 8) {
      unpack<T>(from.load16(place, u), v);
    } else {
      unpack<T>(from.load8(place, u), v);
    }
#pragma unroll
    for (int j = 0; j < V; ++j) out[u * V + j] = v[j];
  }
}

/// A step's operand as values.
template <int V>
__device__ __forceinline__ void chain_fetch(const ChainColumn& from, int kind, int place, float imm,
                                            float (&out)[kChainValues]) {
  if (kind == kFromBf16) {
    chain_fetch_half<V, __nv_bfloat16>(from, place, out);
  } else if (kind == kFromF32) {
#pragma unroll
    for (int c = 0; c < kChainValues / 4; ++c) {
      const uint4 v = from.load16(place, c);
      out[4 * c] = __uint_as_float(v.x), out[4 * c + 1] = __uint_as_float(v.y);
      out[4 * c + 2] = __uint_as_float(v.z), out[4 * c + 3] = __uint_as_float(v.w);
    }
  } else if (kind == kFromF16) {
    chain_fetch_half<V, __half>(from, place, out);
  } else if (kind == kFromBool) {
#pragma unroll
    for (int c = 0; c < kChainValues / 4; ++c) {  // four bytes each
      const std::uint32_t w = V == 4 ? from.load4(from.at<4>(place, c))
                                     : from.load4(from.at<8>(place, c / 2) + c % 2 * 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) out[4 * c + j] = w & 0xffu << j * 8 ? 1.0f : 0.0f;
    }
  } else {
#pragma unroll
    for (int u = 0; u < kChainValues / V; ++u) {
      float x = imm;
      if (kind == kFromSplat) x = __uint_as_float(from.load4(from.at<4>(place, u)));
#pragma unroll
      for (int j = 0; j < V; ++j) out[u * V + j] = x;
    }
  }
}

}  // namespace rm::cuda_ops
