// What one warpgroup of sdpa_backward_wgmma has of its 64 rows: sums, and a tile's scores and
// slopes from the products to what multiplies the tile again.
#pragma once

#include "sdpa/kernels/sdpa_common.cuh"
#include "sdpa/kernels/sdpa_ptx_sm90a.cuh"

namespace rm::cuda_ops {

/// What a launch computes. keys: dk and dv; where registers do not hold both, one after the other.
enum class GradPart { queries, keys, dk, dv };

template <int kD, GradPart kPart>
struct GradShape {
  /// Warpgroups of 64 rows; three where their registers suffice.
  static constexpr int kGroups = kD == 64 && kPart == GradPart::queries ? 3 : 2;
  static constexpr int kFew = kGroups == 3 ? 32 : 24, kMany = kGroups == 3 ? 160 : 240;
  static constexpr int kRows = kGroups * 64, kThreads = (kGroups + 1) * 128;
  static constexpr int kTile = kD == 256 ? 32 : 64, kStages = 3;
  static constexpr int kRowsBytes = kRows * kD * 2, kTileBytes = kTile * kD * 2;
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kStatistics = 2 * kRowsBytes + kStages * kStageBytes;  // where they lie
  static constexpr int kMemory = 1024 + kStatistics + kStages * 2 * kTile * 4;
};

/// A block's rows and the tiles it goes through.
struct GradBlock {
  int b, head, row0, keys;  // head: of queries, or a key head
  int first, tiles, turns;  // first tile of a head, their number, heads that are gone through
};

/// One warpgroup's 64 rows.
template <class T, int kD, GradPart kPart>
struct GradRows {
  using Shape = GradShape<kD, kPart>;
  static constexpr int kTile = Shape::kTile;
  static constexpr bool kQueries = kPart == GradPart::queries;
  static constexpr bool kFirst = kPart != GradPart::dv;  // the sums of slopes
  static constexpr bool kSecond = kPart == GradPart::keys || kPart == GradPart::dv;
  float first[kFirst ? kD / 2 : 2], second[kSecond ? kD / 2 : 2];
  float score[kTile / 2], slope[kTile / 2];

  /// Starts to = a b^T.
  __device__ __forceinline__ static void ask_products(float (&to)[kTile / 2], std::uint32_t a,
                                                      std::uint32_t b) {
    const std::uint64_t x = wgmma_descriptor(a), y = wgmma_descriptor(b);
#pragma unroll
    for (int c = 0; c < kD / 64; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_ss<T, kTile>(to, x + (c * Shape::kRows * 128 >> 4) + 2 * i,
                           y + (c * kTile * 128 >> 4) + 2 * i, c + i);
      }
    }
    wgmma_commit();
  }
  /// Starts to += values tile, the values rounded.
  template <int kCount>
  __device__ __forceinline__ static void ask_sums(float (&to)[kCount],
                                                  const std::uint32_t (&values)[kTile / 4],
                                                  std::uint32_t tile) {
    const std::uint64_t b = wgmma_descriptor(tile, kTile * 128);
#pragma unroll
    for (int i = 0; i < kTile / 16; ++i) wgmma_rs<T, kD>(to, values + 4 * i, b + i * (2048 >> 4));
    wgmma_commit();
  }
  __device__ __forceinline__ static void pack(std::uint32_t (&to)[kTile / 4],
                                              const float (&from)[kTile / 2]) {
#pragma unroll
    for (int i = 0; i < kTile / 4; ++i) to[i] = pack_pair<T>(from[2 * i], from[2 * i + 1]);
  }
  /// Scores become weights where every row sees every column. `rows_lse` is of rows g and g + 8,
  /// `columns_lse` in memory: whichever side the queries are.
  __device__ __forceinline__ void weigh(float scale, const float (&rows_lse)[2],
                                        const float* columns_lse) {
#pragma unroll
    for (int i = 0; i < kTile / 2; i += 4) {
      float2 column{};
      if constexpr (!kQueries) {
        column = *reinterpret_cast<const float2*>(columns_lse + i * 2 + threadIdx.x % 4 * 2);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float base = kQueries ? rows_lse[j / 2] : j % 2 ? column.y : column.x;
        score[i + j] = power_of_2(fmaf(score[i + j], scale, -base));
      }
    }
  }
  /// Rows g and g + 8 see the columns from `from` up to `to`: others weigh nothing.
  __device__ __forceinline__ void hide(const int (&from)[2], const int (&to)[2]) {
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) {
      const int column = i / 4 * 8 + static_cast<int>(threadIdx.x % 4) * 2 + i % 2,
                half = i / 2 % 2;
      if (column < from[half] || column >= to[half]) score[i] = 0.0f;
    }
  }
  /// What weighs nothing may be anything.
  __device__ __forceinline__ void hide_slopes() {
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) {
      if (score[i] == 0.0f) slope[i] = 0.0f;
    }
  }
  /// As weigh, with a mask.
  __device__ __forceinline__ void weigh_masked(const SdpaArgs& f, const GradBlock& t, int h, int r,
                                               int column0, const float (&rows_lse)[2],
                                               const float* columns_lse) {
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) {
      const int column = i / 4 * 8 + static_cast<int>(threadIdx.x % 4) * 2 + i % 2;
      const int row = r + i / 2 % 2 * 8;
      const int s = kQueries ? row : column0 + column, j = kQueries ? column0 + column : row;
      const bool seen = s < f.rows && j < visible_keys(f, t.keys, s);
      const float x = seen ? masked_score<T>(f, score[i], t.b, h, s, j) : minus_infinity();
      const float base = kQueries ? rows_lse[i / 2 % 2] : columns_lse[column];
      score[i] = x == minus_infinity() ? 0.0f : power_of_2(x - base);
    }
  }
  /// d_o v^T becomes the slopes of the scores.
  __device__ __forceinline__ void find_slopes(const float (&rows_delta)[2],
                                              const float* columns_delta) {
#pragma unroll
    for (int i = 0; i < kTile / 2; i += 4) {
      float2 column{};
      if constexpr (!kQueries) {
        column = *reinterpret_cast<const float2*>(columns_delta + i * 2 + threadIdx.x % 4 * 2);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float mean = kQueries ? rows_delta[j / 2] : j % 2 ? column.y : column.x;
        const float weight = score[i + j];
        slope[i + j] = weight * (slope[i + j] - mean);
      }
    }
  }
};

}  // namespace rm::cuda_ops
