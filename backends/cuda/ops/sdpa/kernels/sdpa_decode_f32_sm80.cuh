// Few query rows in float32, by multiply-adds: a block takes 4 rows that share a key head against a
// part of the keys. 8 or 16 lanes share a key, and every thread streams its own pieces of keys and
// values through its own ring, so that nobody waits for others until sums are added up as in
// sdpa_decode. Bound: reading k and v once for 4 rows.
#pragma once

#include "sdpa/kernels/sdpa_decode_join_sm80.cuh"

namespace rm::cuda_ops {

inline constexpr int kDecodeF32Rows = 4;

/// kAtOnce: rows of a block, 1 or kDecodeF32Rows.
template <int kHeadDim, int kAtOnce, int kRing = 5>
struct DecodeF32Shape
    : DecodeMemory<kHeadDim, 8, kRing * 2 * kHeadDim / (kHeadDim == 256 ? 64 : 32) * 256 * 16> {
  static constexpr int kRows = kAtOnce, kStages = kRing;
  static constexpr int kLanes = kHeadDim == 256 ? 16 : 8,
                       kQuads = kHeadDim / kLanes / 4;  // of a key; of a lane
  static constexpr int kKeys = 32 / kLanes;             // of a warp's step
};

/// What lanes that share keys have of a row.
template <int kQuads>
struct DecodeF32Row {
  float query[kQuads * 4], sum[kQuads * 4], top, total;

