// Few query rows: up to 16 rows (queries of all heads that share a key head) against a part of the
// keys a block. Each warp streams its own tiles of 16 keys through its own ring, without block
// barriers; then warps and blocks add up (see sdpa_decode_join_sm80.cuh). Before the stream's
// previous kernel has ended the first tiles come as far as the L2 cache; nothing is read until
// then. Bound: reading k and v once.
// A step (SdpaStepArgs) rotates q as it is read. The warp that comes across the new position puts the
// rotated key and the value into its tile itself, and into the caches, which nobody else reads there.
#pragma once

#include "sdpa/kernels/sdpa_decode_join_sm80.cuh"
#include "sdpa/kernels/sdpa_warp_sm80.cuh"

namespace rm::cuda_ops {

/// What a block is made of: its warps, the keys of a tile, stages of each warp's ring.
template <int kHeadDim, int kBlockWarps, int kTileKeys, int kRing>
struct DecodeShape
    : DecodeMemory<kHeadDim, kBlockWarps, kBlockWarps * kRing * 2 * kTileKeys * kHeadDim * 2> {
  static constexpr int kKeys = kTileKeys, kStages = kRing, kTile = kKeys * kHeadDim * 2;
};

/// In place of SdpaStepArgs: the caches are complete.
struct SdpaNoStep {};
template <class Step>
inline constexpr bool kSdpaStep = std::is_same_v<Step, SdpaStepArgs>;

template <class T>
__device__ __forceinline__ float2 pair_of(std::uint32_t bits) {
  const T* v = reinterpret_cast<const T*>(&bits);
  return {to_float(v[0]), to_float(v[1])};
}
template <class T>
__device__ __forceinline__ float2 pair_at(const void* base, std::int64_t at) {
  return pair_of<T>(*reinterpret_cast<const std::uint32_t*>(static_cast<const T*>(base) + at));
}

/// Columns d, d + 1 and their partners half a row on, rotated.
template <class T>
__device__ __forceinline__ void rotate_pairs(const SdpaStepArgs& f, int b, int d, int half,
                                             std::uint32_t& low, std::uint32_t& high) {
  const std::int64_t c = b * f.cos_batch + d, s = b * f.sin_batch + d;
  const float2 c1 = pair_at<T>(f.cos, c), c2 = pair_at<T>(f.cos, c + half);
  const float2 s1 = pair_at<T>(f.sin, s), s2 = pair_at<T>(f.sin, s + half);
  const float2 x = pair_of<T>(low), y = pair_of<T>(high);
  low = pack_pair<T>(x.x * c1.x - y.x * s1.x, x.y * c1.y - y.y * s1.y);
  high = pack_pair<T>(y.x * c2.x + x.x * s2.x, y.y * c2.y + x.y * s2.y);
}

/// The new key and value of a head, held by one warp: lane l has columns 2 l + 64 i of kD / 2 and
/// their partners.
template <class T, int kD>
struct SdpaNewRow {
  static constexpr int kHalf = kD / 2, kPieces = (kHalf + 63) / 64;
  std::uint32_t k[kPieces][2], v[kPieces][2];
  __device__ __forceinline__ static int column(int i) {
    return 2 * static_cast<int>(threadIdx.x % 32) + 64 * i;
  }
  __device__ __forceinline__ void load(const SdpaStepArgs& f, int b, int g) {
    const T* key = static_cast<const T*>(f.k) + b * f.k_batch + g * f.k_head;
    const T* value = static_cast<const T*>(f.v) + b * f.v_batch + g * f.v_head;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int d = column(i);
      if (d >= kHalf) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        k[i][h] = *reinterpret_cast<const std::uint32_t*>(key + d + h * kHalf);
        v[i][h] = *reinterpret_cast<const std::uint32_t*>(value + d + h * kHalf);
      }
      rotate_pairs<T>(f, b, d, kHalf, k[i][0], k[i][1]);
    }
  }
  __device__ __forceinline__ void store(T* k_row, T* v_row) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int d = column(i);
      if (d >= kHalf) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<std::uint32_t*>(k_row + d + h * kHalf) = k[i][h];
        *reinterpret_cast<std::uint32_t*>(v_row + d + h * kHalf) = v[i][h];
      }
    }
  }
  /// Into row `row` of the swizzled tiles.
  __device__ __forceinline__ void patch(unsigned char* k_tile, unsigned char* v_tile,
                                        int row) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (column(i) >= kHalf) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int d = column(i) + h * kHalf;
        const int at = swizzled<kD * 2>(row, d / 8) + d % 8 * 2;
        *reinterpret_cast<std::uint32_t*>(k_tile + at) = k[i][h];
        *reinterpret_cast<std::uint32_t*>(v_tile + at) = v[i][h];
      }
    }
  }
};

