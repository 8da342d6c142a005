// Few query rows: up to 16 rows (queries of all heads that share a key head) against a part of the
// keys a block. Each warp streams its own tiles of 16 keys through its own ring, without block
// barriers; warps and then blocks add up. Bound: reading k and v once.
#pragma once

#include "sdpa/kernels/sdpa_warp_sm80.cuh"

namespace rm::cuda_ops {

inline constexpr int kDecodeWarps = 4, kDecodeKeys = 16, kDecodeRows = 16;
__host__ __device__ constexpr int decode_stages(int dim) { return dim > 128 ? 3 : 4; }
__host__ __device__ constexpr int decode_memory(int dim) {
  return kDecodeWarps * decode_stages(dim) * 2 * kDecodeKeys * dim * 2;
}

/// Row r of 16: query r / ratio of head g * ratio + r % ratio.
template <class T, int kD>
__global__ void __launch_bounds__(kDecodeWarps * 32) sdpa_decode(const SdpaArgs p) {
  constexpr int kStages = decode_stages(kD), kTile = kDecodeKeys * kD * 2;
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int b = blockIdx.y / p.groups, g = blockIdx.y % p.groups, rows = p.ratio * p.rows;
  const int keys = keys_of(p, b), tiles = (keys + kDecodeKeys - 1) / kDecodeKeys;
  const int all = (tiles + p.splits - 1) / p.splits;
  const int begin = blockIdx.x * all, end = min(tiles, begin + all);
  const T* k = static_cast<const T*>(p.k) + b * p.k_batch + g * p.k_head;
  const T* v = static_cast<const T*>(p.v) + b * p.v_batch + g * p.v_head;
  const std::uint32_t ring = shared_address(memory) + warp * kStages * 2 * kTile;

  const auto ask = [&](int tile, int stage) {
    if (tile < end) {
      const int at = tile * kDecodeKeys, valid = min(kDecodeKeys, keys - at);
      copy_tile<T, kD, kDecodeKeys, 32>(ring + stage * 2 * kTile, k + at * p.k_row, p.k_row, valid,
                                        p.dim, lane);
      copy_tile<T, kD, kDecodeKeys, 32>(ring + stage * 2 * kTile + kTile, v + at * p.v_row, p.v_row,
                                        valid, p.dim, lane);
    }
    copy_group_end();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) ask(begin + warp + i * kDecodeWarps, i);

  const auto row_pointer = [&](int r) {
    const int s = r / p.ratio, h = g * p.ratio + r % p.ratio;
    return static_cast<const T*>(p.q) + b * p.q_batch + h * p.q_head + s * p.q_row;
  };
  std::uint32_t query[kD / 16][4];
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = lane / 4 + i % 2 * 8, d = step * 16 + i / 2 * 8 + lane % 4 * 2;
      query[step][i] =
          r < rows && d < p.dim ? *reinterpret_cast<const std::uint32_t*>(row_pointer(r) + d) : 0u;
    }
  }
  int row_query[2], row_head[2], seen[2];  // of rows g and g + 8: query, head, keys it sees
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = lane / 4 + half * 8;
    row_query[half] = r / p.ratio, row_head[half] = g * p.ratio + r % p.ratio;
    seen[half] = r < rows ? visible_keys(p, keys, row_query[half]) : 0;
  }
  const int fewest = p.scale > 0.0f ? visible_keys(p, keys, 0) : 0;
  SdpaWarp<T, kD, 1, kDecodeKeys> w;
  w.clear();
  int stage = 0;
  for (int tile = begin + warp; tile < end; tile += kDecodeWarps) {
    copy_groups_wait<kStages - 2>();
    __syncwarp();
    ask(tile + (kStages - 1) * kDecodeWarps, (stage + kStages - 1) % kStages);
    const std::uint32_t at = ring + stage * 2 * kTile;
    float score[1][2][4];
    w.scores(
        at,
        [&](int, int step, std::uint32_t(&a)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = query[step][i];
        },
        score);
    const int first = tile * kDecodeKeys;
    if (p.mask == nullptr && first + kDecodeKeys <= fewest) {
      w.soften(score, p.scale * kLog2E);
    } else {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
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
    stage = (stage + 1) % kStages;
  }
  copy_groups_wait<0>();
  w.finish_totals();
  __syncthreads();  // the ring becomes [warp][16 rows][kD + 2] floats
  float* mine = reinterpret_cast<float*>(memory) + warp * kDecodeRows * (kD + 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* row = mine + (lane / 4 + half * 8) * (kD + 2);
    if (lane % 4 == 0) row[kD] = w.top[0][half], row[kD + 1] = w.total[0][half];
#pragma unroll
    for (int d = 0; d < kD / 8; ++d) {
      row[d * 8 + lane % 4 * 2] = w.sum[0][d][2 * half];
      row[d * 8 + lane % 4 * 2 + 1] = w.sum[0][d][2 * half + 1];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows * kD; i += kDecodeWarps * 32) {
    const int r = i / kD, d = i % kD;
    const float* from = reinterpret_cast<const float*>(memory) + r * (kD + 2);
    float top = minus_infinity(), total = 0.0f, sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kDecodeWarps; ++n) top = Max{}(top, from[n * kDecodeRows * (kD + 2) + kD]);
    const float base = top == minus_infinity() ? 0.0f : top;
#pragma unroll
    for (int n = 0; n < kDecodeWarps; ++n) {
      const float* part = from + n * kDecodeRows * (kD + 2);
      const float keep = exp2f(part[kD] - base);
      total += part[kD + 1] * keep;
      sum += part[d] * keep;
    }
    if (p.splits > 1) {
      float* to =
          p.partial +
          ((static_cast<std::int64_t>(blockIdx.y) * p.splits + blockIdx.x) * kDecodeRows + r) *
              (kD + 2);
      to[d] = sum;
      if (d == 0) to[kD] = top, to[kD + 1] = total;
      continue;
    }
    const int s = r / p.ratio, h = g * p.ratio + r % p.ratio;
    if (d < p.dim) {
      static_cast<T*>(p.o)[b * p.o_batch + h * p.o_head + s * p.o_row + d] =
          from_float<T>(total == 0.0f ? 0.0f : sum / total);
    }
    if (p.lse && d == 0) {
      p.lse[(static_cast<std::int64_t>(b) * p.heads + h) * p.rows + s] = top / kLog2E + logf(total);
    }
  }
}

