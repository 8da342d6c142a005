// Products of activations of 8 bits with weights in tiles of eight rows, for one ISA and, compiled
// again, for its byte products (VNNI). Bound: reading the weight once.
//
// A 32-bit lane of a vector is four neighbouring elements of one row, so a vector times four
// elements of x that all lanes share adds up eight rows without a horizontal sum; a block of 32
// costs one conversion and one multiplication by the scales of eight rows.
#include "ops/quant/isa_half.hpp"
#include "ops/quant/tile.hpp"

namespace rm::cpu::quant::RM_ISA {
namespace {

using namespace gemm::RM_ISA;
constexpr float kLimit = 127.f;
constexpr float kRounder = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
constexpr int64_t kAhead = 3072;        // prefetch distance, bytes

// ---- activations
// ----------------------------------------------------------------------------------

#if defined(__AVX2__)
RM_INLINE uint32_t largest(__m256i v) {
  const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1))));
}
RM_INLINE int32_t add_lanes(__m256i v) {
  const __m128i four =
      _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
#endif

/// The largest of a block's words.
RM_INLINE uint32_t largest_of(const vu* v) {
#if defined(__AVX512F__)
  const __m512i both = _mm512_max_epu32((__m512i)v[0], (__m512i)v[1]);
  return largest(_mm256_max_epu32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1)));
#elif defined(__AVX2__)
  return largest(_mm256_max_epu32(_mm256_max_epu32((__m256i)v[0], (__m256i)v[1]),
                                  _mm256_max_epu32((__m256i)v[2], (__m256i)v[3])));
#else
  uint32_t most = 0;
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t word = v[i / kWidth][i % kWidth];
    most = word > most ? word : most;
  }
  return most;
#endif
}

/// A block's integers as bytes; returns their sum.
RM_INLINE int32_t store_bytes(const vu* q, int8_t* values) {
#if defined(__AVX512F__)
  auto* to = reinterpret_cast<__m128i*>(values);
  _mm_storeu_si128(to, _mm512_cvtepi32_epi8((__m512i)q[0]));
  _mm_storeu_si128(to + 1, _mm512_cvtepi32_epi8((__m512i)q[1]));
  const __m512i both = _mm512_add_epi32((__m512i)q[0], (__m512i)q[1]);
  return add_lanes(_mm256_add_epi32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1)));
#elif defined(__AVX2__)
  const __m256i low = _mm256_packs_epi32((__m256i)q[0], (__m256i)q[1]);
  const __m256i high = _mm256_packs_epi32((__m256i)q[2], (__m256i)q[3]);
  // Packing works on halves: their words of four bytes go back to their places.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(values),
                      _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
  return add_lanes(_mm256_add_epi32(_mm256_add_epi32((__m256i)q[0], (__m256i)q[1]),
                                    _mm256_add_epi32((__m256i)q[2], (__m256i)q[3])));
#else
  int32_t sum = 0;
  for (int i = 0; i < kBlock; ++i) {
    const auto value = static_cast<int32_t>(q[i / kWidth][i % kWidth]);
    values[i] = static_cast<int8_t>(value);
    sum += value;
  }
  return sum;
#endif
}

/// One block: value = round(x * (127 / largest)), ties to even. Where something is not finite the
/// scale is NaN. The product is rounded before the sum is: an integer of the second implementation
/// (python/rm_abstract/verification/quantised.py) must be the same.
RM_INLINE void round_block(const vf* x, int8_t* values, float* scale, int32_t* sum) {
  constexpr int kVectors = kBlock / kWidth;
  vu magnitudes[kVectors];  // ordered as integers as they are as floats, infinity and NaN last
  for (int i = 0; i < kVectors; ++i) magnitudes[i] = (vu)x[i] & 0x7fffffff;
  const uint32_t word = largest_of(magnitudes);
  const bool good = word < 0x7f800000u;
  float most;
  __builtin_memcpy(&most, &word, sizeof most);
  // Below 2^-110 the inverse would overflow: such blocks are zero beside any other.
  const float inverse = good && most > 0x1p-110f ? kLimit / most : 0.f;
  *scale = good ? most / kLimit : __builtin_nanf("");
  vu q[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    vf scaled = (good ? x[i] : vf{}) * inverse;
#if defined(__x86_64__)
    __asm__("" : "+x"(scaled));  // no fused multiply-add
#endif
    q[i] = (vu)(scaled + kRounder) - 0x4b400000u;
  }
  *sum = store_bytes(q, values);
}

