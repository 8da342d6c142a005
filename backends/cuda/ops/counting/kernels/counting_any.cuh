// A block an element of y, or a thread where few elements make one; a block or a thread a line of
// cumsum. Dtypes are switched at each load: what is counted is small. Bound: latency.
#pragma once

#include <type_traits>

#include "_shim/device_shim.cuh"
#include "_shim/launch_shim.hpp"
#include "_shim/walk_shim.hpp"
#include "counting/api.hpp"

namespace rm::cuda_ops {

struct CountingArgs {
  const void* x;
  void* y;
  DType from, to;
  Count kind;
  Walk<2> kept;     // offsets of x and y
  Walk<1> reduced;  // of x
};

struct CumsumArgs {
  const void* x;
  void* y;
  DType from;
  Walk<2> lines;  // offsets of x and y
  std::int64_t length, x_step, y_step;
};

/// An integer or bool as it is, a float as whether it is not zero.
__device__ __forceinline__ std::int64_t count_load(const void* x, DType t, std::int64_t at) {
  switch (t) {
    case DType::i64:
      return static_cast<const std::int64_t*>(x)[at];
    case DType::i32:
      return static_cast<const std::int32_t*>(x)[at];
    case DType::i16:
      return static_cast<const std::int16_t*>(x)[at];
    case DType::i8:
      return static_cast<const std::int8_t*>(x)[at];
    case DType::u8:
      return static_cast<const std::uint8_t*>(x)[at];
    case DType::boolean:
      return static_cast<const std::uint8_t*>(x)[at] != 0;
    case DType::f64:
      return static_cast<const double*>(x)[at] != 0.0;
    case DType::bf16:
      return to_float(static_cast<const __nv_bfloat16*>(x)[at]) != 0.0f;
    case DType::f16:
      return to_float(static_cast<const __half*>(x)[at]) != 0.0f;
    default:
      return static_cast<const float*>(x)[at] != 0.0f;
  }
}

__device__ __forceinline__ void count_store(void* y, DType t, std::int64_t at, std::int64_t v) {
  switch (t) {
    case DType::i64:
      static_cast<std::int64_t*>(y)[at] = v;
      break;
    case DType::i32:
      static_cast<std::int32_t*>(y)[at] = static_cast<std::int32_t>(v);
      break;
    case DType::i16:
      static_cast<std::int16_t*>(y)[at] = static_cast<std::int16_t>(v);
      break;
    default:
      static_cast<std::int8_t*>(y)[at] = static_cast<std::int8_t>(v);
  }
}

struct Counted {
  std::int64_t value, index;
};

/// Sums and products wrap, which signed integers may not.
__device__ __forceinline__ Counted count_join(Count kind, Counted a, Counted b) {
  const auto as = static_cast<unsigned long long>(a.value);
  const auto bs = static_cast<unsigned long long>(b.value);
  switch (kind) {
    case Count::sum:
      return {static_cast<std::int64_t>(as + bs), 0};
    case Count::prod:
      return {static_cast<std::int64_t>(as * bs), 0};
    case Count::max:
      return {a.value > b.value ? a.value : b.value, 0};
    case Count::min:
      return {a.value < b.value ? a.value : b.value, 0};
    case Count::any:
      return {(a.value != 0 || b.value != 0) ? 1 : 0, 0};
    case Count::all:
      return {(a.value != 0 && b.value != 0) ? 1 : 0, 0};
    default: {
      const bool better = kind == Count::argmax ? b.value > a.value : b.value < a.value;
      return better || (b.value == a.value && b.index < a.index) ? b : a;
    }
  }
}

__device__ __forceinline__ Counted count_identity(Count kind) {
  constexpr std::int64_t kLeast = -0x7fffffffffffffffll - 1, kMost = 0x7fffffffffffffffll;
  switch (kind) {
    case Count::sum:
    case Count::any:
      return {0, 0};
    case Count::prod:
    case Count::all:
      return {1, 0};
    case Count::max:
    case Count::argmax:
      return {kLeast, kMost};
    default:
      return {kMost, kMost};
  }
}

/// kThreads share an element of y: 1 or the whole block of 256.
template <int kThreads>
__global__ void __launch_bounds__(256) count_axes(const __grid_constant__ CountingArgs p) {
  __shared__ Counted part[kThreads];
  overlap_begin();
  constexpr int kAtOnce = 256 / kThreads;
  const bool arg = p.kind == Count::argmax || p.kind == Count::argmin;
  const int lane = static_cast<int>(threadIdx.x) % kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kAtOnce + threadIdx.x / kThreads;
       i < p.kept.total; i += static_cast<std::int64_t>(gridDim.x) * kAtOnce) {
    std::int64_t base[2];
    walk_offsets(p.kept, i, base);
    Counted best = count_identity(p.kind);
    for (std::int64_t j = lane; j < p.reduced.total; j += kThreads) {
      std::int64_t at[1];
      walk_offsets(p.reduced, j, at);
      best = count_join(p.kind, best, {count_load(p.x, p.from, base[0] + at[0]), arg ? j : 0});
    }
    if constexpr (kThreads > 1) {
      __syncthreads();  // the element before is stored
      part[lane] = best;
      for (int width = kThreads / 2; width > 0; width /= 2) {
        __syncthreads();
        if (lane < width) part[lane] = count_join(p.kind, part[lane], part[lane + width]);
      }
      if (lane == 0) best = part[0];
    }
    if (lane == 0) count_store(p.y, p.to, base[1], arg ? best.index : best.value);
  }
}