  /// Another key of score x and values v. `top` follows the maximum only when that is 2^8 above.
  __device__ __forceinline__ void add(float x, const float (&v)[kQuads * 4]) {
    const float high = x > top + 8.0f ? x : top, base = high == minus_infinity() ? 0.0f : high;
    const float keep = power_of_2(top - base), weight = power_of_2(x - base);
    top = high, total = total * keep + weight;
    if (__any_sync(0xffffffffu, keep != 1.0f)) {
#pragma unroll
      for (float& s : sum) s *= keep;
    }
#pragma unroll
    for (int i = 0; i < kQuads * 4; ++i) sum[i] = fmaf(weight, v[i], sum[i]);
  }
  /// Adds what the lane `mask` away has.
  __device__ __forceinline__ void merge(int mask) {
    const float other = __shfl_xor_sync(0xffffffffu, top, mask), high = fmaxf(top, other);
    const float base = high == minus_infinity() ? 0.0f : high;
    const float keep = power_of_2(top - base), take = power_of_2(other - base);
    top = high;
    total = total * keep + __shfl_xor_sync(0xffffffffu, total, mask) * take;
#pragma unroll
    for (float& s : sum) s = s * keep + __shfl_xor_sync(0xffffffffu, s, mask) * take;
  }
};

/// Adds up what lanes, warps and blocks have of the rows, and writes the results. `memory` was the ring.
template <class Shape>
__device__ __forceinline__ void decode_f32_end(const SdpaArgs& p, const DecodeShare& share, int b, int g,
                                               int row0, int rows,
                                               DecodeF32Row<Shape::kQuads> (&row)[Shape::kRows],
                                               unsigned char* memory, std::uint32_t received) {
  constexpr int kD = Shape::kD, kQuads = Shape::kQuads, kLanes = Shape::kLanes, kRows = Shape::kRows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % kLanes;
  copy_groups_wait<0>();
#pragma unroll
  for (int m = kLanes; m < 32; m *= 2) {
#pragma unroll
    for (DecodeF32Row<kQuads>& r : row) r.merge(m);
  }
  __syncthreads();  // the ring becomes [warp][rows][kD + 2] floats
  float* mine = reinterpret_cast<float*>(memory) + warp * Shape::kFloats;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float* to = mine + r * (kD + 2);
    if (lane == 0) to[kD] = row[r].top, to[kD + 1] = row[r].total;
    if (lane >= kLanes) continue;
#pragma unroll
    for (int i = 0; i < kQuads * 4; ++i) to[(i / 4 * kLanes + part) * 4 + i % 4] = row[r].sum[i];
  }
  decode_join<float, Shape>(p, share, b, g, row0, rows, memory, received);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads) sdpa_decode_f32(const SdpaArgs p) {
  constexpr int kWarps = Shape::kWarps, kKeys = Shape::kKeys,
                kStages = Shape::kStages, kQuads = Shape::kQuads, kLanes = Shape::kLanes,
                kRows = Shape::kRows;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) std::uint64_t received;
  launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % kLanes;
  const int b = blockIdx.y / p.groups, g = blockIdx.y % p.groups;
  const int row0 = blockIdx.z * kRows, rows = min(kRows, p.ratio * p.rows - row0);
  const DecodeShare share(rows, Shape::kD, p.splits);
  decode_join_begin(p, share, rows, shared_address(&received));
  const float* k = static_cast<const float*>(p.k) + b * p.k_batch + g * p.k_head;
  const float* v = static_cast<const float*>(p.v) + b * p.v_batch + g * p.v_head;
  if (p.early) {  // by the lengths of before, which only choose what to ask for
    const DecodeSpan guess(p, b, kKeys);
    for (int i = 0, tile = guess.begin + warp; i < kStages - 1 && tile < guess.end;
         ++i, tile += kWarps) {
      const int first = tile * kKeys, count = min(kKeys, guess.keys - first), bytes = p.dim * 4;
      decode_ask_rows(k, p.k_row * 4, first, count, bytes, lane);
      decode_ask_rows(v, p.v_row * 4, first, count, bytes, lane);
    }
  }
  wait_for_previous();  // from here on everything that earlier work wrote is there
  const DecodeSpan span(p, b, kKeys);
  const int keys = span.keys, begin = span.begin, end = span.end;
  const auto slot = [&](int stage, int i) {  // i: pieces of k, then of v
    return ((stage * 2 * kQuads + i) * Shape::kThreads + static_cast<int>(threadIdx.x)) * 16;
  };
  const std::uint32_t ring = shared_address(memory);
  const auto ask = [&](int tile, int stage) {
    if (tile < end) {
      const int key = tile * kKeys + lane / kLanes;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const int d = (i * kLanes + part) * 4;
        const bool inside = key < keys && d < p.dim;
        copy_16_async(ring + slot(stage, i), inside ? k + key * p.k_row + d : k, inside);
        copy_16_async(ring + slot(stage, kQuads + i), inside ? v + key * p.v_row + d : v, inside);
      }
    }
    copy_group_end();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) ask(begin + warp + i * kWarps, i);

  DecodeF32Row<kQuads> row[kRows];
  int query[kRows], head[kRows], seen[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    query[r] = (row0 + r) / p.ratio, head[r] = g * p.ratio + (row0 + r) % p.ratio;
    seen[r] = r < rows ? visible_keys(p, keys, query[r]) : 0;
    row[r].top = minus_infinity(), row[r].total = 0.0f;
    const float* q =
        static_cast<const float*>(p.q) + b * p.q_batch + head[r] * p.q_head + query[r] * p.q_row;
#pragma unroll
    for (int i = 0; i < kQuads * 4; ++i) {
      const int d = (i / 4 * kLanes + part) * 4 + i % 4;
      row[r].query[i] = r < rows && d < p.dim ? q[d] : 0.0f;
      row[r].sum[i] = 0.0f;
    }
  }
  int stage = 0;
  for (int tile = begin + warp; tile < end; tile += kWarps) {
    copy_groups_wait<kStages - 2>();  // a thread reads only what it asked for
    ask(tile + (kStages - 1) * kWarps, (stage + kStages - 1) % kStages);
    float key[kQuads * 4], value[kQuads * 4];
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      *reinterpret_cast<float4*>(key + 4 * i) =
          *reinterpret_cast<const float4*>(memory + slot(stage, i));
      *reinterpret_cast<float4*>(value + 4 * i) =
          *reinterpret_cast<const float4*>(memory + slot(stage, kQuads + i));
    }
    float score[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float x[2] = {};
#pragma unroll
      for (int i = 0; i < kQuads * 4; ++i) x[i % 2] = fmaf(row[r].query[i], key[i], x[i % 2]);
      score[r] = x[0] + x[1];
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) {
#pragma unroll
      for (float& x : score) x += __shfl_xor_sync(0xffffffffu, x, mask);
    }
    const int j = tile * kKeys + lane / kLanes;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row[r].add(j < seen[r] ? masked_score<float>(p, score[r], b, head[r], query[r], j)
                             : minus_infinity(),
                 value);
    }
    stage = (stage + 1) % kStages;
  }
  decode_f32_end<Shape>(p, share, b, g, row0, rows, row, memory, shared_address(&received));
}

}  // namespace rm::cuda_ops