template <class T>
void round_row(const RoundArgs& a) {
  using S = typename T::Scalar;
  vf x[kBlock / kWidth];
  for (int64_t b = 0; b < a.blocks; ++b) {
    const S* src = static_cast<const S*>(a.src) + b * kBlock * a.col_stride;
    const int64_t left = a.k - b * kBlock;
    const int64_t count = left < kBlock ? (left < 0 ? 0 : left) : kBlock;
    S copy[kBlock];
    if (count < kBlock || a.col_stride != 1) {
      __builtin_memset(copy, 0, sizeof copy);
      for (int64_t i = 0; i < count; ++i) copy[i] = src[i * a.col_stride];
      src = copy;
    }
    for (int i = 0; i < kBlock / kWidth; ++i) x[i] = T::load(src + i * kWidth);
    round_block(x, a.values + b * a.values_step, a.scales + b * a.scales_step,
                a.sums + b * a.scales_step);
  }
}

// ---- products
// -------------------------------------------------------------------------------------

/// The group of a block; blocks of padding have x = 0 and take the last one's.
RM_INLINE int64_t group_of(const TileArgs& a, int64_t b) {
  const int64_t g = b / a.group_blocks;
  return g < a.groups ? g : a.groups - 1;
}

#if defined(__AVX2__)
// u: unsigned bytes, s: signed ones, four products a lane added to the sum.
#if defined(__AVX512VNNI__)
#define RM_BYTE_PRODUCTS 1
RM_INLINE __m256i add_products(__m256i sum, __m256i u, __m256i s) {
  return _mm256_dpbusd_epi32(sum, u, s);
}
#elif defined(__AVXVNNI__)
#define RM_BYTE_PRODUCTS 1
RM_INLINE __m256i add_products(__m256i sum, __m256i u, __m256i s) {
  return _mm256_dpbusd_avx_epi32(sum, u, s);
}
#else
#define RM_BYTE_PRODUCTS 0
#endif

RM_INLINE __m256i four_of(const int8_t* x) {
  int32_t v;
  __builtin_memcpy(&v, x, 4);
  return _mm256_set1_epi32(v);
}

/// Products of weights 0..15 and x in a block's 32 bits or, without byte products, 16: eight times
/// two of them stay below 2^15 (8 * 2 * 15 * 127 = 30480).
RM_INLINE __m256i add_nibbles(__m256i sum, __m256i n, __m256i x) {
#if RM_BYTE_PRODUCTS
  return add_products(sum, n, x);
#else
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(n, x));
#endif
}
RM_INLINE __m256i close_nibbles(__m256i sum) {
#if RM_BYTE_PRODUCTS
  return sum;
#else
  return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
#endif
}

/// Weights of -127..127. With byte products they are 128 too large, which the block takes back.
RM_INLINE __m256i add_bytes(__m256i sum, __m256i w, __m256i x) {
#if RM_BYTE_PRODUCTS
  return add_products(sum, _mm256_xor_si256(w, _mm256_set1_epi8(-128)), x);
#else
  const __m256i both = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(w, x));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(both, _mm256_set1_epi16(1)));
#endif
}
constexpr int kByteOffset = RM_BYTE_PRODUCTS ? 128 : 0;

RM_INLINE __m256 add_block(const TileArgs& a, int t, int64_t b, int offset, __m256i products,
                           __m256 sum) {
  const __m128i half =
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(a.scale[t] + group_of(a, b) * kTile));
  const __m256 factors = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(a.scales[b]));
  if (offset != 0) {
    products = _mm256_sub_epi32(products, _mm256_set1_epi32(a.sums[b] * offset));
  }
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), factors, sum);
}

