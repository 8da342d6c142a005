// A team of threads an element of y: a block over any axes, a warp or a block over a dense row in
// 16-byte vectors, or 8 lanes over kV neighbouring columns. Few elements of y: several blocks each,
// whose parts reduce_finish joins. The order of a sum is fixed. Bound: memory; so four loads of a
// thread are under way before the first is used, and blocks are short and many.
#pragma once

#include <type_traits>

#include "_shim/async_shim.cuh"
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
  void* parts;      // [gridDim.y][kept] of Best (arg*) or float; null: one block along the
                    // reduced axes
  float divisor;    // of a sum: 1, or the number of elements
  Walk<2> kept;     // offsets in x and y
  Walk<1> reduced;  // offsets in x
};

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
    if (threadIdx.x == 0) {
      for (int w = 1; w < static_cast<int>(blockDim.x) / 32; ++w) x = join(x, part[w]);
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

/// One block an element of y, any axes.
template <class T, Reduce kKind>
__global__ void __launch_bounds__(256) reduce_axes(const __grid_constant__ ReductionArgs p) {
  using R = Reducer<kKind>;
  for (std::int64_t i = blockIdx.x; i < p.kept.total; i += gridDim.x) {
    std::int64_t base[2];
    walk_offsets(p.kept, i, base);
    Best best = R::identity();
    for (std::int64_t j = threadIdx.x; j < p.reduced.total; j += blockDim.x) {
      std::int64_t at[1];
      walk_offsets(p.reduced, j, at);
      best = R::join(best, {to_float(static_cast<const T*>(p.x)[base[0] + at[0]]), j});
    }
    best = R::kArg ? R::block(R::warp(best), threadIdx.x % 32) : R::block(best, 0);
    if (threadIdx.x == 0) R::template store<T>(p, base[1], best);
  }
}

inline constexpr int kReduceLoads = 4;

/// reduce_finish may be brought to the multiprocessors while this grid ends.
__device__ __forceinline__ void reduce_next() {
#if __CUDA_ARCH__ >= 900
  launch_dependents();
#endif
}

/// Reduced elements dense: a warp (kWarp) or a block a row, or a block a part of it, in vectors.
template <class T, Reduce kKind, bool kWarp>
__global__ void __launch_bounds__(256) reduce_rows(const __grid_constant__ ReductionArgs p) {
  using R = Reducer<kKind>;
  constexpr int V = kVec<T>;
  const int threads = kWarp ? 32 : static_cast<int>(blockDim.x);
  const int teams = kWarp ? static_cast<int>(blockDim.x) / 32 : 1;
  const int thread = kWarp ? threadIdx.x % 32 : threadIdx.x;
  if (p.parts) reduce_next();
  const std::int64_t packs = p.reduced.total / V;
  const std::int64_t share = (packs + gridDim.y - 1) / gridDim.y, begin = share * blockIdx.y;
  const std::int64_t left = min(packs - begin, share);
  const int count = left < 0 ? 0 : static_cast<int>(left);  // rows have less than 2^31
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * teams +
                        (kWarp ? static_cast<int>(threadIdx.x) / 32 : 0);
       i < p.kept.total; i += static_cast<std::int64_t>(gridDim.x) * teams) {
    std::int64_t base[2];
    walk_offsets(p.kept, i, base);
    const uint4* row = reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + base[0]) + begin;
    Running r{R::kStart, static_cast<unsigned>(thread)};
    Pack<T, V> none;
#pragma unroll
    for (int k = 0; k < V; ++k) none.v[k] = from_float<T>(R::kStart);
    uint4 held = *reinterpret_cast<const uint4*>(&none);
#pragma unroll 1
    for (int j = thread; j < count; j += kReduceLoads * threads) {
      uint4 pack[kReduceLoads];
#pragma unroll
      for (int u = 0; u < kReduceLoads; ++u) {
        if (j + u * threads < count) pack[u] = row[j + u * threads];
      }
#pragma unroll
      for (int u = 0; u < kReduceLoads; ++u) {
        if (j + u * threads < count) R::template step<T>(r, held, pack[u], j + u * threads);
      }
    }
    Best best = R::identity();
    if (thread < count) {
      best = {r.value, 0};
      if constexpr (R::kArg) {
        int at = V - 1;
        float v[V];
        unpack<T>(held, v);
#pragma unroll
        for (int k = V - 2; k >= 0; --k) {
          if (v[k] == r.value || v[k] != v[k]) at = k;
        }
        best.index = (begin + r.at) * V + at;
      }
    }
    best = kWarp ? R::warp(best, r.at) : R::block(best, r.at);
    if (thread != 0) continue;
    if (p.parts) {
      R::keep(p, blockIdx.y * p.kept.total + i, best);
    } else {
      R::template store<T>(p, base[1], best);
    }
  }
}

