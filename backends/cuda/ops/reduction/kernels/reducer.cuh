// What a reduction does with its elements: the running result of a thread, joins of a warp and a
// block, parts and the result. NaN wins; of equal extremes the first index.
#pragma once

#include <type_traits>

#include "_shim/device_shim.cuh"
#include "_shim/walk_shim.hpp"
#include "_shim/words_shim.cuh"
#include "reduction/api.hpp"

namespace rm::cuda_ops {

/// A partial result: a value, and for arg* where it was.
struct Best {
  float value;
  std::int64_t index;
};

struct ReductionArgs {
  const void* x;
  void* y;
  void* parts;    // [gridDim.y][kept] of Best (arg*) or float; null: one block along the
                  // reduced axes
  float divisor;  // of a sum: 1, or the number of elements
  int flat;       // kept elements lie x_pitch and y_pitch apart: kept's axes are not looked at
  std::int64_t kept_total, reduced_total, x_pitch, y_pitch, reduced_pitch;
  Walk<2> kept;     // offsets in x and y
  Walk<1> reduced;  // offsets in x
};

/// Offsets of kept element i in x and y. Arguments come from memory line by line, so the usual
/// case reads the first one alone.
__device__ __forceinline__ void kept_offsets(const ReductionArgs& p, std::int64_t i,
                                             std::int64_t (&out)[2]) {
  if (p.flat) {
    out[0] = i * p.x_pitch, out[1] = i * p.y_pitch;
  } else {
    walk_offsets(p.kept, i, out);
  }
}

/// What a thread has seen of elements that come to it in order; `at` counts them.
struct Running {
  float value;
  unsigned at;
};

template <Reduce kKind>
struct Reducer {
  static constexpr bool kArg = kKind == Reduce::argmax || kKind == Reduce::argmin;
  static constexpr bool kLargest = kKind == Reduce::max || kKind == Reduce::argmax;
  static constexpr bool kExtreme = kArg || kKind == Reduce::max || kKind == Reduce::min;
  static constexpr float kStart = kExtreme
                                      ? (kLargest ? -__builtin_huge_valf() : __builtin_huge_valf())
                                  : kKind == Reduce::prod ? 1.0f
                                                          : 0.0f;
  __device__ static Best identity() { return {kStart, 0x7fffffffffffffffll}; }
  /// A later element: the earlier one stays where they are equal or it is NaN.
  __device__ __forceinline__ static void step(Running& r, float v, unsigned at) {
    if constexpr (!kExtreme) {
      r.value = kKind == Reduce::prod ? r.value * v : r.value + v;
    } else {
      const bool take = !(kLargest ? v <= r.value : v >= r.value) && r.value == r.value;
      r.value = take ? v : r.value;
      if constexpr (kArg) r.at = take ? at : r.at;
    }
  }
  /// Of 16 bytes; NaN wins.
  template <class T>
  __device__ __forceinline__ static float extreme(const uint4& w) {
    if constexpr (sizeof(T) == 2) {
      using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
      const auto of = [](Pair a, Pair b) {
        return kLargest ? __hmax2_nan(a, b) : __hmin2_nan(a, b);
      };
      Pair pair[4];
      memcpy(pair, &w, 16);
      const Pair best = of(of(pair[0], pair[1]), of(pair[2], pair[3]));
      return extreme(to_float(best.x), to_float(best.y));
    } else {
      float v[4];
      unpack<T>(w, v);
      return extreme(extreme(v[0], v[1]), extreme(v[2], v[3]));
    }
  }
  __device__ __forceinline__ static float extreme(float a, float b) {
    float out;
    if constexpr (kLargest) {
      asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    } else {
      asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    }
    return out;
  }
  /// Later 16 bytes, number `at`; of arg* `held` is where the best was.
  template <class T>
  __device__ __forceinline__ static void step(Running& r, uint4& held, const uint4& w,
                                              unsigned at) {
    if constexpr (!kExtreme) {
      float v[kVec<T>];
      unpack<T>(w, v);
#pragma unroll
      for (int k = 0; k < kVec<T>; ++k) step(r, v[k], at);
    } else if constexpr (kArg) {
      const float best = extreme<T>(w);
      if (!(kLargest ? best <= r.value : best >= r.value) && r.value == r.value) {
        r.value = best, r.at = at, held = w;
      }
    } else {
      r.value = extreme(r.value, extreme<T>(w));
    }
  }
  __device__ __forceinline__ static Best join(Best a, Best b) {
    if constexpr (!kExtreme) {
      return {kKind == Reduce::prod ? a.value * b.value : a.value + b.value, 0};
    } else {
      const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
      const bool better = kLargest ? b.value > a.value : b.value < a.value;
      const bool equal = a.value == b.value || (a_nan && b_nan);
      const bool take = (b_nan && !a_nan) || (!a_nan && better) || (equal && b.index < a.index);
      return take ? b : a;
    }
  }
  __device__ static Best warp(Best x) {
#pragma unroll
    for (int k = 16; k > 0; k >>= 1) {
      Best other{__shfl_xor_sync(0xffffffffu, x.value, k), 0};
      if constexpr (kArg) other.index = __shfl_xor_sync(0xffffffffu, x.index, k);
      x = join(x, other);
    }
    return x;
  }
  /// The same for arg*, where each lane's index is from `at`, which grows with the index.
  __device__ static Best warp(Best x, unsigned at) {
    if constexpr (!kArg) {
      return warp(x);
    } else {
      const std::uint32_t b = __float_as_uint(x.value + 0.0f);
      const std::uint32_t up = b & 0x80000000u ? ~b : b | 0x80000000u;
      const std::uint32_t key = x.value != x.value ? 0xffffffffu : kLargest ? up : ~up;
      const bool best = key == __reduce_max_sync(0xffffffffu, key);
      const std::uint32_t first = __reduce_min_sync(0xffffffffu, best ? at : 0xffffffffu);
      const int lane = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, best && at == first))) - 1;
      return {__shfl_sync(0xffffffffu, x.value, lane), __shfl_sync(0xffffffffu, x.index, lane)};
    }
  }
  /// Over the block; the first thread has the result.
  __device__ static Best block(Best x, unsigned at) {
    __shared__ Best part[32];
    x = warp(x, at);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 32) {
      x = part[min(threadIdx.x, blockDim.x / 32 - 1)];
      if (threadIdx.x >= blockDim.x / 32) x = identity();
#pragma unroll
      for (int k = 4; k > 0; k >>= 1) {  // at most 8 warps
        Best other{__shfl_xor_sync(0xffffffffu, x.value, k), 0};
        if constexpr (kArg) other.index = __shfl_xor_sync(0xffffffffu, x.index, k);
        x = join(x, other);
      }
    }
    __syncthreads();
    return x;
  }
  /// Of `parts` [gridDim.y][kept].
  __device__ static void keep(const ReductionArgs& p, std::int64_t at, Best x) {
    if constexpr (kArg) {
      static_cast<Best*>(p.parts)[at] = x;
    } else {
      static_cast<float*>(p.parts)[at] = x.value;
    }
  }
  __device__ static Best kept(const ReductionArgs& p, std::int64_t at) {
    if constexpr (kArg) {
      return static_cast<const Best*>(p.parts)[at];
    } else {
      return {static_cast<const float*>(p.parts)[at], 0};
    }
  }
  template <class T>
  __device__ static void store(const ReductionArgs& p, std::int64_t at, Best x) {
    if constexpr (kArg) {
      static_cast<std::int64_t*>(p.y)[at] = x.index;
    } else {
      static_cast<T*>(p.y)[at] =
          from_float<T>(kKind == Reduce::sum ? x.value / p.divisor : x.value);
    }
  }
};

}  // namespace rm::cuda_ops
