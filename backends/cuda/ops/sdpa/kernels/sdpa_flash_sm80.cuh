// Many query rows: a block takes 128 rows of one head (64 of long 16-bit rows, and where blocks of
// 128 would leave multiprocessors idle); tiles of keys and values are shared by the block, the next
// one on its way while this one is used. Key tiles that no row of the block sees are not read. Where
// registers allow it a tile's part of the mask is on its way, too: read when it is needed, each
// element costs its latency. A mask that is the same for all rows, as padding is, lies in shared memory,
// and tiles that it hides are not computed. Bound: tensor cores.
#pragma once

#include "sdpa/kernels/sdpa_warp_f32_sm80.cuh"
#include "sdpa/kernels/sdpa_warp_sm80.cuh"

namespace rm::cuda_ops {

inline constexpr int kFlashKeys = 64;

/// A warp's part for 16-bit floats: kTall times 16 rows, in tiles without gaps.
template <class Float, int kHeadDim, int kTall = (kHeadDim > 128 ? 1 : 2)>
struct Flash16 : SdpaWarp<Float, kHeadDim, kTall, kFlashKeys> {
  using T = Float;
  static constexpr int kD = kHeadDim, kM = kTall, kWarps = 4, kRowBytes = kD * 2;
  template <int kRows>
  __device__ __forceinline__ static void copy(std::uint32_t to, const T* from, std::int64_t pitch,
                                              int valid, int dim) {
    copy_tile<T, kD, kRows, kWarps * 32>(to, from, pitch, valid, dim, threadIdx.x);
  }
  __device__ __forceinline__ void find_scores(std::uint32_t q_rows, std::uint32_t k_tile,
                                              float (&score)[kM][kFlashKeys / 8][4]) {
    const int lane = threadIdx.x % 32;
    this->scores(
        k_tile,
        [&](int m, int step, std::uint32_t(&a)[4]) {
          const int row = m * 16 + lane / 8 % 2 * 8 + lane % 8, piece = step * 2 + lane / 16;
          load_matrix_x4(a, q_rows + swizzled<kRowBytes>(row, piece));
        },
        score);
  }
  __device__ __forceinline__ void add_values(unsigned char*, std::uint32_t v_tile,
                                             const float (&score)[kM][kFlashKeys / 8][4]) {
    this->add(v_tile, score);
  }
  __device__ __forceinline__ static void store_pair(T* to, float x, float y) {
    *reinterpret_cast<std::uint32_t*>(to) = pack_pair<T>(x, y);
  }
};

/// A warp's part for float32: 16 rows.
template <int kHeadDim>
struct FlashF32 : SdpaWarp<float, kHeadDim, 1, kFlashKeys> {
  using T = float;
  static constexpr int kD = kHeadDim, kM = 1, kWarps = 8, kRowBytes = (kD + 4) * 4;
  template <int kRows>
  __device__ __forceinline__ static void copy(std::uint32_t to, const T* from, std::int64_t pitch,
                                              int valid, int dim) {
    f32_copy<kD, kRows, kWarps * 32>(to, from, pitch, valid, dim);
  }
  __device__ __forceinline__ void find_scores(std::uint32_t q_rows, std::uint32_t k_tile,
                                              float (&score)[1][kFlashKeys / 8][4]) {
    f32_products<kD, kFlashKeys>(score[0], q_rows, k_tile);
  }
  __device__ __forceinline__ void add_values(unsigned char* v_tile, std::uint32_t,
                                             const float (&score)[1][kFlashKeys / 8][4]) {
    f32_add<kD, kFlashKeys>(this->sum[0], score[0], reinterpret_cast<const float*>(v_tile));
  }
  __device__ __forceinline__ static void store_pair(T* to, float x, float y) {
    to[0] = x, to[1] = y;  // o may lie anywhere
  }
};

template <class Warp>
struct FlashShape {
  static constexpr bool kMaskAhead = Warp::kM == 1 && Warp::kD * sizeof(typename Warp::T) <= 256;
  static constexpr int kRows = Warp::kWarps * Warp::kM * 16, kThreads = Warp::kWarps * 32,
                       kTile = kFlashKeys * Warp::kRowBytes,
                       kMemory = kRows * Warp::kRowBytes + 4 * kTile;
};

/// A lane's part of the mask of a tile: of its 16 keys in two rows. Rows and keys beyond the problem
/// repeat the last one; their scores are left out.
template <class T>
struct FlashMask {
  float value[2][kFlashKeys / 4];

  __device__ __forceinline__ void load(const SdpaArgs& p, int b, int h, int row, int first_key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int s = min(row + half * 8, p.rows - 1);
#pragma unroll
      for (int i = 0; i < kFlashKeys / 4; ++i) {
        const int j = min(first_key + i / 2 * 8 + i % 2, p.keys - 1);
        value[half][i] = mask_at<T>(p, b, h, s, j);
      }
    }
  }
};