/// The last kept axis dense in x: 32 x kV columns by 8 lanes a block, a part of the reduced axes
/// each along the grid's second axis. kV > 1: the columns come in aligned vectors.
template <class T, Reduce kKind, int kV>
__global__ void __launch_bounds__(256) reduce_columns(const __grid_constant__ ReductionArgs p) {
  using R = Reducer<kKind>;
  __shared__ float value[8][32 * kV];
  __shared__ std::int64_t index[R::kArg ? 8 : 1][R::kArg ? 32 * kV : 1];
  if (p.parts) reduce_next();
  const std::int64_t i = (blockIdx.x * 32ll + threadIdx.x) * kV;
  const std::int64_t share = (p.reduced.total + gridDim.y - 1) / gridDim.y;
  const std::int64_t first = share * blockIdx.y + threadIdx.y;
  const std::int64_t last = min(p.reduced.total, share * (blockIdx.y + 1));
  Running r[kV];
#pragma unroll
  for (int k = 0; k < kV; ++k) r[k] = {R::kStart, 0};
  if (i < p.kept.total) {
    std::int64_t base[2];
    walk_offsets(p.kept, i, base);
    const T* x = static_cast<const T*>(p.x) + base[0];
    unsigned count = 0;
    const auto take = [&](const auto& pack) {
      float v[kV];
      if constexpr (kV == 1) {
        v[0] = to_float(pack);
      } else {
        unpack<T>(pack, v);
      }
#pragma unroll
      for (int k = 0; k < kV; ++k) R::step(r[k], v[k], count);
      ++count;
    };
    using P = std::conditional_t<kV == 1, T, uint4>;
    std::int64_t j = first;
    if (p.reduced.rank == 1) {
      const std::int64_t step = p.reduced.stride[0][0];
#pragma unroll 1
      for (; j < last; j += 8 * kReduceLoads) {
        P pack[kReduceLoads];
#pragma unroll
        for (int u = 0; u < kReduceLoads; ++u) {
          if (j + u * 8 < last) pack[u] = *reinterpret_cast<const P*>(x + (j + u * 8) * step);
        }
#pragma unroll
        for (int u = 0; u < kReduceLoads; ++u) {
          if (j + u * 8 < last) take(pack[u]);
        }
      }
    }
    for (; j < last; j += 8) {
      std::int64_t at[1];
      walk_offsets(p.reduced, j, at);
      take(*reinterpret_cast<const P*>(x + at[0]));
    }
  }
#pragma unroll
  for (int k = 0; k < kV; ++k) {
    value[threadIdx.y][threadIdx.x * kV + k] = r[k].value;
    if constexpr (R::kArg) {
      index[threadIdx.y][threadIdx.x * kV + k] =
          first < last ? first + r[k].at * 8ll : R::identity().index;
    }
  }
  __syncthreads();
  for (int c = threadIdx.y * 32 + threadIdx.x; c < 32 * kV; c += 256) {
    const std::int64_t column = blockIdx.x * 32ll * kV + c;
    if (column >= p.kept.total) break;
    Best best = R::identity();
#pragma unroll
    for (int lane = 0; lane < 8; ++lane) {
      Best other{value[lane][c], 0};
      if constexpr (R::kArg) other.index = index[lane][c];
      best = R::join(best, other);
    }
    if (p.parts) {
      R::keep(p, blockIdx.y * p.kept.total + column, best);
    } else {
      std::int64_t base[2];
      walk_offsets(p.kept, column, base);
      R::template store<T>(p, base[1], best);
    }
  }
}

/// y from `count` parts an element: `width` elements (a power of two up to 32) a block, by lanes.
template <class T, Reduce kKind>
__global__ void __launch_bounds__(256)
    reduce_finish(const __grid_constant__ ReductionArgs p, int count, int width) {
  using R = Reducer<kKind>;
  __shared__ Best part[256];
  const int lanes = 256 / width, lane = static_cast<int>(threadIdx.x) / width;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * width + threadIdx.x % width;
  Best best = R::identity();
#if __CUDA_ARCH__ >= 900
  wait_for_previous();
#endif
  if (i < p.kept.total) {
#pragma unroll 8
    for (int s = lane; s < count; s += lanes)
      best = R::join(best, R::kept(p, s * p.kept.total + i));
  }
  part[threadIdx.x] = best;
  for (int k = 128; k >= width; k >>= 1) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < k) {
      part[threadIdx.x] = R::join(part[threadIdx.x], part[threadIdx.x + k]);
    }
  }
  if (static_cast<int>(threadIdx.x) >= width || i >= p.kept.total) return;
  std::int64_t base[2];
  walk_offsets(p.kept, i, base);
  R::template store<T>(p, base[1], part[threadIdx.x]);
}

}  // namespace rm::cuda_ops
