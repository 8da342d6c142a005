// A step of decoding in float32: sdpa_decode_f32 with the rotation of q and the new key, and the caches'
// update, in one launch. Tiles of keys go around the blocks of a head and then around their warps, so that a
// block's do not depend on how many there are: it asks for them before the stream's previous kernel has
// ended, by the length of before, where the caches are stable (SdpaArgs::stable). A lane has the new key and
// value in registers, and puts them where their position is met. Bound: reading k and v once for 4 rows.
#pragma once

#include "sdpa/kernels/sdpa_decode_f32_sm80.cuh"
#include "sdpa/kernels/sdpa_decode_rows_sm80.cuh"

namespace rm::cuda_ops {

/// The pieces of a row that a lane holds: vectors of four, kLanes apart.
template <class Shape>
struct StepF32Piece {
  static constexpr int kQuads = Shape::kQuads, kLanes = Shape::kLanes;
  float4 v[kQuads];

  __device__ __forceinline__ static int column(int i) {
    return (i * kLanes + static_cast<int>(threadIdx.x) % kLanes) * 4;
  }
  /// What the kernel before wrote: past the L1 cache.
  __device__ __forceinline__ void load(const void* row, int dim) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      v[i] = row != nullptr && column(i) < dim
                 ? __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(row) + column(i)))
                 : float4{0, 0, 0, 0};
    }
  }
  __device__ __forceinline__ void store(float* row, int dim) const {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      if (column(i) < dim) *reinterpret_cast<float4*>(row + column(i)) = v[i];
    }
  }
  __device__ __forceinline__ float at(int i) const { return (&v[i / 4].x)[i % 4]; }
  /// Rotated by halves: a column and its partner half a row on are in one lane.
  __device__ __forceinline__ void turn(const StepF32Piece& cos, const StepF32Piece& sin) {
#pragma unroll
    for (int i = 0; i < kQuads / 2; ++i) {
      constexpr int kHalf = kQuads / 2;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float &low = (&v[i].x)[e], &high = (&v[i + kHalf].x)[e];
        const float x = low, y = high;
        low = x * (&cos.v[i].x)[e] - y * (&sin.v[i].x)[e];
        high = y * (&cos.v[i + kHalf].x)[e] + x * (&sin.v[i + kHalf].x)[e];
      }
    }
  }
};

/// What the mask says of a lane's keys in the next tiles, first in first out: asked for with their keys.
template <int kRows, int kAhead>
struct StepF32Mask {
  std::uint32_t word[kAhead][kRows];

  template <class Row>
  __device__ __forceinline__ void push(const SdpaArgs& p, int j, const Row& row_of) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i + 1 < kAhead; ++i) word[i][r] = word[i + 1][r];
      if (p.mask == nullptr) continue;
      const std::int64_t at = row_of(r) + min(j, p.keys - 1) * p.mask_column;
      word[kAhead - 1][r] = p.mask_is_bool ? __ldcg(static_cast<const std::uint8_t*>(p.mask) + at)
                                           : __ldcg(static_cast<const std::uint32_t*>(p.mask) + at);
    }
  }
  /// As masked_score, of the oldest tile.
  __device__ __forceinline__ float score(const SdpaArgs& p, float product, int r) const {
    if (p.mask == nullptr) return product * p.scale * kLog2E;
    const std::uint32_t w = word[0][r];
    if (p.mask_is_bool) return masked(p, product, w == 0 ? minus_infinity() : 0.0f);
    return masked(p, product, __uint_as_float(w));
  }
};