/// The blocks' parts become rows of o: one block of kD threads a row.
template <class T, int kD>
__global__ void __launch_bounds__(kD) sdpa_join(const SdpaArgs p) {
  const int r = blockIdx.x, b = blockIdx.y / p.groups, g = blockIdx.y % p.groups;
  const int s = r / p.ratio, h = g * p.ratio + r % p.ratio, d = threadIdx.x;
  wait_for_previous();
  const float* from =
      p.partial + (static_cast<std::int64_t>(blockIdx.y) * p.splits * kDecodeRows + r) * (kD + 2);
  const std::int64_t step = static_cast<std::int64_t>(kDecodeRows) * (kD + 2);
  float top = minus_infinity(), total = 0.0f, sum = 0.0f;
#pragma unroll 8
  for (int n = 0; n < p.splits; ++n) top = Max{}(top, from[n * step + kD]);
  const float base = top == minus_infinity() ? 0.0f : top;
#pragma unroll 8
  for (int n = 0; n < p.splits; ++n) {
    const float keep = exp2f(from[n * step + kD] - base);
    total += from[n * step + kD + 1] * keep;
    sum += from[n * step + d] * keep;
  }
  if (d < p.dim) {
    static_cast<T*>(p.o)[b * p.o_batch + h * p.o_head + s * p.o_row + d] =
        from_float<T>(total == 0.0f ? 0.0f : sum / total);
  }
  if (p.lse && d == 0) {
    p.lse[(static_cast<std::int64_t>(b) * p.heads + h) * p.rows + s] = top / kLog2E + logf(total);
  }
}

}  // namespace rm::cuda_ops
