// Many query rows: a block takes 128 rows of one head, a warp 32 of them (of long rows 64 and 16);
// tiles of keys and values are shared by the block, the next one on its way while this one is used.
// Key tiles that no row of the block sees are not read. Bound: tensor cores.
#pragma once

#include "sdpa/kernels/sdpa_warp_sm80.cuh"

namespace rm::cuda_ops {

inline constexpr int kFlashWarps = 4, kFlashKeys = 64;
/// Rows of a warp in 16s: their sums are kept in registers.
__host__ __device__ constexpr int flash_sixteens(int dim) { return dim > 128 ? 1 : 2; }
__host__ __device__ constexpr int flash_rows(int dim) {
  return kFlashWarps * 16 * flash_sixteens(dim);
}
__host__ __device__ constexpr int flash_memory(int dim) {
  return (flash_rows(dim) + 4 * kFlashKeys) * dim * 2;
}

template <class T, int kD>
__global__ void __launch_bounds__(kFlashWarps * 32) sdpa_flash(const SdpaArgs p) {
  constexpr int kTile = kFlashKeys * kD * 2, kThreads = kFlashWarps * 32;
  constexpr int kM = flash_sixteens(kD), kRows = flash_rows(kD);
  extern __shared__ __align__(128) unsigned char memory[];
  const std::uint32_t q_tile = shared_address(memory), ring = q_tile + kRows * kD * 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int b = blockIdx.y / p.heads, h = blockIdx.y % p.heads, g = h / p.ratio;
  const int row_blocks = (p.rows + kRows - 1) / kRows;
  const int s0 = (row_blocks - 1 - static_cast<int>(blockIdx.x)) * kRows;  // longest first
  const int keys = keys_of(p, b);
  const int last = visible_keys(p, keys, min(p.rows, s0 + kRows) - 1);
  const int tiles = (last + kFlashKeys - 1) / kFlashKeys;
  const T* k = static_cast<const T*>(p.k) + b * p.k_batch + g * p.k_head;
  const T* v = static_cast<const T*>(p.v) + b * p.v_batch + g * p.v_head;
  const T* q = static_cast<const T*>(p.q) + b * p.q_batch + h * p.q_head + s0 * p.q_row;
  const auto ask = [&](int tile) {
    if (tile < tiles) {
      const int at = tile * kFlashKeys, valid = min(kFlashKeys, keys - at);
      const std::uint32_t to = ring + tile % 2 * 2 * kTile;
      copy_tile<T, kD, kFlashKeys, kThreads>(to, k + static_cast<std::int64_t>(at) * p.k_row,
                                             p.k_row, valid, p.dim, threadIdx.x);
      copy_tile<T, kD, kFlashKeys, kThreads>(to + kTile,
                                             v + static_cast<std::int64_t>(at) * p.v_row, p.v_row,
                                             valid, p.dim, threadIdx.x);
    }
    copy_group_end();
  };
  copy_tile<T, kD, kRows, kThreads>(q_tile, q, p.q_row, p.rows - s0, p.dim, threadIdx.x);
  ask(0);
  SdpaWarp<T, kD, kM, kFlashKeys> w;
  w.clear();
  const int row0 = warp * 16 * kM, fewest = visible_keys(p, keys, s0 + row0);
  for (int tile = 0; tile < tiles; ++tile) {
    copy_groups_wait<0>();
    __syncthreads();  // this tile is there; the one before is no longer read
    ask(tile + 1);
    const std::uint32_t at = ring + tile % 2 * 2 * kTile;
    float score[kM][kFlashKeys / 8][4];
    w.scores(
        at,
        [&](int m, int step, std::uint32_t(&a)[4]) {
          const int row = row0 + m * 16 + lane / 8 % 2 * 8 + lane % 8, piece = step * 2 + lane / 16;
          load_matrix_x4(a, q_tile + swizzled<kD * 2>(row, piece));
        },
        score);
    const int first_key = tile * kFlashKeys;
    if (p.mask == nullptr && p.scale > 0.0f && first_key + kFlashKeys <= fewest) {
      w.soften(score, p.scale * kLog2E);
    } else {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int s = s0 + row0 + m * 16 + lane / 4 + half * 8;
          const int seen = s < p.rows ? visible_keys(p, keys, s) : 0;
#pragma unroll
          for (int i = 0; i < kFlashKeys / 4; ++i) {
            const int j = first_key + i / 2 * 8 + lane % 4 * 2 + i % 2;
            float& x = score[m][i / 2][2 * half + i % 2];
            x = j < seen ? masked_score<T>(p, x, b, h, s, j) : minus_infinity();
          }
        }
      }
      w.soften(score, 1.0f);
    }
    w.add(at + kTile, score);
  }
  w.finish_totals();
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int s = s0 + row0 + m * 16 + lane / 4 + half * 8;
      if (s >= p.rows) continue;
      const float total = w.total[m][half], scale = total == 0.0f ? 0.0f : 1.0f / total;
      T* o = static_cast<T*>(p.o) + b * p.o_batch + h * p.o_head + s * p.o_row;
#pragma unroll
      for (int d = 0; d < kD / 8; ++d) {
        const int column = d * 8 + lane % 4 * 2;
        if (column >= p.dim) continue;
        *reinterpret_cast<std::uint32_t*>(o + column) =
            pack_pair<T>(w.sum[m][d][2 * half] * scale, w.sum[m][d][2 * half + 1] * scale);
      }
      if (p.lse && lane % 4 == 0) {
        p.lse[(static_cast<std::int64_t>(b) * p.heads + h) * p.rows + s] =
            w.top[m][half] / kLog2E + logf(total);
      }
    }
  }
}

}  // namespace rm::cuda_ops