/// Row r of 16: query r / ratio of head g * ratio + r % ratio.
template <class T, class Shape, class Step>
__device__ __forceinline__ void sdpa_decode_block(const SdpaArgs& p, const Step& f) {
  constexpr int kD = Shape::kD, kWarps = Shape::kWarps, kKeys = Shape::kKeys,
                kStages = Shape::kStages, kTile = Shape::kTile;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) std::uint64_t received;
  launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int b = blockIdx.y / p.groups, g = blockIdx.y % p.groups, rows = p.ratio * p.rows;
  decode_join_begin<Shape>(p, rows, shared_address(&received));
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
    const std::int64_t at = f.position_is_64 ? *static_cast<const std::int64_t*>(f.position)
                                             : *static_cast<const std::int32_t*>(f.position);
    const std::int64_t tile = at / kKeys;
    if (at >= 0 && at < keys && tile >= begin && tile < end && (tile - begin) % kWarps == warp) {
      position = at;
      fresh.load(f, b, g);
      fresh.store(static_cast<T*>(f.k_cache) + b * p.k_batch + g * p.k_head + at * p.k_row,
                  static_cast<T*>(f.v_cache) + b * p.v_batch + g * p.v_head + at * p.v_row);
    }
  }
  int row_query[2], row_head[2], seen[2];  // of rows g and g + 8: query, head, keys it sees
  const T* q_row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = lane / 4 + half * 8, in = r < rows ? r : 0;
    const int s = p.rows == 1 ? 0 : in / p.ratio, h = g * p.ratio + in - s * p.ratio;
    row_query[half] = s, row_head[half] = h, seen[half] = r < rows ? visible_keys(p, keys, s) : 0;
    q_row[half] = static_cast<const T*>(p.q) + b * p.q_batch + h * p.q_head + s * p.q_row;
  }
  std::uint32_t query[kD / 16][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i % 2 == 1 && rows <= 8) {
#pragma unroll
      for (int step = 0; step < kD / 16; ++step) query[step][i] = 0u;
      continue;
    }
    std::uint32_t found[kD / 16];
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      const int d = step * 16 + i / 2 * 8 + lane % 4 * 2;
      found[step] = *reinterpret_cast<const std::uint32_t*>(q_row[i % 2] + (d < p.dim ? d : 0));
    }
    if constexpr (kSdpaStep<Step>) {
#pragma unroll
      for (int step = 0; step < kD / 32; ++step) {
        const int d = step * 16 + i / 2 * 8 + lane % 4 * 2;
        rotate_pairs<T>(f, b, d, kD / 2, found[step], found[step + kD / 32]);
      }
    }
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      const bool is = lane / 4 + i % 2 * 8 < rows && step * 16 + i / 2 * 8 + lane % 4 * 2 < p.dim;
      query[step][i] = is ? found[step] : 0u;
    }
  }
  const int fewest = p.scale > 0.0f ? visible_keys(p, keys, 0) : 0;
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
    float score[1][kKeys / 8][4];
    w.scores(
        at,
        [&](int, int step, std::uint32_t(&a)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = query[step][i];
        },
        score);
    const int first = tile * kKeys;
    if (p.mask == nullptr && first + kKeys <= fewest) {
      w.soften(score, p.scale * kLog2E);
    } else {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = first + n * 8 + lane % 4 * 2 + i % 2;
          score[0][n][i] = j < seen[i / 2] ? masked_score<T>(p, score[0][n][i], b, row_head[i / 2],
                                                             row_query[i / 2], j)
                                           : minus_infinity();
        }
      }
      w.soften(score, 1.0f);
    }
    w.add(at + kTile, score);
    __syncwarp();
    ask(tile + kStages * kWarps, stage);
    stage = (stage + 1) % kStages;
  }
  copy_groups_wait<0>();
  w.finish_totals();
  __syncthreads();  // the ring becomes [warp][16 rows][kD + 2] floats
  float* mine = reinterpret_cast<float*>(memory) + warp * kDecodeRows * (kD + 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * 8 >= rows) break;
    float* row = mine + (lane / 4 + half * 8) * (kD + 2);
    if (lane % 4 == 0) row[kD] = w.top[0][half], row[kD + 1] = w.total[0][half];
#pragma unroll
    for (int d = 0; d < kD / 8; ++d) {
      row[d * 8 + lane % 4 * 2] = w.sum[0][d][2 * half];
      row[d * 8 + lane % 4 * 2 + 1] = w.sum[0][d][2 * half + 1];
    }
  }
  decode_join<T, Shape>(p, b, g, 0, rows, memory, shared_address(&received));
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads) sdpa_decode(const SdpaArgs p) {
  sdpa_decode_block<T, Shape>(p, SdpaNoStep{});
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    sdpa_decode_step(const SdpaArgs p, const SdpaStepArgs f) {
  sdpa_decode_block<T, Shape>(p, f);
}

}  // namespace rm::cuda_ops
