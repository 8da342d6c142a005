// Few query rows: up to 16 rows (queries of all heads that share a key head) against a part of the
// keys a block. Each warp streams its own tiles of 16 keys through its own ring, without block
// barriers; warps and then blocks add up: the blocks of a head are a cluster and read each other's
// sums (sm_90, up to 8 blocks), or a second kernel joins them. The tiles are asked for before the
// stream's previous kernel has ended. Bound: reading k and v once.
#pragma once

#include "sdpa/kernels/sdpa_warp_sm80.cuh"

namespace rm::cuda_ops {

inline constexpr int kDecodeRows = 16;
inline constexpr int kDecodeCluster =
    8;  // blocks of a cluster at most: 16 are not always placed at once

/// What a block is made of: its warps, the keys of a tile, stages of each warp's ring.
template <int kHeadDim, int kBlockWarps, int kTileKeys, int kRing>
struct DecodeShape {
  static constexpr int kD = kHeadDim, kWarps = kBlockWarps, kKeys = kTileKeys, kStages = kRing;
  static constexpr int kThreads = kWarps * 32, kTile = kKeys * kD * 2;
  static constexpr int kFloats = kDecodeRows * (kD + 2);  // sums of a warp or a block
  static constexpr int kRingBytes = kWarps * kStages * 2 * kTile;
  static constexpr int kJoinBytes = (kWarps + 1) * kFloats * 4;
  static constexpr int kMemory = kRingBytes > kJoinBytes ? kRingBytes : kJoinBytes;
};

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
/// A float of block `rank` of the cluster at this block's shared address `at`.
__device__ __forceinline__ float cluster_load(std::uint32_t at, int rank) {
  float x;
  asm volatile(
      "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [there];\n}"
      : "=f"(x)
      : "r"(at), "r"(rank)
      : "memory");
  return x;
}

/// A row of o and its log-sum-exp from its sum in one column d.
template <class T>
__device__ __forceinline__ void decode_store(const SdpaArgs& p, int b, int g, int r, int d,
                                             float top, float total, float sum) {
  const int s = r / p.ratio, h = g * p.ratio + r % p.ratio;
  if (d < p.dim) {
    static_cast<T*>(p.o)[b * p.o_batch + h * p.o_head + s * p.o_row + d] =
        from_float<T>(total == 0.0f ? 0.0f : sum / total);
  }
  if (p.lse && d == 0) {
    p.lse[(static_cast<std::int64_t>(b) * p.heads + h) * p.rows + s] = top / kLog2E + logf(total);
  }
}

/// The cluster's blocks share the columns of all rows; `at`: each block's [rows][kD + 2] floats.
template <class T, class Shape>
__device__ __forceinline__ void decode_join_cluster(const SdpaArgs& p, int b, int g, int row0,
                                                    int rows, std::uint32_t at) {
  constexpr int kD = Shape::kD;
  cluster_barrier();
  for (int i = blockIdx.x * Shape::kThreads + threadIdx.x; i < rows * kD;
       i += p.splits * Shape::kThreads) {
    const int r = i / kD, d = i % kD;
    const std::uint32_t row = at + r * (kD + 2) * 4;
    float tops[kDecodeCluster], totals[kDecodeCluster], sums[kDecodeCluster];
#pragma unroll
    for (int n = 0; n < kDecodeCluster; ++n) {
      tops[n] = n < p.splits ? cluster_load(row + kD * 4, n) : minus_infinity();
      totals[n] = n < p.splits ? cluster_load(row + kD * 4 + 4, n) : 0.0f;
      sums[n] = n < p.splits ? cluster_load(row + d * 4, n) : 0.0f;
    }
    float top = minus_infinity(), total = 0.0f, sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kDecodeCluster; ++n) top = Max{}(top, tops[n]);
    const float base = top == minus_infinity() ? 0.0f : top;
#pragma unroll
    for (int n = 0; n < kDecodeCluster; ++n) {
      const float keep = exp2f(tops[n] - base);
      total += totals[n] * keep, sum += sums[n] * keep;
    }
    decode_store<T>(p, b, g, row0 + r, d, top, total, sum);
  }
  cluster_barrier();  // no block may end while others read its memory
}

