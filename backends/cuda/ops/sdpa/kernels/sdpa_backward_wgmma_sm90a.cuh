// The gradient of attention on Hopper. A block keeps 128 rows of one side (keys and values, or
// queries and d_o) and goes through tiles of the other: scores and d_o v^T by tensor cores, then
// weights and their slopes in registers, which multiply the tiles again. dk and dv sum over tiles
// in one block, dq in a second kernel, so that no sum depends on an order of arrival. Bound: tensor
// cores.
#pragma once

#include "sdpa/kernels/sdpa_backward_rows_sm90a.cuh"
#include "sdpa/kernels/sdpa_backward_statistics_any.cuh"

namespace rm::cuda_ops {

template <int kD, GradPart kPart>
__device__ __forceinline__ GradBlock grad_block(const SdpaArgs& p) {
  using Shape = GradShape<kD, kPart>;
  constexpr bool kQueries = kPart == GradPart::queries;
  const int heads = kQueries ? p.heads : p.groups;
  GradBlock t;
  t.b = blockIdx.y / heads, t.head = blockIdx.y % heads;
  t.keys = keys_of(p, t.b);
  if constexpr (kQueries) {
    t.row0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Shape::kRows;  // longest first
    const int last = visible_keys(p, t.keys, min(p.rows, t.row0 + Shape::kRows) - 1);
    t.first = 0, t.turns = 1, t.tiles = (last + Shape::kTile - 1) / Shape::kTile;
  } else {
    t.row0 = blockIdx.x * Shape::kRows;
    const std::int64_t from = p.causal ? t.row0 - p.causal_offset : 0;  // the first that sees row0
    const int first = static_cast<int>(from < 0 ? 0 : from < p.rows ? from : p.rows);
    t.first = first / Shape::kTile, t.turns = p.ratio;
    t.tiles = t.row0 < t.keys ? (p.rows + Shape::kTile - 1) / Shape::kTile - t.first : 0;
  }
  return t;
}

struct GradMaps {
  CUtensorMap rows_1, rows_2, tiles_1, tiles_2;  // k, v and q, d_o; or q, d_o and k, v
};

/// One thread asks for the block's rows and then for every tile.
template <int kD, GradPart kPart>
__device__ __forceinline__ void grad_copies(const SdpaGradArgs& p, const GradMaps& maps,
                                            const GradBlock& t, std::uint32_t memory,
                                            std::uint32_t bars) {
  using Shape = GradShape<kD, kPart>;
  constexpr bool kQueries = kPart == GradPart::queries;
  barrier_expect(bars, 2 * Shape::kRowsBytes);
#pragma unroll
  for (int c = 0; c < kD / 64; ++c) {
    const std::uint32_t to = memory + c * Shape::kRows * 128;
    tensor_copy(to, &maps.rows_1, c * 64, t.row0, t.head, t.b, bars);
    tensor_copy(to + Shape::kRowsBytes, &maps.rows_2, c * 64, t.row0, t.head, t.b, bars);
  }
  RingPlace<Shape::kStages> at;
  const std::int64_t all = static_cast<std::int64_t>(p.f.batch) * p.f.heads * grad_padded(p.f.rows);
  for (int turn = 0; turn < t.turns; ++turn) {
    const int head = kQueries ? t.head / p.f.ratio : t.head * p.f.ratio + turn;
    for (int n = t.first; n < t.first + t.tiles; ++n) {
      const std::uint32_t full = bars + 8 + 16 * at.stage;
      const std::uint32_t to = memory + 2 * Shape::kRowsBytes + at.stage * Shape::kStageBytes;
      barrier_wait(full + 8, at.parity ^ 1);
      barrier_expect(full, Shape::kStageBytes + (kQueries ? 0 : 2 * Shape::kTile * 4));
#pragma unroll
      for (int c = 0; c < kD / 64; ++c) {
        const std::uint32_t chunk = to + c * Shape::kTile * 128;
        tensor_copy(chunk, &maps.tiles_1, c * 64, n * Shape::kTile, head, t.b, full);
        tensor_copy(chunk + Shape::kTileBytes, &maps.tiles_2, c * 64, n * Shape::kTile, head, t.b,
                    full);
      }
      if constexpr (!kQueries) {
        const float* from =
            p.delta + (static_cast<std::int64_t>(t.b) * p.f.heads + head) * grad_padded(p.f.rows) +
            n * Shape::kTile;
        const std::uint32_t place = memory + Shape::kStatistics + at.stage * 2 * Shape::kTile * 4;
        bulk_copy(place, from, Shape::kTile * 4, full);
        bulk_copy(place + Shape::kTile * 4, from + all, Shape::kTile * 4, full);
      }
      at.next();
    }
  }
}

template <class T, int kD, GradPart kPart>
__device__ __forceinline__ void grad_rows(const SdpaGradArgs& p, const GradBlock& t,
                                          unsigned char* generic, std::uint32_t memory,
                                          std::uint32_t bars) {
  using Rows = GradRows<T, kD, kPart>;
  using Shape = GradShape<kD, kPart>;
  constexpr int kTile = Shape::kTile;
  constexpr bool kQueries = Rows::kQueries;
  const SdpaArgs& f = p.f;
  const int group = uniform_warp() / 4 - 1, lane = threadIdx.x % 32;
  const int group0 = t.row0 + group * 64, r = group0 + uniform_warp() % 4 * 16 + lane / 4;
  const std::uint32_t rows = memory + group * 64 * 128;
  const float scale = f.scale * kLog2E;
  Rows w;
#pragma unroll
  for (float& x : w.first) x = 0.0f;
#pragma unroll
  for (float& x : w.second) x = 0.0f;
  float lse[2] = {}, delta[2] = {};
  if constexpr (kQueries) {
    const int padded = grad_padded(f.rows);
    const std::int64_t all = static_cast<std::int64_t>(f.batch) * f.heads * padded,
                       at = (static_cast<std::int64_t>(t.b) * f.heads + t.head) * padded;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is = r + 8 * half < f.rows;
      lse[half] = is ? p.delta[at + r + 8 * half] : __int_as_float(0x7f800000);
      delta[half] = is ? p.delta[all + at + r + 8 * half] : 0.0f;
    }
  }
  // Rows g and g + 8 of this thread see the columns between these: keys of a query, or queries of a
  // key.
  int sees_from[2] = {}, sees_to[2] = {f.rows, f.rows};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = r + 8 * half;
    if constexpr (kQueries) {
      sees_to[half] = row < f.rows ? visible_keys(f, t.keys, row) : 0;
    } else {
      const std::int64_t from = f.causal ? row - f.causal_offset : 0;
      sees_from[half] = static_cast<int>(from < 0 ? 0 : from < f.rows ? from : f.rows);
      if (row >= t.keys) sees_to[half] = 0;
    }
  }
  const int total = t.turns * t.tiles;
  // Where registers do not hold two tiles' products beside the sums, d_o v^T is asked for late.
  constexpr bool kLate = kPart == GradPart::keys && kD == 128;
  RingPlace<Shape::kStages> at;
  std::uint32_t weights[Rows::kSecond ? kTile / 4 : 1], slopes[Rows::kFirst ? kTile / 4 : 1];
  const auto ready = [&](int n) {
    barrier_wait(bars + 8 + 16 * at.stage, at.parity);
    if (kQueries && (n + 1) * kTile > t.keys && t.keys < f.keys) {
      // Keys behind the length may be anything, also NaN: zero them.
      const int from = t.keys - n * kTile, count = kTile - from;
      unsigned char* stage = generic + 2 * Shape::kRowsBytes + at.stage * Shape::kStageBytes;
      for (int i = static_cast<int>(threadIdx.x) - 128; i < count * kD / 8;
           i += Shape::kThreads - 128) {
        const int row = from + i % count, piece = i / count;
        *reinterpret_cast<uint4*>(stage + piece / 8 * kTile * 128 + row * 128 + piece % 8 * 16) =
            make_uint4(0, 0, 0, 0);
      }
      fence_async_proxy();
      named_barrier(5, Shape::kThreads - 128);
    }
  };
  const auto ask = [&] {
    const std::uint32_t tile = memory + 2 * Shape::kRowsBytes + at.stage * Shape::kStageBytes;
    wgmma_fence();
    Rows::ask_products(w.score, rows, tile);
    if constexpr (Rows::kFirst && !kLate) {
      Rows::ask_products(w.slope, rows + Shape::kRowsBytes, tile + Shape::kTileBytes);
    }
  };
  // Scores and d_o v^T of a tile, `pending` groups of products after them, become packed weights
  // and slopes.
  const auto weigh = [&](int turn, int n, auto pending) {
    constexpr int kPending = decltype(pending)::value;
    const int column0 = n * kTile;
    const float* columns =
        reinterpret_cast<const float*>(generic + Shape::kStatistics) + at.stage * 2 * kTile;
    wgmma_wait<kPending + (Rows::kFirst && !kLate ? 1 : 0)>();
    pin(w.score);
    bool all_seen = f.mask == nullptr;
    if constexpr (kQueries) {
      all_seen = all_seen && column0 + kTile <= visible_keys(f, t.keys, group0);
    } else {
      all_seen = all_seen && group0 + 63 < visible_keys(f, t.keys, column0);
    }
    if (f.mask == nullptr) {
      w.weigh(scale, lse, columns);
    } else {
      const int h = kQueries ? t.head : t.head * f.ratio + turn;
      w.weigh_masked(f, t, h, r, column0, lse, columns);
    }
    if (!all_seen) {
      const int from[2] = {sees_from[0] - column0, sees_from[1] - column0},
                to[2] = {sees_to[0] - column0, sees_to[1] - column0};
      w.hide(from, to);
    }
    if constexpr (kLate) {
      const std::uint32_t tile = memory + 2 * Shape::kRowsBytes + at.stage * Shape::kStageBytes;
      wgmma_wait<0>();
      pin(w.first), pin(w.second);
      wgmma_fence();
      Rows::ask_products(w.slope, rows + Shape::kRowsBytes, tile + Shape::kTileBytes);
      Rows::pack(weights, w.score);
    }
    if constexpr (Rows::kFirst) {
      wgmma_wait<kLate ? 0 : kPending>();
      pin(w.slope);
      w.find_slopes(delta, columns + kTile);
      if (!all_seen) w.hide_slopes();
    }
    if constexpr (!kLate) {
      wgmma_wait<0>();
      if constexpr (Rows::kFirst) pin(w.first);
      if constexpr (Rows::kSecond) pin(w.second);
      if constexpr (Rows::kSecond) Rows::pack(weights, w.score);
    }
    if constexpr (Rows::kFirst) Rows::pack(slopes, w.slope);
  };
  const auto ask_sums = [&](int stage) {
    const std::uint32_t tile = memory + 2 * Shape::kRowsBytes + stage * Shape::kStageBytes;
    if constexpr (Rows::kSecond) Rows::ask_sums(w.second, weights, tile + Shape::kTileBytes);
    if constexpr (Rows::kFirst) Rows::ask_sums(w.first, slopes, tile);
  };
  constexpr int kSums = (Rows::kFirst ? 1 : 0) + (Rows::kSecond ? 1 : 0);
  barrier_wait(bars, 0);
  if (total > 0) {
    ready(t.first);
    ask();
    weigh(0, t.first, std::integral_constant<int, 0>{});
    // While tensor cores multiply this tile's weights and slopes, the next one is weighed.
    for (int i = 1, turn = 0, n = t.first; i < total; ++i) {
      if (++n == t.first + t.tiles) n = t.first, ++turn;
      const int stage = at.stage;
      at.next();
      ready(n);
      if constexpr (Rows::kFirst) pin(w.first);
      if constexpr (Rows::kSecond) pin(w.second);
      ask();
      ask_sums(stage);
      weigh(turn, n, std::integral_constant<int, kSums>{});
      if (!kQueries || lane == 0) barrier_arrive(bars + 16 + 16 * stage);
    }
    wgmma_fence();
    ask_sums(at.stage);
    wgmma_wait<0>();
    if constexpr (Rows::kFirst) pin(w.first);
    if constexpr (Rows::kSecond) pin(w.second);
  }
  const float scales[2] = {f.scale, f.scale}, ones[2] = {1.0f, 1.0f};
  if constexpr (kQueries) {
    T* to = static_cast<T*>(p.dq) + t.b * p.dq_batch + t.head * p.dq_head;
    store_rows<T, kD>(w.first, scales, to, p.dq_row, r, f.rows, f.dim);
  } else {
    if constexpr (Rows::kFirst) {
      T* to = static_cast<T*>(p.dk) + t.b * p.dk_batch + t.head * p.dk_head;
      store_rows<T, kD>(w.first, scales, to, p.dk_row, r, f.keys, f.dim);
    }
    if constexpr (Rows::kSecond) {
      T* to = static_cast<T*>(p.dv) + t.b * p.dv_batch + t.head * p.dv_head;
      store_rows<T, kD>(w.second, ones, to, p.dv_row, r, f.keys, f.dim);
    }
  }
}