template <int kTiles>
void dot4(const TileArgs& a) {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256 even[kTiles], odd[kTiles];
  for (int t = 0; t < kTiles; ++t) even[t] = odd[t] = _mm256_setzero_ps();
  for (int64_t b = 0; b < a.blocks; b += 2) {
    __m256i low[kTiles], high[kTiles];
    for (int t = 0; t < kTiles; ++t) low[t] = high[t] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int u = 0; u < 8; ++u) {
      const __m256i x0 = four_of(a.x + b * kBlock + 4 * u);
      const __m256i x1 = four_of(a.x + (b + 1) * kBlock + 4 * u);
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) {
        const uint8_t* w = a.w[t] + b * (kTile * 16) + 32 * u;
        if (u % 2 == 0) __builtin_prefetch(w + kAhead, 0, 3);
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
        low[t] = add_nibbles(low[t], _mm256_and_si256(both, mask), x0);
        high[t] = add_nibbles(high[t], _mm256_and_si256(_mm256_srli_epi16(both, 4), mask), x1);
      }
    }
    for (int t = 0; t < kTiles; ++t) {
      even[t] = add_block(a, t, b, 8, close_nibbles(low[t]), even[t]);
      odd[t] = add_block(a, t, b + 1, 8, close_nibbles(high[t]), odd[t]);
    }
  }
  for (int t = 0; t < kTiles; ++t) _mm256_storeu_ps(a.out[t], _mm256_add_ps(even[t], odd[t]));
}

template <int kTiles>
void dot8(const TileArgs& a) {
  __m256 sum[kTiles];
  for (int t = 0; t < kTiles; ++t) sum[t] = _mm256_setzero_ps();
  for (int64_t b = 0; b < a.blocks; ++b) {
    __m256i products[kTiles];
    for (int t = 0; t < kTiles; ++t) products[t] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int u = 0; u < 8; ++u) {
      const __m256i x = four_of(a.x + b * kBlock + 4 * u);
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) {
        const uint8_t* w = a.w[t] + b * (kTile * 32) + 32 * u;
        if (u % 2 == 0) __builtin_prefetch(w + kAhead, 0, 3);
        const __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
        products[t] = add_bytes(products[t], eight, x);
      }
    }
    for (int t = 0; t < kTiles; ++t) sum[t] = add_block(a, t, b, kByteOffset, products[t], sum[t]);
  }
  for (int t = 0; t < kTiles; ++t) _mm256_storeu_ps(a.out[t], sum[t]);
}
#else
template <int kTiles, int kBits>
void dot_plain(const TileArgs& a) {
  for (int t = 0; t < kTiles; ++t) {
    float sum[kTile] = {};
    for (int64_t b = 0; b < a.blocks; ++b) {
      int32_t products[kTile] = {};
      for (int i = 0; i < kBlock; ++i) {
        for (int r = 0; r < kTile; ++r) {
          const int at = (i / 4 * kTile + r) * 4 + i % 4;
          const uint8_t* w = a.w[t] + (kBits == 8 ? b : b / 2) * (kTile * 32) + at;
          const int q = kBits == 8 ? static_cast<int8_t>(*w) : (b % 2 == 0 ? *w & 15 : *w >> 4) - 8;
          products[r] += q * a.x[b * kBlock + i];
        }
      }
      const uint16_t* scale = a.scale[t] + group_of(a, b) * kTile;
      for (int r = 0; r < kTile; ++r) {
        sum[r] += static_cast<float>(products[r]) * (half_to_float(scale[r]) * a.scales[b]);
      }
    }
    for (int r = 0; r < kTile; ++r) a.out[t][r] = sum[r];
  }
}
template <int kTiles>
void dot8(const TileArgs& a) {
  dot_plain<kTiles, 8>(a);
}
template <int kTiles>
void dot4(const TileArgs& a) {
  dot_plain<kTiles, 4>(a);
}
#endif