template <class S>
__device__ __forceinline__ S cumsum_load(const void* x, DType t, std::int64_t at) {
  if constexpr (sizeof(S) == 4) {
    return t == DType::bf16   ? to_float(static_cast<const __nv_bfloat16*>(x)[at])
           : t == DType::f16 ? to_float(static_cast<const __half*>(x)[at])
                             : static_cast<const float*>(x)[at];
  } else if constexpr (std::is_same_v<S, double>) {
    return static_cast<const double*>(x)[at];
  } else {
    return static_cast<S>(count_load(x, t, at));
  }
}
template <class S>
__device__ __forceinline__ void cumsum_store(void* y, DType t, std::int64_t at, S v) {
  if constexpr (sizeof(S) == 4) {
    if (t == DType::bf16) {
      static_cast<__nv_bfloat16*>(y)[at] = from_float<__nv_bfloat16>(v);
    } else if (t == DType::f16) {
      static_cast<__half*>(y)[at] = from_float<__half>(v);
    } else {
      static_cast<float*>(y)[at] = v;
    }
  } else {
    static_cast<S*>(y)[at] = v;  // int64 and double
  }
}

/// S: what is summed in: float, double or unsigned long long.
template <class S>
__global__ void __launch_bounds__(256) cumsum_threads(const __grid_constant__ CumsumArgs p) {
  overlap_begin();
  const std::int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= p.lines.total) return;
  std::int64_t at[2];
  walk_offsets(p.lines, i, at);
  S sum = 0;
  for (std::int64_t k = 0; k < p.length; ++k) {
    sum += cumsum_load<S>(p.x, p.from, at[0] + k * p.x_step);
    cumsum_store<S>(p.y, p.from, at[1] + k * p.y_step, sum);
  }
}

/// A block's 256 threads scan 256 elements at once.
template <class S>
__global__ void __launch_bounds__(256) cumsum_blocks(const __grid_constant__ CumsumArgs p) {
  __shared__ S of_warp[8];
  overlap_begin();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (std::int64_t i = blockIdx.x; i < p.lines.total; i += gridDim.x) {
    std::int64_t at[2];
    walk_offsets(p.lines, i, at);
    S before = 0;
    for (std::int64_t first = 0; first < p.length; first += 256) {
      const std::int64_t k = first + threadIdx.x;
      S sum = k < p.length ? cumsum_load<S>(p.x, p.from, at[0] + k * p.x_step) : S(0);
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const S left = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d) sum += left;
      }
      if (lane == 31) of_warp[warp] = sum;
      __syncthreads();
      S others = before;
      for (int w = 0; w < warp; ++w) others += of_warp[w];
      if (k < p.length) cumsum_store<S>(p.y, p.from, at[1] + k * p.y_step, others + sum);
      for (int w = 0; w < 8; ++w) before += of_warp[w];
      __syncthreads();  // of_warp is read
    }
  }
}

}  // namespace rm::cuda_ops