/// A mask that is the same for all rows: each tile's part for the block, the next one on its way.
template <class T>
struct FlashKeyMask {
  float* line;  // two tiles, in shared memory
  float next = 0.0f;

  __device__ __forceinline__ void ask(const SdpaArgs& p, int b, int h, int first_key) {
    const int key = first_key + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kFlashKeys) next = key < p.keys ? mask_at<T>(p, b, h, 0, key) : minus_infinity();
  }
  /// A barrier for all threads. Whether the tile counts: what a boolean mask hides does not, whatever
  /// it is; -inf added to NaN is NaN.
  __device__ __forceinline__ bool put(const SdpaArgs& p, int tile) {
    if (threadIdx.x < kFlashKeys) line[tile % 2 * kFlashKeys + threadIdx.x] = next;
    const bool counts = !p.mask_is_bool || next != minus_infinity();
    return __syncthreads_or(threadIdx.x < kFlashKeys && counts) != 0;
  }
};

template <class Warp>
__global__ void __launch_bounds__(FlashShape<Warp>::kThreads) sdpa_flash(const SdpaArgs p) {
  using T = typename Warp::T;
  using Shape = FlashShape<Warp>;
  constexpr int kD = Warp::kD, kM = Warp::kM, kRows = Shape::kRows, kTile = Shape::kTile;
  extern __shared__ __align__(128) unsigned char memory[];
  const std::uint32_t q_tile = shared_address(memory), ring = q_tile + kRows * Warp::kRowBytes;
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
      Warp::template copy<kFlashKeys>(to, k + static_cast<std::int64_t>(at) * p.k_row, p.k_row,
                                      valid, p.dim);
      Warp::template copy<kFlashKeys>(to + kTile, v + static_cast<std::int64_t>(at) * p.v_row,
                                      p.v_row, valid, p.dim);
    }
    copy_group_end();
  };
  Warp::template copy<kRows>(q_tile, q, p.q_row, p.rows - s0, p.dim);
  ask(0);
  Warp w;
  w.clear();
  const int row0 = warp * 16 * kM, fewest = visible_keys(p, keys, s0 + row0);
  FlashMask<T> mask;
  __shared__ float key_line[2 * kFlashKeys];
  FlashKeyMask<T> of_keys{key_line};
  const bool by_keys = p.mask != nullptr && p.mask_row == 0;
  const bool mask_ahead = Shape::kMaskAhead && p.mask != nullptr && !by_keys;
  if (by_keys) of_keys.ask(p, b, h, 0);
  for (int tile = 0; tile < tiles; ++tile) {
    if (mask_ahead) {
      mask.load(p, b, h, s0 + row0 + lane / 4, tile * kFlashKeys + lane % 4 * 2);
    }
    copy_groups_wait<0>();
    bool seen_by_some = true;
    if (by_keys) {
      seen_by_some = of_keys.put(p, tile);
      of_keys.ask(p, b, h, (tile + 1) * kFlashKeys);
    } else {
      __syncthreads();  // this tile is there; the one before is no longer read
    }
    ask(tile + 1);
    if (!seen_by_some) continue;
    const int at = kRows * Warp::kRowBytes + tile % 2 * 2 * kTile;
    float score[kM][kFlashKeys / 8][4];
    w.find_scores(q_tile + row0 * Warp::kRowBytes, q_tile + at, score);
    const int first_key = tile * kFlashKeys;
    if (p.mask == nullptr && p.scale > 0.0f && first_key + kFlashKeys <= fewest) {
      w.soften(score, p.scale * kLog2E);
    } else if (by_keys && first_key + kFlashKeys <= fewest) {
      const float* line = key_line + tile % 2 * kFlashKeys + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kFlashKeys / 4; ++i) {
        const float hidden = line[i / 2 * 8 + i % 2];
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& x = score[m][i / 2][2 * half + i % 2];
            x = masked(p, x, hidden);
          }
        }
      }
      w.soften(score, 1.0f);
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
            const auto score_of = [&] {
              if (by_keys) return masked(p, x, key_line[tile % 2 * kFlashKeys + j - first_key]);
              if constexpr (Shape::kMaskAhead) {
                return masked(p, x, mask_ahead ? mask.value[half][i] : 0.0f);
              } else {
                return masked_score<T>(p, x, b, h, s, j);
              }
            };
            x = j < seen ? score_of() : minus_infinity();
          }
        }
      }
      w.soften(score, 1.0f);
    }
    w.add_values(memory + at + kTile, q_tile + at + kTile, score);
  }
  copy_groups_wait<0>();
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
        Warp::store_pair(o + column, w.sum[m][d][2 * half] * scale,
                         w.sum[m][d][2 * half + 1] * scale);
      }
      if (p.lse && lane % 4 == 0) {
        p.lse[(static_cast<std::int64_t>(b) * p.heads + h) * p.rows + s] =
            w.top[m][half] / kLog2E + logf(total);
      }
    }
  }
}

}  // namespace rm::cuda_ops
