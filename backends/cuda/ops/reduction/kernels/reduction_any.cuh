// A team of threads an element of y: a block over any axes, a warp or a block over a dense row in
// 16-byte vectors, or 8 lanes over kV neighbouring columns. Few elements of y: several blocks each,
// whose parts reduce_finish joins. The order of a sum is fixed. Bound: memory; so four loads of a
// thread are under way before the first is used, and blocks are short and many.
#pragma once

#include "_shim/launch_shim.hpp"
#include "reduction/kernels/reducer.cuh"

namespace rm::cuda_ops {

/// One block an element of y, any axes.
template <class T, Reduce kKind>
__global__ void __launch_bounds__(256) reduce_axes(const __grid_constant__ ReductionArgs p) {
  using R = Reducer<kKind>;
  overlap_begin(p.x, p.y);
  for (std::int64_t i = blockIdx.x; i < p.kept_total; i += gridDim.x) {
    std::int64_t base[2];
    kept_offsets(p, i, base);
    Best best = R::identity();
    for (std::int64_t j = threadIdx.x; j < p.reduced_total; j += blockDim.x) {
      std::int64_t at[1];
      walk_offsets(p.reduced, j, at);
      best = R::join(best, {to_float(static_cast<const T*>(p.x)[base[0] + at[0]]), j});
    }
    best = R::kArg ? R::block(R::warp(best), threadIdx.x % 32) : R::block(best, 0);
    if (threadIdx.x == 0) R::template store<T>(p, base[1], best);
  }
}

inline constexpr int kReduceLoads = 4;

/// Reduced elements dense: a warp (kWarp) or a block a row, or a block a part of it, in vectors.
template <class T, Reduce kKind, bool kWarp>
__global__ void __launch_bounds__(256) reduce_rows(const __grid_constant__ ReductionArgs p) {
  using R = Reducer<kKind>;
  constexpr int V = kVec<T>;
  const int threads = kWarp ? 32 : static_cast<int>(blockDim.x);
  const int teams = kWarp ? static_cast<int>(blockDim.x) / 32 : 1;
  const int thread = kWarp ? threadIdx.x % 32 : threadIdx.x;
  const std::int64_t packs = p.reduced_total / V;
  const std::int64_t share = (packs + gridDim.y - 1) / gridDim.y, begin = share * blockIdx.y;
  const std::int64_t left = min(packs - begin, share);
  const int count = left < 0 ? 0 : static_cast<int>(left);  // rows have less than 2^31
  overlap_begin(p.x, p.y);
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * teams +
                        (kWarp ? static_cast<int>(threadIdx.x) / 32 : 0);
       i < p.kept_total; i += static_cast<std::int64_t>(gridDim.x) * teams) {
    std::int64_t base[2];
    kept_offsets(p, i, base);
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
      R::keep(p, blockIdx.y * p.kept_total + i, best);
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
  const std::int64_t share = (p.reduced_total + gridDim.y - 1) / gridDim.y;
  const std::int64_t first = share * blockIdx.y + threadIdx.y;
  const std::int64_t last = min(p.reduced_total, share * (blockIdx.y + 1));
  if (kV > 1 && p.flat && p.reduced_pitch != 0 && threadIdx.x % 8 == 0 && i < p.kept_total) {
    for (int u = 0; u < kReduceLoads; ++u) {
      const std::int64_t j = first + 8 * u;
      if (j >= last) break;
      overlap_ask(static_cast<const T*>(p.x) + i + j * p.reduced_pitch,
                  min(static_cast<std::int64_t>(128), (p.kept_total - i) * sizeof(T)));
    }
  }
  overlap_begin(p.x, p.y);
  Running r[kV];
#pragma unroll
  for (int k = 0; k < kV; ++k) r[k] = {R::kStart, 0};
  if (i < p.kept_total) {
    std::int64_t base[2];
    kept_offsets(p, i, base);
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
    if (p.reduced_pitch != 0) {
      const std::int64_t step = p.reduced_pitch;
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
    if (column >= p.kept_total) break;
    Best best = R::identity();
#pragma unroll
    for (int lane = 0; lane < 8; ++lane) {
      Best other{value[lane][c], 0};
      if constexpr (R::kArg) other.index = index[lane][c];
      best = R::join(best, other);
    }
    if (p.parts) {
      R::keep(p, blockIdx.y * p.kept_total + column, best);
    } else {
      std::int64_t base[2];
      kept_offsets(p, column, base);
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
  overlap_begin(p.parts, p.y);
  if (i < p.kept_total) {
#pragma unroll 8
    for (int s = lane; s < count; s += lanes)
      best = R::join(best, R::kept(p, s * p.kept_total + i));
  }
  part[threadIdx.x] = best;
  for (int k = 128; k >= width; k >>= 1) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < k) {
      part[threadIdx.x] = R::join(part[threadIdx.x], part[threadIdx.x + k]);
    }
  }
  if (static_cast<int>(threadIdx.x) >= width || i >= p.kept_total) return;
  std::int64_t base[2];
  kept_offsets(p, i, base);
  R::template store<T>(p, base[1], part[threadIdx.x]);
}

}  // namespace rm::cuda_ops