template <class Shape, class Step>
__global__ void __launch_bounds__(Shape::kThreads) sdpa_step_f32(const SdpaArgs p, const Step f) {
  constexpr int kWarps = Shape::kWarps, kKeys = Shape::kKeys,
                kStages = Shape::kStages, kQuads = Shape::kQuads, kLanes = Shape::kLanes,
                kRows = Shape::kRows, kAhead = kStages - 1;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) std::uint64_t received;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % kLanes;
  const int b = blockIdx.y / p.groups, g = blockIdx.y % p.groups;
  const int row0 = blockIdx.z * kRows, rows = min(kRows, p.ratio * p.rows - row0);
  const DecodeShare share(rows, Shape::kD, p.splits);
  decode_join_begin(p, share, rows, shared_address(&received));
  const float* k = static_cast<const float*>(p.k) + b * p.k_batch + g * p.k_head;
  const float* v = static_cast<const float*>(p.v) + b * p.v_batch + g * p.v_head;
  const auto first_key = [&](int i) {  // of this warp's tile number i
    return ((i * kWarps + warp) * p.splits + static_cast<int>(blockIdx.x)) * kKeys;
  };
  const auto slot = [&](int stage, int i) {  // i: pieces of k, then of v
    return ((stage * 2 * kQuads + i) * Shape::kThreads + static_cast<int>(threadIdx.x)) * 16;
  };
  const std::uint32_t ring = shared_address(memory);
  /// Keys of tile number i below `keys`; the others' places may hold anything.
  const auto ask = [&](int i, int keys) {
    const int key = first_key(i) + lane / kLanes;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int d = (q * kLanes + part) * 4;
      const bool inside = key < keys && d < p.dim;
      copy_16_async(ring + slot(i % kStages, q), inside ? k + key * p.k_row + d : k, inside);
      copy_16_async(ring + slot(i % kStages, kQuads + q), inside ? v + key * p.v_row + d : v, inside);
    }
  };
  int asked = 0;  // tiles of this warp on their way
  if (p.early) {
    // A length that grows by one a call may be the last call's: a tile more.
    const int guess = min(p.keys, keys_of(p, b) + kKeys);
    for (; asked < kAhead && first_key(asked) < guess; ++asked) {
      if (p.stable) {
        ask(asked, p.keys);
      } else {
        const int count = min(kKeys, p.keys - first_key(asked)), bytes = p.dim * 4;
        decode_ask_rows(k, p.k_row * 4, first_key(asked), count, bytes, lane);
        decode_ask_rows(v, p.v_row * 4, first_key(asked), count, bytes, lane);
      }
    }
    if (!p.stable) asked = 0;
  }
  launch_dependents();
  wait_for_previous();  // from here on everything that earlier work wrote is there
  int query[kRows], head[kRows];
  StepF32Piece<Shape> q[kRows], key_new, value_new;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    query[r] = (row0 + r) / p.ratio, head[r] = g * p.ratio + (row0 + r) % p.ratio;
    const float* from =
        static_cast<const float*>(p.q) + b * p.q_batch + head[r] * p.q_head + query[r] * p.q_row;
    q[r].load(r < rows ? from : nullptr, p.dim);
  }
  key_new.load(static_cast<const float*>(f.k) + b * f.k_batch + g * f.k_head, p.dim);
  value_new.load(static_cast<const float*>(f.v) + b * f.v_batch + g * f.v_head, p.dim);
  const auto mask_row = [&](int r) {
    return b * p.mask_batch + (r < rows ? head[r] : head[0]) * p.mask_head +
           (r < rows ? query[r] : query[0]) * p.mask_row;
  };
  StepF32Mask<kRows, kAhead> mask;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) mask.push(p, first_key(i) + lane / kLanes, mask_row);
  if constexpr (kSdpaTurns<Step>) {
    StepF32Piece<Shape> cos, sin;
    cos.load(static_cast<const float*>(f.cos) + b * f.cos_batch, p.dim);
    sin.load(static_cast<const float*>(f.sin) + b * f.sin_batch, p.dim);
#pragma unroll
    for (StepF32Piece<Shape>& of : q) of.turn(cos, sin);
    key_new.turn(cos, sin);
  }
  const std::int64_t position = position_of(f);
  const int keys = keys_of(p, b);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i >= asked && first_key(i) < keys) ask(i, keys);
    copy_group_end();  // the first has what was asked for before
  }
  DecodeF32Row<kQuads> row[kRows];
  int seen[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    seen[r] = r < rows ? visible_keys(p, keys, query[r]) : 0;
    row[r].top = minus_infinity(), row[r].total = 0.0f;
#pragma unroll
    for (int i = 0; i < kQuads * 4; ++i) row[r].query[i] = q[r].at(i), row[r].sum[i] = 0.0f;
  }
  for (int i = 0; first_key(i) < keys; ++i) {
    copy_groups_wait<kAhead - 1>();  // a thread reads only what it asked for
    float key[kQuads * 4], value[kQuads * 4];
    const int j = first_key(i) + lane / kLanes;
    const bool is_new = j == position, is_there = j < keys;
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      *reinterpret_cast<float4*>(key + 4 * n) =
          *reinterpret_cast<const float4*>(memory + slot(i % kStages, n));
      *reinterpret_cast<float4*>(value + 4 * n) =
          *reinterpret_cast<const float4*>(memory + slot(i % kStages, kQuads + n));
    }
    if (first_key(i + kAhead) < keys) ask(i + kAhead, keys);
    copy_group_end();
#pragma unroll
    for (int n = 0; n < kQuads * 4; ++n) {  // what is not there may be anything, and 0 NaN is NaN
      key[n] = is_new ? key_new.at(n) : key[n];
      value[n] = is_new ? value_new.at(n) : is_there ? value[n] : 0.0f;
    }
    if (is_new && is_there && blockIdx.z == 0) {
      key_new.store(static_cast<float*>(f.k_cache) + b * p.k_batch + g * p.k_head + position * p.k_row, p.dim);
      value_new.store(static_cast<float*>(f.v_cache) + b * p.v_batch + g * p.v_head + position * p.v_row, p.dim);
    }
    float score[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float x[2] = {};
#pragma unroll
      for (int n = 0; n < kQuads * 4; ++n) x[n % 2] = fmaf(row[r].query[n], key[n], x[n % 2]);
      score[r] = x[0] + x[1];
    }
#pragma unroll
    for (int m = 1; m < kLanes; m *= 2) {
#pragma unroll
      for (float& x : score) x += __shfl_xor_sync(0xffffffffu, x, m);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row[r].add(j < seen[r] ? mask.score(p, score[r], r) : minus_infinity(), value);
    }
    mask.push(p, first_key(i + kAhead) + lane / kLanes, mask_row);
  }
  decode_f32_end<Shape>(p, share, b, g, row0, rows, row, memory, shared_address(&received));
}

}  // namespace rm::cuda_ops
