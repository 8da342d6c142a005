// sdpa_decode for caches of few keys, where the time from one kernel to the next counts, not the bytes.
// A block holds all its keys at once (kTiles tiles of 16), which its number says and no length: it asks
// for them before the stream's previous kernel has ended. It is small enough to come to a
// multiprocessor beside a block of that kernel.
// Where the caches are stable (SdpaStepArgs::stable: what is behind the launch has left them alone since
// something that waited for all before it) the keys come into shared memory, else as far as the L2
// cache. How many there are is guessed by the length of before, which the previous kernels may be
// writing: it chooses what is asked for early, the length behind the wait what counts.
#pragma once

#include "sdpa/kernels/sdpa_decode_rows_sm80.cuh"

namespace rm::cuda_ops {

template <int kHeadDim, int kBlockWarps, int kMostTiles>
struct DecodeFewShape : DecodeMemory<kHeadDim, kBlockWarps, kMostTiles * 2 * 16 * kHeadDim * 2> {
  static constexpr int kKeys = 16, kTiles = kMostTiles, kTile = kKeys * kHeadDim * 2;
  static constexpr int kRounds = (kTiles + kBlockWarps - 1) / kBlockWarps;  // tiles of a warp
  static constexpr int kBlocks = 2;  // that a multiprocessor's registers hold
};

/// The tiles of a block of p.span; a warp's are `warp`, `warp` + kWarps, ..
template <class T, class Shape>
struct DecodeFewTiles {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys, kTile = Shape::kTile;
  const SdpaArgs& p;
  const T *k, *v;
  unsigned char* memory;
  int key0;  // the block's first

  __device__ __forceinline__ static int tile(int round) {
    return static_cast<int>(threadIdx.x) / 32 + round * Shape::kWarps;
  }
  __device__ __forceinline__ int first(int round) const { return key0 + tile(round) * kKeys; }
  /// Whether a warp's tile is one of the block's, with keys below `keys`.
  __device__ __forceinline__ bool has(int round, int keys) const {
    return tile(round) < p.span && first(round) < keys;
  }
  __device__ __forceinline__ unsigned char* at(int round) const {
    return memory + tile(round) * 2 * kTile;
  }
  /// Copies keys below `keys`, zeros behind them.
  __device__ __forceinline__ void ask(int round, int keys) const {
    const int at0 = first(round), valid = min(kKeys, keys - at0), lane = threadIdx.x % 32;
    const std::uint32_t to = shared_address(at(round));
    copy_tile<T, kD, kKeys, 32>(to, k + at0 * p.k_row, p.k_row, valid, p.dim, lane);
    copy_tile<T, kD, kKeys, 32>(to + kTile, v + at0 * p.v_row, p.v_row, valid, p.dim, lane);
  }
  /// The same as far as the L2 cache.
  __device__ __forceinline__ void prefetch(int round, int keys) const {
    const int at0 = first(round), count = min(kKeys, keys - at0), lane = threadIdx.x % 32;
    decode_ask_rows(k, p.k_row * 2, at0, count, p.dim * 2, lane);
    decode_ask_rows(v, p.v_row * 2, at0, count, p.dim * 2, lane);
  }
  /// Values that no row sees may be anything, and nothing times NaN is NaN.
  __device__ __forceinline__ void clear_values(int round, int keys) const {
    constexpr int kPieces = kD / 8;
    for (int i = (keys - first(round)) * kPieces + static_cast<int>(threadIdx.x) % 32;
         i < kKeys * kPieces; i += 32) {
      *reinterpret_cast<uint4*>(at(round) + kTile + swizzled<kD * 2>(i / kPieces, i % kPieces)) =
          uint4{0, 0, 0, 0};
    }
  }
};

template <class T, class Shape, class Step>
__device__ __forceinline__ void sdpa_decode_few_block(const SdpaArgs& p, const Step& f) {
  constexpr int kD = Shape::kD, kKeys = Shape::kKeys, kRounds = Shape::kRounds;
  static_assert(kRounds <= 2);  // what is waited for below
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) std::uint64_t received;
  launch_dependents();
  const int b = blockIdx.y / p.groups, g = blockIdx.y % p.groups, rows = p.ratio * p.rows;
  decode_join_begin<Shape>(p, rows, shared_address(&received));
  const DecodeFewTiles<T, Shape> tiles{p, static_cast<const T*>(p.k) + b * p.k_batch + g * p.k_head,
                                       static_cast<const T*>(p.v) + b * p.v_batch + g * p.v_head,
                                       memory, static_cast<int>(blockIdx.x) * p.span * kKeys};
  int asked = 0;  // keys below it are on their way
  if (p.early) {
    // A length that grows by one a call may be the last call's: a tile more.
    const int guess = min(p.keys, keys_of(p, b) + kKeys);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (!tiles.has(i, guess)) continue;
      if (p.stable) {
        tiles.ask(i, p.keys);
      } else {
        tiles.prefetch(i, guess);
      }
    }
    if (p.stable) asked = guess;
  }
  wait_for_previous();  // from here on everything that earlier work wrote is there
  const int keys = keys_of(p, b);
  std::int64_t position = -1;
  if constexpr (kSdpaStep<Step>) position = position_of(f);
  if (p.early && p.stable) copy_group_end();
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    if (tiles.has(i, keys) && !tiles.has(i, asked)) tiles.ask(i, keys);
    copy_group_end();
  }
  DecodeQuery<T, kD> query;
  query.load(p, f, b, g, rows);
  SdpaNewRow<T, kD> fresh;
  if constexpr (kSdpaStep<Step>) fresh.load(f, b, g);  // who needs it is not known yet
  query.look(p, rows, keys);
  SdpaWarp<T, kD, 1, kKeys> w;
  w.clear();
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    if (!tiles.has(i, keys)) break;
    const int first = tiles.first(i);
    if (i + 1 < kRounds) {
      copy_groups_wait<1>();
    } else {
      copy_groups_wait<0>();
    }
    __syncwarp();
    const bool ends = first + kKeys > keys;
    if (ends) tiles.clear_values(i, keys);
    if constexpr (kSdpaStep<Step>) {
      if (position >= first && position < min(first + kKeys, keys)) {
        unsigned char* there = tiles.at(i);
        fresh.patch(there, there + Shape::kTile, static_cast<int>(position) - first);
        fresh.append(p, f, b, g, position);
      }
    }
    __syncwarp();
    const std::uint32_t at = shared_address(tiles.at(i));
    query.attend(p, b, first, at, at + Shape::kTile, w);
  }
  copy_groups_wait<0>();
  w.finish_totals();
  __syncthreads();  // the tiles become [warp][16 rows][kD + 2] floats
  decode_leave(w, rows, memory);
  decode_join<T, Shape>(p, b, g, 0, rows, memory, shared_address(&received));
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    sdpa_decode_few(const SdpaArgs p) {
  sdpa_decode_few_block<T, Shape>(p, SdpaNoStep{});
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    sdpa_decode_few_step(const SdpaArgs p, const SdpaStepArgs f) {
  sdpa_decode_few_block<T, Shape>(p, f);
}

}  // namespace rm::cuda_ops