/// What the warps have of rows row0 .. of a key head becomes the block's, and then rows of o or the
/// block's part of them. `memory`: each warp's [16 rows][kD + 2] floats, room for the block's.
template <class T, class Shape>
__device__ __forceinline__ void decode_join(const SdpaArgs& p, int b, int g, int row0, int rows,
                                            unsigned char* memory) {
  __syncthreads();
  constexpr int kD = Shape::kD, kWarps = Shape::kWarps, kWarpFloats = Shape::kFloats;
  float* joined = reinterpret_cast<float*>(memory) + kWarps * kWarpFloats;
  if (p.splits > 1 && !p.cluster) {
    joined = p.partial + row0 * (kD + 2) +
             (static_cast<std::int64_t>(blockIdx.y) * p.splits + blockIdx.x) * kWarpFloats;
  }
  for (int i = threadIdx.x; i < rows * kD; i += kWarps * 32) {
    const int r = i / kD, d = i % kD;
    const float* from = reinterpret_cast<const float*>(memory) + r * (kD + 2);
    float top = minus_infinity(), total = 0.0f, sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kWarps; ++n) top = Max{}(top, from[n * kWarpFloats + kD]);
    const float base = top == minus_infinity() ? 0.0f : top;
#pragma unroll
    for (int n = 0; n < kWarps; ++n) {
      const float* part = from + n * kWarpFloats;
      const float keep = exp2f(part[kD] - base);
      total += part[kD + 1] * keep;
      sum += part[d] * keep;
    }
    if (p.splits == 1) {
      decode_store<T>(p, b, g, row0 + r, d, top, total, sum);
      continue;
    }
    joined[r * (kD + 2) + d] = sum;
    if (d == 0) joined[r * (kD + 2) + kD] = top, joined[r * (kD + 2) + kD + 1] = total;
  }
  if (p.splits > 1 && p.cluster) {
    decode_join_cluster<T, Shape>(p, b, g, row0, rows, shared_address(joined));
  }
}

/// Row r of 16: query r / ratio of head g * ratio + r % ratio.
template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads) sdpa_decode(const SdpaArgs p) {
  constexpr int kD = Shape::kD, kWarps = Shape::kWarps, kKeys = Shape::kKeys,
                kStages = Shape::kStages, kTile = Shape::kTile;
  extern __shared__ __align__(128) unsigned char memory[];
  launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int b = blockIdx.y / p.groups, g = blockIdx.y % p.groups, rows = p.ratio * p.rows;
  const int keys = keys_of(p, b), tiles = (keys + kKeys - 1) / kKeys;
  const int all = (tiles + p.splits - 1) / p.splits;
  const int begin = blockIdx.x * all, end = min(tiles, begin + all);
  const T* k = static_cast<const T*>(p.k) + b * p.k_batch + g * p.k_head;
  const T* v = static_cast<const T*>(p.v) + b * p.v_batch + g * p.v_head;
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
  for (int i = 0; i < kStages - 1; ++i) ask(begin + warp + i * kWarps, i);

  wait_for_previous();  // q is written by the kernel before
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
  SdpaWarp<T, kD, 1, kKeys> w;
  w.clear();
  int stage = 0;
  for (int tile = begin + warp; tile < end; tile += kWarps) {
    copy_groups_wait<kStages - 2>();
    __syncwarp();
    ask(tile + (kStages - 1) * kWarps, (stage + kStages - 1) % kStages);
    const std::uint32_t at = ring + stage * 2 * kTile;
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
  decode_join<T, Shape>(p, b, g, 0, rows, memory);
}

/// The blocks' parts become rows of o: one block of kD threads a row.
template <class T, int kD>
__global__ void __launch_bounds__(kD) sdpa_join(const SdpaArgs p) {
  const int r = blockIdx.x, b = blockIdx.y / p.groups, g = blockIdx.y % p.groups;
  const int d = threadIdx.x;
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
  decode_store<T>(p, b, g, r, d, top, total, sum);
}

}  // namespace rm::cuda_ops