// The products of one block of a row that lies alone. Written out, because GCC 12 may not see the
// plain loop where the target multiplies unsigned by signed bytes (VNNI): it takes that instruction
// for products of two signed bytes, and for nibbles from which 8 was taken, as if they were
// unsigned.
#if defined(__AVX2__)
template <int kBits>
RM_INLINE int32_t row_products(const TileArgs& a, int64_t b) {
  const auto load = [](const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  };
  const __m256i x = load(a.x + b * kBlock), none = _mm256_setzero_si256();
  if constexpr (kBits == 8) {
    return add_lanes(add_bytes(none, load(a.w[0] + b * kBlock), x)) - kByteOffset * a.sums[b];
  } else {
    const __m256i both = load(a.w[0] + b / 2 * kBlock);
    const __m256i n = _mm256_and_si256(b % 2 == 0 ? both : _mm256_srli_epi16(both, 4),
                                       _mm256_set1_epi8(15));
    return add_lanes(close_nibbles(add_nibbles(none, n, x))) - 8 * a.sums[b];
  }
}
#else
template <int kBits>
RM_INLINE int32_t row_products(const TileArgs& a, int64_t b) {
  const int8_t* x = a.x + b * kBlock;
  const uint8_t* w = a.w[0] + (kBits == 8 ? b : b / 2) * kBlock;
  int32_t products = 0;
  for (int i = 0; i < kBlock; ++i) {
    const int q = kBits == 8 ? static_cast<int8_t>(w[i]) : (w[i] >> (b % 2 * 4) & 15) - 8;
    products += x[i] * q;
  }
  return products;
}
#endif

/// Rows behind the last tile.
template <int kBits>
void dot_row(const TileArgs& a) {
  float sum = 0;
  for (int64_t b = 0; b < a.blocks; ++b) {
    const float scale = half_to_float(a.scale[0][group_of(a, b)]) * a.scales[b];
    sum += static_cast<float>(row_products<kBits>(a, b)) * scale;
  }
  *a.out[0] = sum;
}

// ---- many rows of x: weights as f32
// -------------------------------------------------------------------------------

typedef int32_t Eight __attribute__((vector_size(32)));
typedef int32_t EightMem __attribute__((vector_size(32), aligned(4), may_alias));
typedef float EightFloats __attribute__((vector_size(32)));
typedef float EightFloatsMem __attribute__((vector_size(32), aligned(4), may_alias));

RM_INLINE void store_column(const PanelArgs& a, int64_t k, const Eight& q,
                            const EightFloats& scale) {
  if (k >= a.k) return;
  *reinterpret_cast<EightFloatsMem*>(a.dst + k * a.stride) =
      __builtin_convertvector(q, EightFloats) * scale;
}

RM_INLINE void load_scales(const PanelArgs& a, int64_t k, EightFloats* out) {
  float scale[kTile];
  for (int r = 0; r < kTile; ++r) scale[r] = half_to_float(a.scale[k / a.group * kTile + r]);
  *out = *reinterpret_cast<const EightFloatsMem*>(scale);
}

template <int kBits>
void panel(const PanelArgs& a) {
  constexpr int kStep = kBits == 8 ? kBlock : 2 * kBlock;  // elements of 256 bytes
  const uint8_t* w = a.w;
  for (int64_t k = 0; k < a.k; k += kStep) {
    EightFloats scale, next;
    load_scales(a, k, &scale);
    load_scales(a, kBits == 4 && k + kBlock < a.k ? k + kBlock : k, &next);
    for (int u = 0; u < 8; ++u, w += 32) {
      const Eight lanes = *reinterpret_cast<const EightMem*>(w);
      for (int j = 0; j < 4; ++j) {
        const int64_t at = k + 4 * u + j;
        if constexpr (kBits == 8) {
          store_column(a, at, (lanes << (24 - 8 * j)) >> 24, scale);
        } else {
          store_column(a, at, ((lanes >> (8 * j)) & 15) - 8, scale);
          store_column(a, at + kBlock, ((lanes >> (8 * j + 4)) & 15) - 8, next);
        }
      }
    }
  }
}

constexpr TileSet make_set() {
  TileSet set{};
  set.round[gemm::kF32] = round_row<F32>;
  set.round[gemm::kBF16] = round_row<BF16>;
  set.round[gemm::kF16] = round_row<F16>;
  set.pair[0] = dot8<2>, set.pair[1] = dot4<2>;
  set.one[0] = dot8<1>, set.one[1] = dot4<1>;
  set.row[0] = dot_row<8>, set.row[1] = dot_row<4>;
  set.panel[0] = panel<8>, set.panel[1] = panel<4>;
  return set;
}

}  // namespace

extern constinit const TileSet tile_kernels = make_set();

}  // namespace rm::cpu::quant::RM_ISA
