// Many query rows on Hopper: one warpgroup copies tiles by the copy engine, kWarpgroups others take
// 64 query rows each. A warpgroup asks for the next tile's scores before it softens this one's and
// adds its weights times v meanwhile, so that tensor cores and exponentials overlap; warpgroups
// take turns in asking. Tiles that no row of the block sees are not read. Bound: tensor cores.
#pragma once

#include "sdpa/kernels/sdpa_wgmma_rows_sm90a.cuh"

namespace rm::cuda_ops {

/// What a block is made of: warpgroups of 64 rows, keys of a tile, stages of queries; whether its
/// warpgroups share the keys of 64 rows. Then each takes every kWarpgroups-th tile, and with it
/// that tile's stage.
template <int kHeadDim, int kGroups, int kTileKeys, int kQueries, bool kShared = false>
struct WgmmaShape {
  static constexpr int kD = kHeadDim, kWarpgroups = kGroups, kKeys = kTileKeys;
  static constexpr int kStages = kShared ? kWarpgroups : 2;
  static constexpr bool kShare = kShared;
  static constexpr int kQueryStages = kQueries;
  static constexpr int kRows = kWarpgroups * 64, kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kFew = kWarpgroups == 3 ? 32 : 24, kMany = kWarpgroups == 3 ? 160 : 240;
  static constexpr int kQueryBytes = kRows * kD * 2, kTileBytes = kKeys * kD * 2;
  static constexpr int kRings = kQueryStages * kQueryBytes;  // where keys and values start
  static constexpr int kJoinFloats = kD / 2 + 4;  // of a thread, where shared rows are added up
  static constexpr int kMemory = 1024 + kRings + 2 * kStages * kTileBytes;
  static_assert(!kShare || (kWarpgroups - 1) * 512 * kJoinFloats <= 2 * kStages * kTileBytes);
};

/// The blocks of rows in their order: all of a head, or, causal, the longest of a set of heads
/// whose keys fit the L2 cache.
struct WgmmaOrder {
  int blocks, total, set;  // blocks of rows a head, all, heads of a set (0: one head after another)
  int pieces, pieces_from;  // blocks of 64 shared rows of a head, and their first row
};

/// What this block takes in a round: every second round backwards, so that who got the longest gets
/// the shortest.
__device__ __forceinline__ int wgmma_turn(int round) {
  const int at = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  return round * static_cast<int>(gridDim.x) + at;
}

template <class Shape>
__device__ __forceinline__ WgmmaTile wgmma_tile(const SdpaArgs& p, const WgmmaOrder& order, int i) {
  constexpr int kRows = Shape::kShare ? 64 : Shape::kRows, kKeys = Shape::kKeys;
  int head, block;
  if constexpr (Shape::kShare) {
    head = i / order.pieces, block = i % order.pieces;
  } else if (order.set == 0) {
    head = i / order.blocks, block = i % order.blocks;
  } else {
    const int set = i / (order.set * order.blocks), rest = i % (order.set * order.blocks);
    const int width = min(order.set, p.batch * p.heads - set * order.set);
    head = set * order.set + rest % width, block = order.blocks - 1 - rest / width;
  }
  WgmmaTile t;
  t.b = head / p.heads, t.h = head % p.heads;
  t.s0 = (Shape::kShare ? order.pieces_from : 0) + block * kRows;
  t.keys = keys_of(p, t.b);
  const int last = visible_keys(p, t.keys, min(p.rows, t.s0 + kRows) - 1);
  t.tiles = (last + kKeys - 1) / kKeys;
  return t;
}

/// Barriers of a block, 8 bytes each.
struct WgmmaBarriers {
  std::uint32_t base;
  static constexpr int kBytes = 32 + 32 * 3;
  __device__ __forceinline__ std::uint32_t q_full(int s) const { return base + 16 * s; }
  __device__ __forceinline__ std::uint32_t q_empty(int s) const { return base + 8 + 16 * s; }
  __device__ __forceinline__ std::uint32_t k_full(int s) const { return base + 32 + 32 * s; }
  __device__ __forceinline__ std::uint32_t k_empty(int s) const { return base + 40 + 32 * s; }
  __device__ __forceinline__ std::uint32_t v_full(int s) const { return base + 48 + 32 * s; }
  __device__ __forceinline__ std::uint32_t v_empty(int s) const { return base + 56 + 32 * s; }
};

/// One thread asks for every tile of the block, keys of a tile before the values of the last one,
/// in the order in which they will be used.
template <class Shape>
__device__ __forceinline__ void wgmma_copies(const SdpaArgs& p, const WgmmaOrder& order,
                                             const CUtensorMap* q_map, const CUtensorMap* k_map,
                                             const CUtensorMap* v_map, const WgmmaBarriers& bars,
                                             std::uint32_t memory) {
  constexpr int kD = Shape::kD;
  const std::uint32_t k_ring = memory + Shape::kRings,
                      v_ring = k_ring + Shape::kStages * Shape::kTileBytes;
  RingPlace<Shape::kStages> k_at, v_at;
  RingPlace<Shape::kQueryStages> q_at;
  for (int round = 0, i; (i = wgmma_turn(round)) < order.total; ++round) {
    const WgmmaTile t = wgmma_tile<Shape>(p, order, i);
    if (t.tiles == 0) continue;
    const int g = t.h / p.ratio;
    const auto copy = [&](const CUtensorMap* map, std::uint32_t to, int n, std::uint32_t bar) {
      barrier_expect(bar, Shape::kTileBytes);
#pragma unroll
      for (int c = 0; c < kD / 64; ++c) {
        tensor_copy(to + c * Shape::kKeys * 128, map, c * 64, n * Shape::kKeys, g, t.b, bar);
      }
    };
    const auto ask_k = [&](int n) {
      barrier_wait(bars.k_empty(k_at.stage), k_at.parity ^ 1);
      copy(k_map, k_ring + k_at.stage * Shape::kTileBytes, n, bars.k_full(k_at.stage));
      k_at.next();
    };
    const auto ask_v = [&](int n) {
      barrier_wait(bars.v_empty(v_at.stage), v_at.parity ^ 1);
      copy(v_map, v_ring + v_at.stage * Shape::kTileBytes, n, bars.v_full(v_at.stage));
      v_at.next();
    };
    const std::uint32_t q_full = bars.q_full(q_at.stage);
    const std::uint32_t q = memory + q_at.stage * Shape::kQueryBytes;
    barrier_wait(bars.q_empty(q_at.stage), q_at.parity ^ 1);
    q_at.next();
    barrier_expect(q_full, Shape::kQueryBytes);
#pragma unroll
    for (int c = 0; c < kD / 64; ++c) {
      tensor_copy(q + c * Shape::kRows * 128, q_map, c * 64, t.s0, t.h, t.b, q_full);
    }
    ask_k(t.tiles - 1);
    for (int n = t.tiles - 1; n > 0; --n) {
      ask_k(n - 1);
      ask_v(n);
    }
    ask_v(0);
  }
}

/// One warpgroup's work. Warpgroups ask for products in turns.
template <class T, class Shape>
__device__ __forceinline__ void wgmma_rows(const SdpaArgs& p, const WgmmaOrder& order,
                                           const WgmmaBarriers& bars, unsigned char* generic,
                                           std::uint32_t memory) {
  constexpr int kKeys = Shape::kKeys, kD = Shape::kD;
  const std::uint32_t k_ring = memory + Shape::kRings,
                      v_ring = k_ring + Shape::kStages * Shape::kTileBytes;
  const int group = uniform_warp() / 4 - 1, lane = threadIdx.x % 32;
  const int row_of_group = uniform_warp() % 4 * 16 + lane / 4;
  const int mine = 1 + group, following = 1 + (group + 1) % Shape::kWarpgroups;
  if (!Shape::kShare && group == 0) named_barrier_arrive(1, 256);
  constexpr bool kShared = Shape::kShare;
  constexpr int kStride = kShared ? Shape::kWarpgroups : 1;
  RingPlace<Shape::kStages> k_at, v_at;
  if constexpr (kShared) k_at.stage = v_at.stage = group;
  RingPlace<Shape::kQueryStages> q_at;
  const auto release = [&](std::uint32_t bar) { barrier_arrive_where(lane == 0, bar, kStride); };
  const auto next = [](RingPlace<Shape::kStages>& at) {
    if constexpr (kShared) {
      at.parity ^= 1;
    } else {
      at.next();
    }
  };
  WgmmaRows<T, kD, kKeys> w;
  for (int round = 0, i; (i = wgmma_turn(round)) < order.total; ++round) {
    const WgmmaTile t = wgmma_tile<Shape>(p, order, i);
    const int rows0 = kShared ? 0 : group * 64, s = t.s0 + rows0 + row_of_group;
    w.clear();
    if (t.tiles == 0) {
      if (!kShared || group == 0) w.store(p, t, s);
      continue;
    }
    const int seen[2] = {visible_keys(p, t.keys, s), visible_keys(p, t.keys, s + 8)};
    const int fewest = visible_keys(p, t.keys, t.s0 + rows0);
    const float scale = p.scale * kLog2E;
    float keep[2];
    const auto hide = [&](int n) {
      const int rest[2] = {seen[0] - n * kKeys, seen[1] - n * kKeys};
      w.hide(rest);
    };
    const std::uint32_t q = memory + q_at.stage * Shape::kQueryBytes + rows0 * 128;
    int n = t.tiles - 1 - (kShared ? group : 0);
    barrier_wait(bars.q_full(q_at.stage), q_at.parity);
    if (!kShared || n >= 0) {
      barrier_wait(bars.k_full(k_at.stage), k_at.parity);
      wgmma_fence();
      w.ask_scores(q, Shape::kRows * 128, k_ring + k_at.stage * Shape::kTileBytes);
      wgmma_wait<0>();
      pin(w.score);
      release(bars.k_empty(k_at.stage));
      next(k_at);
      if ((n + 1) * kKeys > fewest) hide(n);
      w.soften(scale, keep);
      w.pack_weights();
      if ((n + 1) * kKeys > t.keys && t.keys < p.keys) {
        // Values behind the length may be anything, also NaN: zero them.
        barrier_wait(bars.v_full(v_at.stage), v_at.parity);
        unsigned char* tile =
            generic + Shape::kRings + (Shape::kStages + v_at.stage) * Shape::kTileBytes;
        const int first = t.keys - n * kKeys, threads = kShared ? 128 : Shape::kThreads - 128;
        const int thread = kShared ? threadIdx.x % 128 : threadIdx.x - 128;
        for (int at = thread; at < (kKeys - first) * kD / 8; at += threads) {
          const int row = first + at % (kKeys - first), piece = at / (kKeys - first);
          *reinterpret_cast<uint4*>(tile + piece / 8 * kKeys * 128 + row * 128 + piece % 8 * 16) =
              make_uint4(0, 0, 0, 0);
        }
        fence_async_proxy();
        named_barrier(kShared ? 6 : 5, threads);
      }
      const auto step = [&](auto hidden) {
        barrier_wait(bars.k_full(k_at.stage), k_at.parity);
        if constexpr (!kShared) named_barrier(mine, 256);
        pin(w.sum);
        wgmma_fence();
        w.ask_scores(q, Shape::kRows * 128, k_ring + k_at.stage * Shape::kTileBytes);
        barrier_wait(bars.v_full(v_at.stage), v_at.parity);
        wgmma_fence();
        w.ask_sums(v_ring + v_at.stage * Shape::kTileBytes);
        if constexpr (!kShared) named_barrier_arrive(following, 256);
        wgmma_wait<1>();
        pin(w.score);
        release(bars.k_empty(k_at.stage));
        next(k_at);
        if constexpr (decltype(hidden)::value) hide(n);
        w.soften(scale, keep);
        wgmma_wait<0>();
        pin(w.sum);
        release(bars.v_empty(v_at.stage));
        next(v_at);
        w.pack_weights();
        w.scale_sums(keep);
      };
      for (n -= kStride; n >= 0 && (n + 1) * kKeys > fewest; n -= kStride) step(std::true_type{});
      for (; n >= 0; n -= kStride) step(std::false_type{});
      barrier_wait(bars.v_full(v_at.stage), v_at.parity);
      pin(w.sum);
      wgmma_fence();
      w.ask_sums(v_ring + v_at.stage * Shape::kTileBytes);
      wgmma_wait<0>();
      pin(w.sum);
      release(bars.v_empty(v_at.stage));
      next(v_at);
    }
    if (lane == 0) barrier_arrive(bars.q_empty(q_at.stage));
    q_at.next();
    if constexpr (kShared) {
      w.template join<Shape>(reinterpret_cast<float*>(generic + Shape::kRings), group);
    }
    if (!kShared || group == 0) w.store(p, t, s);
  }
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sdpa_wgmma(const __grid_constant__ SdpaArgs p, const __grid_constant__ WgmmaOrder order,
               const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
               const __grid_constant__ CUtensorMap v_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char raw[];
  __shared__ __align__(8) std::uint64_t storage[WgmmaBarriers::kBytes / 8];
  const std::uint32_t start = shared_address(raw), memory = (start + 1023) & ~1023u;
  const WgmmaBarriers bars{shared_address(storage)};
  launch_dependents();  // a second kernel takes the rest of the rows where blocks of this one end
  if (threadIdx.x == 0) {
    for (int s = 0; s < Shape::kQueryStages; ++s) {
      barrier_init(bars.q_full(s), 1), barrier_init(bars.q_empty(s), Shape::kWarpgroups * 4);
    }
    for (int s = 0; s < Shape::kStages; ++s) {
      barrier_init(bars.k_full(s), 1), barrier_init(bars.v_full(s), 1);
      barrier_init(bars.k_empty(s), Shape::kWarpgroups * 4);
      barrier_init(bars.v_empty(s), Shape::kWarpgroups * 4);
    }
    barrier_init_done();
  }
  __syncthreads();
  if (uniform_warp() < 4) {
    fewer_registers<Shape::kFew>();
    if (uniform_warp() == 0 && elect_lane()) {
      wgmma_copies<Shape>(p, order, &q_map, &k_map, &v_map, bars, memory);
    }
  } else {
    more_registers<Shape::kMany>();
    wgmma_rows<T, Shape>(p, order, bars, raw + (memory - start), memory);
  }
  // Who waits for the second kernel waits for the first one too.
  if constexpr (Shape::kShare) wait_for_previous();
#else
  __trap();  // why_not keeps other architectures away
#endif
}

}  // namespace rm::cuda_ops
