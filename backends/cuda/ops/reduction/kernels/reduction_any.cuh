// A team of threads an element of y: a block over any axes, a warp or a block over a dense row in
// 16-byte vectors, or 8 lanes over kV neighbouring columns. Few elements of y: several blocks each,
// whose parts reduce_finish joins. The order of a sum is fixed.
#pragma once

#include "_shim/device_shim.cuh"
#include "_shim/walk_shim.hpp"
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
  Best* parts;      // [gridDim.y][kept], or null: one block along the reduced axes
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
  /// Over the block; the first thread has the result.
  __device__ static Best block(Best x) {
    __shared__ Best part[32];
    x = warp(x);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    const int warps = blockDim.x / 32;
    x = static_cast<int>(threadIdx.x) < warps ? part[threadIdx.x] : identity();
    if (threadIdx.x < 32) x = warp(x);
    __syncthreads();
    return x;
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
    best = R::block(best);
    if (threadIdx.x == 0) R::template store<T>(p, base[1], best);
  }
}

/// Reduced elements dense: a warp (kWarp) or a block a row, or a block a part of it, in vectors.
template <class T, Reduce kKind, bool kWarp>
__global__ void __launch_bounds__(256) reduce_rows(const __grid_constant__ ReductionArgs p) {
  using R = Reducer<kKind>;
  constexpr int V = kVec<T>, kThreads = kWarp ? 32 : 256, kTeams = 256 / kThreads;
  const int thread = threadIdx.x % kThreads;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kTeams;
  const std::int64_t share = (p.reduced.total / V + gridDim.y - 1) / gridDim.y * V;
  const std::int64_t first = share * blockIdx.y + thread * V;
  const std::int64_t last = min(p.reduced.total, share * (blockIdx.y + 1));
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kTeams + threadIdx.x / kThreads;
       i < p.kept.total; i += step) {
    std::int64_t base[2];
    walk_offsets(p.kept, i, base);
    const T* row = static_cast<const T*>(p.x) + base[0];
    Running r{R::kStart, 0};
    unsigned at = 0;
#pragma unroll 4
    for (std::int64_t j = first; j < last; j += kThreads * V, at += V) {
      float v[V];
      load_vec<T, V>(row + j, v);
#pragma unroll
      for (int k = 0; k < V; ++k) R::step(r, v[k], at + k);
    }
    Best best = R::identity();
    if (first < last) {
      best = {r.value, first + static_cast<std::int64_t>(r.at / V) * kThreads * V + r.at % V};
    }
    best = kWarp ? R::warp(best) : R::block(best);
    if (thread != 0) continue;
    if (p.parts) {
      p.parts[blockIdx.y * p.kept.total + i] = best;
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
#pragma unroll 4
    for (std::int64_t j = first; j < last; j += 8, ++count) {
      std::int64_t at[1];
      walk_offsets(p.reduced, j, at);
      float v[kV];
      load_vec<T, kV>(x + at[0], v);
#pragma unroll
      for (int k = 0; k < kV; ++k) R::step(r[k], v[k], count);
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
      p.parts[blockIdx.y * p.kept.total + column] = best;
    } else {
      std::int64_t base[2];
      walk_offsets(p.kept, column, base);
      R::template store<T>(p, base[1], best);
    }
  }
}

/// y from `count` parts an element: 32 elements by 8 lanes a block.
template <class T, Reduce kKind>
__global__ void __launch_bounds__(256)
    reduce_finish(const __grid_constant__ ReductionArgs p, int count) {
  using R = Reducer<kKind>;
  __shared__ Best part[8][32];
  const std::int64_t i = blockIdx.x * 32ll + threadIdx.x;
  Best best = R::identity();
  if (i < p.kept.total) {
#pragma unroll 8
    for (int s = threadIdx.y; s < count; s += 8)
      best = R::join(best, p.parts[s * p.kept.total + i]);
  }
  part[threadIdx.y][threadIdx.x] = best;
  __syncthreads();
  if (threadIdx.y != 0 || i >= p.kept.total) return;
#pragma unroll
  for (int r = 1; r < 8; ++r) best = R::join(best, part[r][threadIdx.x]);
  std::int64_t base[2];
  walk_offsets(p.kept, i, base);
  R::template store<T>(p, base[1], best);
}

}  // namespace rm::cuda_ops
