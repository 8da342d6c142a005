// Attention of many queries in bf16 on matrix tiles (AMX): blocks of kBlock keys, an online softmax in
// f32 between two products of tiles. One call serves some rows of one head.
//
// Queries and weights are the tiles' left operands, as rows; keys are put in order by the gemm's
// `spread`, values here. Weights are rounded to bf16, their sum is not. Bound by the softmax.
#include <immintrin.h>

#include "ops/gemm/amx_kernels.hpp"
#include "ops/sdpa/soften.hpp"

namespace rm::cpu::gemm::amx_bf16 {
extern const AmxSet amx_kernels;
}

namespace rm::cpu::RM_ISA {
namespace {

constexpr int64_t kBlock = 256;   // keys a block
constexpr int64_t kTile = 16;     // rows and columns of a tile of sums
constexpr int64_t kPair = 32;     // rows and columns a microkernel makes: two tiles by two
constexpr int64_t kDepth = 32;    // elements of bf16 in a row of a tile
constexpr int64_t kTileBytes = 1024;

RM_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// The compiler's intrinsics do not say that they read memory.
RM_INLINE void written() { __asm__ volatile("" ::: "memory"); }

/// A left operand: rows as they lie, `row_bytes` apart. A right one: tiles by columns, then depth.
struct Left {
  const char* at;
  int64_t row_bytes;
};
struct Right {
  const char* at;
  int64_t column_bytes;  // from one tile's columns to the next
};

/// c[kTwo ? 32 : 16][32] (+)= a b over `steps` tiles of depth.
template <bool kTwo>
RM_INLINE void product(const Left& a, const Right& b, int64_t steps, float* c, int64_t ldc,
                       bool accumulate) {
  const int64_t row = ldc * 4;
  float* below = c + kTile * ldc;
  if (accumulate) {
    _tile_loadd(0, c, row);
    _tile_loadd(1, c + kTile, row);
    if constexpr (kTwo) {
      _tile_loadd(2, below, row);
      _tile_loadd(3, below + kTile, row);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < steps; ++i) {
    const char *left = a.at + i * kDepth * 2, *right = b.at + i * kTileBytes;
    _tile_loadd(4, left, a.row_bytes);
    _tile_loadd(6, right, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + b.column_bytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwo) {
      _tile_loadd(5, left + kTile * a.row_bytes, a.row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, row);
  _tile_stored(1, c + kTile, row);
  if constexpr (kTwo) {
    _tile_stored(2, below, row);
    _tile_stored(3, below + kTile, row);
  }
}

/// Up to kPair rows by `columns`, a multiple of kPair.
void multiply(const Left& a, Right b, int64_t rows, int64_t columns, int64_t steps, float* c,
              int64_t ldc, bool accumulate) {
  written();
  for (int64_t n = 0; n < columns; n += kPair, b.at += 2 * b.column_bytes) {
    if (rows > kTile) {
      product<true>(a, b, steps, c + n, ldc, accumulate);
    } else {
      product<false>(a, b, steps, c + n, ldc, accumulate);
    }
  }
}

/// Sums of a row depend on that row alone: whatever stands behind the last row is computed, not looked at.
struct Scratch {
  char *queries, *keys, *values, *weights;
  float *scores, *acc, *most, *sum, *addend;
  int64_t* ends;        // of each kPair rows: what is behind their last key
  int64_t d, e, block;  // rounded to whole tiles, and pairs of them
};

uint64_t lay_out(const SdpaShape& p, int64_t rows, char* base, Scratch* out) {
  const int64_t d = round_up(imax(p.d, 1), kDepth), e = round_up(imax(p.e, 1), kPair);
  const int64_t block = imin(kBlock, round_up(imax(p.t, 1), kPair)), all = round_up(rows, kPair);
  out->d = d, out->e = e, out->block = block;
  uint64_t bytes = 0;
  const auto take = [&](auto** field, int64_t size) {
    *field = reinterpret_cast<decltype(*field + 0)>(base + bytes);
    bytes += (static_cast<uint64_t>(size) + 63) & ~63ull;
  };
  take(&out->queries, all * d * 2);
  take(&out->keys, block * d * 2);
  take(&out->values, block * e * 2);
  take(&out->weights, kPair * block * 2);
  take(&out->scores, kPair * block * 4);
  take(&out->acc, all * e * 4);
  take(&out->most, all * 4);
  take(&out->sum, all * 4);
  take(&out->addend, block * 4);
  take(&out->ends, all / kPair * 8);
  return bytes;
}

/// Lanes of a vector of scores at `i` that lie in front of `valid`.
RM_INLINE __mmask16 lanes_of(int64_t i, int64_t valid) {
  return static_cast<__mmask16>(i + kWidth <= valid ? 0xffff : (1u << (valid - i)) - 1);
}

/// Scores of one row, with what the mask adds, times the scale; minus infinity behind `valid`.
template <bool kMasked>
RM_INLINE vf scaled(const float* row, int64_t i, int64_t valid, float scale, const float* addend) {
  vf x = vload(row + i) * scale;
  if constexpr (kMasked) x += vload(addend + i);
  return (vf)_mm512_mask_blend_ps(lanes_of(i, valid), (__m512)vset(-kInf), (__m512)x);
}

/// e to the x, x <= 0 or NaN; results below 2^-126 are zero. 2^-23 of the value is lost where the
/// result is rounded to 2^-9: a fraction of at most a half by a polynomial, the rest into the exponent.
RM_INLINE vf weight_of(vf x) {
  const vf y = x * 1.44269504f;
  const vf n = (vf)_mm512_roundscale_ps((__m512)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const vf f = y - n;
  vf r = vset(0.00132647227f);
  r = r * f + 0.00967151299f;
  r = r * f + 0.0555073359f;
  r = r * f + 0.240222424f;
  r = r * f + 0.693147004f;
  r = r * f + 1.0f;
  const __mmask16 kept = _mm512_cmp_ps_mask((__m512)y, (__m512)vset(-126.0f), _CMP_NLT_UQ);
  return (vf)_mm512_maskz_scalef_ps(kept, (__m512)r, (__m512)n);
}

/// The largest of a row's scaled scores in front of `valid`.
template <bool kMasked>
RM_INLINE float largest(const float* row, int64_t valid, float scale, const float* addend) {
  vf high = vset(-kInf);
  if (kMasked || !(scale > 0)) {
    for (int64_t i = 0; i < valid; i += kWidth) {
      high = vmax(scaled<kMasked>(row, i, valid, scale, addend), high);
    }
    return vmax_of(high);
  }
  // A rounded product keeps the order: the largest score's is the largest.
  int64_t i = 0;
  vf other = high;
  for (; i + 2 * kWidth <= valid; i += 2 * kWidth) {
    high = vmax(vload(row + i), high);
    other = vmax(vload(row + i + kWidth), other);
  }
  for (; i < valid; i += kWidth) {
    high = vmax((vf)_mm512_mask_blend_ps(lanes_of(i, valid), (__m512)high, (__m512)vload(row + i)), high);
  }
  return vmax_of(vmax(other, high)) * scale;
}

/// As soften.hpp's, but weights are made in bf16, elsewhere, and scores are left: two passes that
/// write little.
template <bool kMasked>
static float soften_to_bf16(const float* row, int64_t valid, int64_t width, float scale,
                               const float* addend, float* most, float* sum, char* weights) {
  const float block_most = largest<kMasked>(row, valid, scale, addend);
  const float now = block_most > *most ? block_most : *most;
  // A NaN score leaves `now` alone but makes its weight, and so the row, NaN.
  const float shift = now == -kInf ? 0.0f : now;
  vf total{};
  const auto store = [&](int64_t i, vf w) __attribute__((always_inline)) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + i * 2),
                        (__m256i)_mm512_cvtneps_pbh((__m512)w));
  };
  int64_t i = 0;
  for (; i + kWidth <= valid; i += kWidth) {
    vf x = vload(row + i) * scale;
    if constexpr (kMasked) x += vload(addend + i);
    const vf w = weight_of(x - shift);
    total += w;
    store(i, w);
  }
  for (; i < valid; i += kWidth) {
    const vf w = weight_of(scaled<kMasked>(row, i, valid, scale, addend) - shift);
    total += w;
    store(i, w);
  }
  for (; i < width; i += kWidth) store(i, vf{});
  if (now == *most) {
    *sum += vsum(total);
    return 1.0f;
  }
  const float before = *most == -kInf ? 0.0f : vexp_nonpositive(vset(*most - shift))[0];
  *sum = *sum * before + vsum(total);
  *most = now;
  return before;
}

struct Rows {
  const SdpaShape& p;
  const SdpaData& data;
  Scratch scratch;
  int64_t b, h, s0, s1;

  /// Dense rows of whole tiles, zeros around them.
  void load_queries() {
    const auto* q = static_cast<const bf16*>(data.q) + b * p.q[0] + h * p.q[1] + s0 * p.q[2];
    const int64_t count = s1 - s0;
    __builtin_memset(scratch.queries, 0, static_cast<size_t>(round_up(count, kPair) * scratch.d * 2));
    for (int64_t s = 0; s < count; ++s) {
      __builtin_memcpy(scratch.queries + s * scratch.d * 2, q + s * p.q[2],
                       static_cast<size_t>(p.d) * 2);
    }
  }

  void load_keys(int64_t t0, int64_t n) {
    const int64_t g = h / (p.heads / p.groups), groups = round_up(n, kPair) / kTile;
    const auto* k = static_cast<const bf16*>(data.k) + b * p.k[0] + g * p.k[1] + t0 * p.k[2];
    gemm::amx_bf16::amx_kernels.spread(
        {k, p.k[2], 1, n, p.d, 0, groups * (scratch.d / kDepth), scratch.keys});
  }

  /// Tiles [columns][keys]: of two neighbouring keys, pairs of values.
  void load_values(int64_t t0, int64_t n) {
    const int64_t g = h / (p.heads / p.groups), keys = round_up(n, kPair);
    const auto* v = static_cast<const uint16_t*>(data.v) + b * p.v[0] + g * p.v[1] + t0 * p.v[2];
    for (int64_t i = 0; i < scratch.e; i += kTile) {
      const auto count = static_cast<int>(imax(0, imin(kTile, p.e - i)));
      const auto some = static_cast<__mmask16>((1u << count) - 1);
      char* tiles = scratch.values + i / kTile * (scratch.block / kDepth) * kTileBytes;
      for (int64_t t = 0; t < keys; t += 2) {
        const auto load = [&](int64_t key) __attribute__((always_inline)) {
          return _mm512_cvtepu16_epi32(
              _mm256_maskz_loadu_epi16(key < n ? some : __mmask16{0}, v + key * p.v[2] + i));
        };
        const __m512i low = load(t), high = _mm512_slli_epi32(load(t + 1), 16);
        _mm512_store_si512(tiles + t / kDepth * kTileBytes + t % kDepth / 2 * 64,
                           _mm512_or_si512(low, high));
      }
    }
  }

  void block(int64_t t0, int64_t n) {
    load_keys(t0, n);
    load_values(t0, n);
    for (int64_t r0 = s0; r0 < s1; r0 += kPair) {
      const int64_t rows = imin(kPair, s1 - r0);
      // Under a causal or banded mask the rows end long before the block does.
      const int64_t end = imin(n, scratch.ends[(r0 - s0) / kPair] - t0);
      if (end > 0) {
        row_block(t0, end, r0, rows);
      } else if (t0 == 0) {
        __builtin_memset(scratch.acc + (r0 - s0) * scratch.e, 0,
                         static_cast<size_t>(kPair * scratch.e) * 4);
      }
    }
  }

  /// Queries [r0, r0 + rows) with keys [t0, t0 + n).
  void row_block(int64_t t0, int64_t n, int64_t r0, int64_t rows) {
    const int64_t at = r0 - s0, width = round_up(n, kPair), depth = scratch.d / kDepth;
    multiply({scratch.queries + at * scratch.d * 2, scratch.d * 2}, {scratch.keys, depth * kTileBytes},
             rows, width, depth, scratch.scores, width, false);
    bool masked = false;
    for (int64_t i = 0; i < rows; ++i) {
      if (p.mask != DType::invalid && (i == 0 || p.m[2] != 0)) {
        const char* row = mask_row(p, data, b, h, r0 + i) + t0 * p.m[3] * mask_bytes(p.mask);
        masked = mask_addend(p.mask, row, p.m[3], n, scratch.addend);
      }
      const int64_t valid = p.causal ? imax(0, imin(n, r0 + i + 1 - t0)) : n;
      const auto softened = masked ? soften_to_bf16<true> : soften_to_bf16<false>;
      const float factor =
          softened(scratch.scores + i * width, valid, width, p.scale, scratch.addend,
                   scratch.most + at + i, scratch.sum + at + i, scratch.weights + i * width * 2);
      if (t0 > 0 && factor != 1.0f) rescale(scratch.acc + (at + i) * scratch.e, factor);
    }
    multiply({scratch.weights, width * 2}, {scratch.values, scratch.block / kDepth * kTileBytes},
             rows, scratch.e, width / kDepth, scratch.acc + at * scratch.e, scratch.e, t0 > 0);
  }

  void rescale(float* acc, float factor) const {
    for (int64_t i = 0; i < scratch.e; i += kWidth) vstore(acc + i, vload(acc + i) * factor);
  }
};

void run(const SdpaShape& p, const SdpaData& data, int64_t b, int64_t h, int64_t s0, int64_t s1,
         char* memory) {
  Rows rows{p, data, {}, b, h, s0, s1};
  Scratch& scratch = rows.scratch;
  lay_out(p, s1 - s0, memory, &scratch);
  const int64_t all = round_up(s1 - s0, kPair);
  for (int64_t i = 0; i < all; ++i) scratch.most[i] = -kInf, scratch.sum[i] = 0;
  const int64_t end = find_keys_ends(p, data, b, h, s0, s1, kPair, scratch.ends);
  if (end == 0) {
    __builtin_memset(scratch.acc, 0, static_cast<size_t>(all * scratch.e) * 4);
  } else {
    rows.load_queries();
    gemm::amx_bf16::amx_kernels.open();
    for (int64_t t0 = 0; t0 < end; t0 += kBlock) rows.block(t0, imin(kBlock, end - t0));
    gemm::amx_bf16::amx_kernels.close();
  }
  write_rows<bf16>(p, data, b, h, s0, s1, scratch.acc, scratch.e, scratch.most, scratch.sum);
}

uint64_t scratch_bytes(const SdpaShape& p, int64_t rows) {
  Scratch unused;
  return lay_out(p, rows, nullptr, &unused);
}

}  // namespace

extern const SdpaPrefill sdpa_prefill;
const SdpaPrefill sdpa_prefill = {run, scratch_bytes, kTile, kPair, kPair, kBlock};

}  // namespace rm::cpu::RM_ISA
