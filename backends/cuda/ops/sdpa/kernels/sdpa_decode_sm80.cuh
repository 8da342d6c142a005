// Few query rows: up to 16 rows (queries of all heads that share a key head) against a part of the
// keys a block. Each warp streams its own tiles of keys through its own ring, without block
// barriers; then warps and blocks add up (see sdpa_decode_join_sm80.cuh). Before the stream's
// previous kernel has ended the first tiles come as far as the L2 cache; nothing is read until
// then. Bound: reading k and v once.
// A step (SdpaStepArgs) rotates q as it is read. The warp that comes across the new position puts the
// rotated key and the value into its tile itself, and into the caches, which nobody else reads there.
#pragma once

#include "sdpa/kernels/sdpa_decode_rows_sm80.cuh"

namespace rm::cuda_ops {

/// What a block is made of: its warps, the keys of a tile, stages of each warp's ring.
template <int kHeadDim, int kBlockWarps, int kTileKeys, int kRing>
struct DecodeShape
    : DecodeMemory<kHeadDim, kBlockWarps, kBlockWarps * kRing * 2 * kTileKeys * kHeadDim * 2> {
  static constexpr int kKeys = kTileKeys, kStages = kRing, kTile = kKeys * kHeadDim * 2;
};

template <class T, class Shape, class Step>
__device__ __forceinline__ void sdpa_decode_block(const SdpaArgs& p, const Step& f) {
  constexpr int kD = Shape::kD, kWarps = Shape::kWarps, kKeys = Shape::kKeys,
                kStages = Shape::kStages, kTile = Shape::kTile;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) std::uint64_t received;
  launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int b = blockIdx.y / p.groups, g = blockIdx.y % p.groups, rows = p.ratio * p.rows;
  const DecodeShare share(rows, Shape::kD, p.splits);
  decode_join_begin(p, share, rows, shared_address(&received));
  const T* k = static_cast<const T*>(p.k) + b * p.k_batch + g * p.k_head;
  const T* v = static_cast<const T*>(p.v) + b * p.v_batch + g * p.v_head;
  if (p.early) {  // by the lengths of before, which only choose what to ask for
    const DecodeSpan guess(p, b, kKeys);
    for (int i = 0, tile = guess.begin + warp; i < kStages && tile < guess.end;
         ++i, tile += kWarps) {
      const int first = tile * kKeys, count = min(kKeys, guess.keys - first), bytes = p.dim * 2;
      decode_ask_rows(k, p.k_row * 2, first, count, bytes, lane);
      decode_ask_rows(v, p.v_row * 2, first, count, bytes, lane);
    }
  }
  wait_for_previous();  // from here on everything that earlier work wrote is there
  const DecodeSpan span(p, b, kKeys);
  const int keys = span.keys, begin = span.begin, end = span.end;
  const std::uint32_t ring = shared_address(memory) + warp * kStages * 2 * kTile;

  const auto ask = [&](int tile, int stage) {
    if (tile < end) {
      const int at = tile * kKeys, valid = min(kKeys, keys - at);
      copy_tile<T, kD, kKeys, 32>(ring + stage * 2 * kTile, k + at * p.k_row, p.k_row, valid, p.dim,
                                  lane);
      copy_tile<T, kD, kKeys, 32>(ring + stage * 2 * kTile + kTile, v + at * p.v_row, p.v_row,
                                  valid, p.dim, lane);
    }
    copy_group_end();
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) ask(begin + warp + i * kWarps, i);

  SdpaNewRow<T, kD> fresh;
  std::int64_t position = -1;  // of the row that this warp brings
  if constexpr (kSdpaStep<Step>) {
    const std::int64_t at = position_of(f), tile = at / kKeys;
    if (at >= 0 && at < keys && tile >= begin && tile < end && (tile - begin) % kWarps == warp) {
      position = at;
      fresh.load(f, b, g);
      fresh.append(p, f, b, g, at);
    }
  }
  DecodeQuery<T, kD> query;
  query.load(p, f, b, g, rows);
  query.look(p, rows, keys);
  SdpaWarp<T, kD, 1, kKeys> w;
  w.clear();
  int stage = 0;
  for (int tile = begin + warp; tile < end; tile += kWarps) {
    copy_groups_wait<kStages - 1>();
    __syncwarp();
    const std::uint32_t at = ring + stage * 2 * kTile;
    if constexpr (kSdpaStep<Step>) {
      if (position >= 0 && position / kKeys == tile) {
        unsigned char* there = memory + (warp * kStages + stage) * 2 * kTile;
        fresh.patch(there, there + kTile, static_cast<int>(position % kKeys));
        __syncwarp();
      }
    }
    query.attend(p, b, tile * kKeys, at, at + kTile, w);
    __syncwarp();
    ask(tile + kStages * kWarps, stage);
    stage = (stage + 1) % kStages;
  }
  copy_groups_wait<0>();
  w.finish_totals();
  __syncthreads();  // the ring becomes [warp][16 rows][kD + 2] floats
  decode_leave(w, rows, memory);
  decode_join<T, Shape>(p, share, b, g, 0, rows, memory, shared_address(&received));
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads) sdpa_decode(const SdpaArgs p) {
  sdpa_decode_block<T, Shape>(p, SdpaNoStep{});
}

template <class T, class Shape, class Step>
__global__ void __launch_bounds__(Shape::kThreads)
    sdpa_decode_step(const SdpaArgs p, const Step f) {
  sdpa_decode_block<T, Shape>(p, f);
}

}  // namespace rm::cuda_ops
