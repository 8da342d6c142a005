// What decoding kernels have of a key head's query rows: fragments of the queries in registers, rotated
// as they are read in a step (SdpaStepArgs); which keys each row sees; and the step's new key and value.
// What the kernel before wrote is read past the L1 cache: it may still run beside this one.
#pragma once

#include "sdpa/kernels/sdpa_decode_join_sm80.cuh"
#include "sdpa/kernels/sdpa_warp_sm80.cuh"

namespace rm::cuda_ops {

/// In place of SdpaStepArgs: the caches are complete.
struct SdpaNoStep {};
template <class Step>
inline constexpr bool kSdpaStep = std::is_base_of_v<SdpaStepArgs, Step>;
/// Whether q and the new key are rotated.
template <class Step>
inline constexpr bool kSdpaTurns = std::is_same_v<Step, SdpaStepArgs>;

__device__ __forceinline__ std::int64_t position_of(const SdpaStepArgs& f) {
  return f.position_is_64 ? __ldcg(static_cast<const long long*>(f.position))
                          : __ldcg(static_cast<const int*>(f.position));
}

template <class T>
__device__ __forceinline__ std::uint32_t word_at(const T* at) {
  return __ldcg(reinterpret_cast<const std::uint32_t*>(at));
}
template <class T>
__device__ __forceinline__ float2 pair_of(std::uint32_t bits) {
  const T* v = reinterpret_cast<const T*>(&bits);
  return {to_float(v[0]), to_float(v[1])};
}

/// cos and sin of columns d, d + 1 and of their partners half a row on.
template <class T>
struct DecodeAngles {
  std::uint32_t cos[2], sin[2];

  __device__ __forceinline__ void load(const SdpaStepArgs& f, int b, int d, int half) {
    const T* c = static_cast<const T*>(f.cos) + b * f.cos_batch + d;
    const T* s = static_cast<const T*>(f.sin) + b * f.sin_batch + d;
    cos[0] = word_at(c), cos[1] = word_at(c + half);
    sin[0] = word_at(s), sin[1] = word_at(s + half);
  }
  __device__ __forceinline__ void turn(std::uint32_t& low, std::uint32_t& high) const {
    const float2 c1 = pair_of<T>(cos[0]), c2 = pair_of<T>(cos[1]);
    const float2 s1 = pair_of<T>(sin[0]), s2 = pair_of<T>(sin[1]);
    const float2 x = pair_of<T>(low), y = pair_of<T>(high);
    low = pack_pair<T>(x.x * c1.x - y.x * s1.x, x.y * c1.y - y.y * s1.y);
    high = pack_pair<T>(y.x * c2.x + x.x * s2.x, y.y * c2.y + x.y * s2.y);
  }
};

/// Columns d, d + 1 and their partners half a row on, rotated.
template <class T>
__device__ __forceinline__ void rotate_pairs(const SdpaStepArgs& f, int b, int d, int half,
                                             std::uint32_t& low, std::uint32_t& high) {
  DecodeAngles<T> angles;
  angles.load(f, b, d, half);
  angles.turn(low, high);
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
  template <class Step>
  __device__ __forceinline__ void load(const Step& f, int b, int g) {
    const T* key = static_cast<const T*>(f.k) + b * f.k_batch + g * f.k_head;
    const T* value = static_cast<const T*>(f.v) + b * f.v_batch + g * f.v_head;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int d = column(i);
      if (d >= kHalf) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        k[i][h] = word_at(key + d + h * kHalf);
        v[i][h] = word_at(value + d + h * kHalf);
      }
      if constexpr (kSdpaTurns<Step>) rotate_pairs<T>(f, b, d, kHalf, k[i][0], k[i][1]);
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
  __device__ __forceinline__ void append(const SdpaArgs& p, const SdpaStepArgs& f, int b, int g,
                                         std::int64_t at) const {
    store(static_cast<T*>(f.k_cache) + b * p.k_batch + g * p.k_head + at * p.k_row,
          static_cast<T*>(f.v_cache) + b * p.v_batch + g * p.v_head + at * p.v_row);
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

/// What the mask says of a lane's scores in a tile of kKeys keys, as it is stored: asked for before the
/// tile is needed.
template <class T, int kKeys>
struct DecodeMask {
  std::uint32_t word[kKeys / 8][4];

  /// Keys from `first` on; `q` has found its rows.
  template <class Query>
  __device__ __forceinline__ void load(const SdpaArgs& p, const Query& q, int b, int first, int rows) {
    if (p.mask == nullptr) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && rows <= 8) break;
      const std::int64_t row = b * p.mask_batch + q.head[half] * p.mask_head +
                               q.query[half] * p.mask_row;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int j = first + n * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i;
          const std::int64_t at = row + min(j, p.keys - 1) * p.mask_column;
          word[n][2 * half + i] =
              p.mask_is_bool ? __ldcg(static_cast<const std::uint8_t*>(p.mask) + at)
                             : __ldcg(static_cast<const std::uint16_t*>(p.mask) + at);
        }
      }
    }
  }
  /// As mask_at.
  __device__ __forceinline__ float at(const SdpaArgs& p, int n, int i) const {
    if (p.mask == nullptr) return 0.0f;
    if (p.mask_is_bool) return word[n][i] == 0 ? minus_infinity() : 0.0f;
    return pair_of<T>(word[n][i]).x;
  }
};