template <class T, int kD, GradPart kPart>
__global__ void __launch_bounds__(GradShape<kD, kPart>::kThreads, 1)
    sdpa_backward_wgmma(const __grid_constant__ SdpaGradArgs p,
                        const __grid_constant__ GradMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = GradShape<kD, kPart>;
  extern __shared__ unsigned char raw[];
  __shared__ __align__(8) std::uint64_t storage[1 + 2 * Shape::kStages];  // rows; full, empty
  const std::uint32_t start = shared_address(raw), memory = (start + 1023) & ~1023u;
  const std::uint32_t bars = shared_address(storage);
  launch_dependents();  // the next part needs nothing of this one: it fills this one's last turn
  if (threadIdx.x == 0) {
    barrier_init(bars, 1);
    for (int s = 0; s < Shape::kStages; ++s) {
      barrier_init(bars + 8 + 16 * s, 1);
      // Every thread reads its columns' statistics; tiles are read by warpgroups as one.
      barrier_init(bars + 16 + 16 * s, kPart == GradPart::queries ? Shape::kGroups * 4 : 256);
    }
    barrier_init_done();
  }
  __syncthreads();
  const GradBlock t = grad_block<kD, kPart>(p.f);
  if (uniform_warp() < 4) {
    fewer_registers<Shape::kFew>();
    if (uniform_warp() == 0 && elect_lane()) grad_copies<kD, kPart>(p, maps, t, memory, bars);
  } else {
    more_registers<Shape::kMany>();
    grad_rows<T, kD, kPart>(p, t, raw + (memory - start), memory, bars);
    // Who waits for the last part waits for all.
    if constexpr (kPart != GradPart::queries) wait_for_previous();
  }
#else
  __trap();  // why_not keeps other architectures away
#endif
}

}  // namespace rm::cuda_ops