/// Row r of 16 is query r / ratio of head g * ratio + r % ratio; a lane has parts of two of them.
template <class T, int kD>
struct DecodeQuery {
  int query[2], head[2], seen[2];  // of rows lane / 4 and 8 more; seen: keys
  int fewest;                      // keys that all rows see; 0 where scores may not be scaled later
  std::uint32_t part[kD / 16][4];

  /// Which queries the rows are: looks at arguments alone.
  __device__ __forceinline__ void find(const SdpaArgs& p, int g, int rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = static_cast<int>(threadIdx.x % 32) / 4 + half * 8, in = r < rows ? r : 0;
      const int s = p.rows == 1 ? 0 : in / p.ratio;
      query[half] = s, head[half] = g * p.ratio + in - s * p.ratio;
    }
  }

  /// The rows from their swizzled tile [16][kD] in shared memory.
  __device__ __forceinline__ void take(std::uint32_t tile) {
    const int lane = threadIdx.x % 32, row = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      load_matrix_x4(part[step], tile + swizzled<kD * 2>(row, step * 2 + lane / 16));
    }
  }

  template <class Step>
  __device__ __forceinline__ void load(const SdpaArgs& p, const Step& f, int b, int g, int rows) {
    find(p, g, rows);
    const int lane = threadIdx.x % 32;
    const T* from[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      from[half] = static_cast<const T*>(p.q) + b * p.q_batch + head[half] * p.q_head +
                   query[half] * p.q_row;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i % 2 == 1 && rows <= 8) {
#pragma unroll
        for (int step = 0; step < kD / 16; ++step) part[step][i] = 0u;
        continue;
      }
      std::uint32_t found[kD / 16];
#pragma unroll
      for (int step = 0; step < kD / 16; ++step) {
        const int d = step * 16 + i / 2 * 8 + lane % 4 * 2;
        found[step] = word_at(from[i % 2] + (d < p.dim ? d : 0));
      }
      if constexpr (kSdpaTurns<Step>) {
#pragma unroll
        for (int step = 0; step < kD / 32; ++step) {
          const int d = step * 16 + i / 2 * 8 + lane % 4 * 2;
          rotate_pairs<T>(f, b, d, kD / 2, found[step], found[step + kD / 32]);
        }
      }
#pragma unroll
      for (int step = 0; step < kD / 16; ++step) {
        const bool is = lane / 4 + i % 2 * 8 < rows && step * 16 + i / 2 * 8 + lane % 4 * 2 < p.dim;
        part[step][i] = is ? found[step] : 0u;
      }
    }
  }

  /// Of a batch with `keys` keys.
  __device__ __forceinline__ void look(const SdpaArgs& p, int rows, int keys) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = static_cast<int>(threadIdx.x % 32) / 4 + half * 8;
      seen[half] = r < rows ? visible_keys(p, keys, query[half]) : 0;
    }
    fewest = p.scale > 0.0f ? visible_keys(p, keys, 0) : 0;
  }

  /// The rows against kKeys keys from `first` on, whose swizzled tiles are in shared memory; `mask`: theirs,
  /// where it was loaded before.
  template <int kKeys>
  __device__ __forceinline__ void attend(const SdpaArgs& p, int b, int first, std::uint32_t k_tile,
                                         std::uint32_t v_tile, SdpaWarp<T, kD, 1, kKeys>& w,
                                         const DecodeMask<T, kKeys>* mask = nullptr) const {
    float score[1][kKeys / 8][4];
    w.scores(
        k_tile,
        [&](int, int step, std::uint32_t(&a)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = part[step][i];
        },
        score);
    if (p.mask == nullptr && first + kKeys <= fewest) {
      w.soften(score, p.scale * kLog2E);
    } else {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = first + n * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
          float& x = score[0][n][i];
          if (j >= seen[i / 2]) {
            x = minus_infinity();
          } else if (mask != nullptr) {
            x = masked(p, x, mask->at(p, n, i));
          } else {
            x = masked_score<T>(p, x, b, head[i / 2], query[i / 2], j);
          }
        }
      }
      w.soften(score, 1.0f);
    }
    w.add(v_tile, score);
  }
};

/// A warp's sums as decode_join finds them, [16 rows][kD + 2] floats; called when no warp of the block
/// reads tiles any more.
template <class T, int kD, int kKeys>
__device__ __forceinline__ void decode_leave(const SdpaWarp<T, kD, 1, kKeys>& w, int rows,
                                             unsigned char* memory) {
  const int lane = threadIdx.x % 32;
  float* mine = reinterpret_cast<float*>(memory) + threadIdx.x / 32 * kDecodeRows * (kD + 2);
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
}

}  // namespace rm::cuda_ops
