// Products of 2 to 16 rows of x, rounded to 8 bits, with weights in tiles of eight rows, for one ISA
// and, compiled again, for its byte products (VNNI). Bound: the byte products of all rows.
//
// Bytes of the weight are unpacked once for all rows of x: vectors of 512 bits keep them in
// registers, shorter ones beside the stack. Sums of a block of 32 are exact integers; what follows,
// a conversion and a multiply-add by the scales of x and of the weight, is that of isa_tile.cpp in
// the same order, so the bits are the same.
#include "ops/quant/few_kernels.hpp"
#include "ops/quant/isa_half.hpp"

#if defined(__AVX2__)
namespace rm::cpu::quant::RM_ISA {
namespace {

constexpr int kParts = kBlock / 4;  // vectors of a block: four elements of each row
constexpr int64_t kPartBytes = kTile * 4;

// ---- vectors of both widths ---------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kLanes = kStrip, kAtOnce = 1;  // rows of the weight in a vector, rows of x at once
typedef __m512i Ints;
typedef __m512 Floats;
/// 32 bytes of two tiles side by side.
RM_INLINE Ints load(const FewArgs& a, int64_t, int64_t at) {
  const auto of = [&](int t) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a.w[t] + at));
  };
  return _mm512_inserti64x4(_mm512_castsi256_si512(of(0)), of(1), 1);
}
RM_INLINE Floats load_scales(const FewArgs& a, int64_t, int64_t at) {
  const auto of = [&](int t) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(a.scale[t] + at));
  };
  return _mm512_cvtph_ps(_mm256_set_m128i(of(1), of(0)));
}
RM_INLINE void prefetch(const FewArgs& a, int64_t, int64_t at) {
  __builtin_prefetch(a.w[0] + at, 0, 2);
  __builtin_prefetch(a.w[1] + at, 0, 2);
}
RM_INLINE Ints every_byte(int v) { return _mm512_set1_epi8(static_cast<char>(v)); }
RM_INLINE Ints every_word(int v) { return _mm512_set1_epi16(static_cast<short>(v)); }
RM_INLINE Ints every(int32_t v) { return _mm512_set1_epi32(v); }
RM_INLINE Floats every(float v) { return _mm512_set1_ps(v); }
RM_INLINE Ints low_nibbles(Ints v) { return _mm512_and_si512(v, every_byte(15)); }
RM_INLINE Ints half_of_words(Ints v) { return _mm512_srli_epi16(v, 4); }
RM_INLINE Ints flip(Ints v) { return _mm512_xor_si512(v, every_byte(-128)); }
RM_INLINE Ints add32(Ints x, Ints y) { return _mm512_add_epi32(x, y); }
RM_INLINE Ints add16(Ints x, Ints y) { return _mm512_add_epi16(x, y); }
RM_INLINE Ints multiply_bytes(Ints u, Ints s) { return _mm512_maddubs_epi16(u, s); }
RM_INLINE Ints multiply_words(Ints x, Ints y) { return _mm512_madd_epi16(x, y); }
RM_INLINE Floats multiply(Floats x, Floats y) { return _mm512_mul_ps(x, y); }
RM_INLINE Floats add(Floats x, Floats y) { return _mm512_add_ps(x, y); }
RM_INLINE Floats multiply_add(Ints x, Floats y, Floats z) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(x), y, z);
}
RM_INLINE Floats get(const float* p) { return _mm512_load_ps(p); }
RM_INLINE void put(float* p, Floats v) { _mm512_store_ps(p, v); }
RM_INLINE void put_anywhere(float* p, Floats v) { _mm512_storeu_ps(p, v); }
#else
constexpr int kLanes = kTile, kAtOnce = 2;
typedef __m256i Ints;
typedef __m256 Floats;
RM_INLINE Ints load(const FewArgs& a, int64_t tile, int64_t at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a.w[tile] + at));
}
RM_INLINE Floats load_scales(const FewArgs& a, int64_t tile, int64_t at) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a.scale[tile] + at)));
}
RM_INLINE void prefetch(const FewArgs& a, int64_t tile, int64_t at) {
  __builtin_prefetch(a.w[tile] + at, 0, 2);
}
RM_INLINE Ints every_byte(int v) { return _mm256_set1_epi8(static_cast<char>(v)); }
RM_INLINE Ints every_word(int v) { return _mm256_set1_epi16(static_cast<short>(v)); }
RM_INLINE Ints every(int32_t v) { return _mm256_set1_epi32(v); }
RM_INLINE Floats every(float v) { return _mm256_set1_ps(v); }
RM_INLINE Ints low_nibbles(Ints v) { return _mm256_and_si256(v, every_byte(15)); }
RM_INLINE Ints half_of_words(Ints v) { return _mm256_srli_epi16(v, 4); }
RM_INLINE Ints flip(Ints v) { return _mm256_xor_si256(v, every_byte(-128)); }
RM_INLINE Ints add32(Ints x, Ints y) { return _mm256_add_epi32(x, y); }
RM_INLINE Ints add16(Ints x, Ints y) { return _mm256_add_epi16(x, y); }
RM_INLINE Ints multiply_bytes(Ints u, Ints s) { return _mm256_maddubs_epi16(u, s); }
RM_INLINE Ints multiply_words(Ints x, Ints y) { return _mm256_madd_epi16(x, y); }
RM_INLINE Floats multiply(Floats x, Floats y) { return _mm256_mul_ps(x, y); }
RM_INLINE Floats add(Floats x, Floats y) { return _mm256_add_ps(x, y); }
RM_INLINE Floats multiply_add(Ints x, Floats y, Floats z) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(x), y, z);
}
RM_INLINE Floats get(const float* p) { return _mm256_load_ps(p); }
RM_INLINE void put(float* p, Floats v) { _mm256_store_ps(p, v); }
RM_INLINE void put_anywhere(float* p, Floats v) { _mm256_storeu_ps(p, v); }
#endif

// ---- byte products ------------------------------------------------------------------------------

// One plane of unsigned bytes times x adds up in 32 bits (VNNI) or in 16: of weights 0..15, eight
// times two products stay below 2^15 (8 * 2 * 15 * 127 = 30480).
#if defined(__AVX512VNNI__)
constexpr bool kByteProducts = true;
RM_INLINE Ints add_products(Ints sum, Ints u, Ints s) { return _mm512_dpbusd_epi32(sum, u, s); }
#elif defined(__AVXVNNI__)
constexpr bool kByteProducts = true;
RM_INLINE Ints add_products(Ints sum, Ints u, Ints s) { return _mm256_dpbusd_avx_epi32(sum, u, s); }
#else
constexpr bool kByteProducts = false;
RM_INLINE Ints add_products(Ints sum, Ints u, Ints s) {
  sum = add16(sum, multiply_bytes(u, s));
  __asm__("" : "+v"(sum));  // one chain: the compiler's tree of sums would not fit the registers
  return sum;
}
#endif

/// What the unpacked weight's bytes are of: two blocks, or the low and the high half of one's.
template <int kBits>
constexpr bool kHalves = kBits == 8 && !kByteProducts;

/// A block's integers, where `planes` are the sums of its one or two planes.
template <bool kTwo>
RM_INLINE Ints close(const Ints* planes, Ints offset) {
  if constexpr (kByteProducts) {
    return planes[0];  // it began with the offset
  } else if constexpr (kTwo) {
    return add32(add32(multiply_words(planes[0], every_word(1)), multiply_words(planes[1], every_word(16))),
                 offset);
  } else {
    return add32(multiply_words(planes[0], every_word(1)), offset);
  }
}

/// Two planes of unsigned bytes from block b on. Elements of 4 bits are 8 too large, of 8 bits 128.
template <int kBits>
RM_INLINE void unpack(const FewArgs& a, int64_t tile, int64_t b, Ints (*planes)[kParts]) {
  const int64_t at = b * kParts * kPartBytes * kBits / 8;
#pragma GCC unroll 8
  for (int u = 0; u < kParts; ++u) {
    const Ints v = load(a, tile, at + u * kPartBytes);
    if (u % 2 == 0) prefetch(a, tile, at + a.ahead + u * kPartBytes);
    if constexpr (kBits == 8 && kByteProducts) {
      planes[0][u] = flip(v);
      planes[1][u] = flip(load(a, tile, at + (kParts + u) * kPartBytes));
      if (u % 2 == 0) prefetch(a, tile, at + a.ahead + (kParts + u) * kPartBytes);
    } else {
      const Ints n = kBits == 8 ? flip(v) : v;
      planes[0][u] = low_nibbles(n);
      planes[1][u] = low_nibbles(half_of_words(n));
    }
  }
}

RM_INLINE int64_t scales_at(const FewArgs& a, int64_t b) {
  const int64_t g = b / a.group_blocks;
  return (g < a.groups ? g : a.groups - 1) * kTile;  // blocks of padding, where x = 0, take the last one's
}

RM_INLINE Ints four_of(const int8_t* x) {
  int32_t v;
  __builtin_memcpy(&v, x, 4);
  return every(v);
}

struct alignas(64) Sums {
  float of[2][kMostFewRows][kLanes];  // of even and odd blocks; with 8 bits the first
};

/// kRows rows of x from row r on times the planes of block b (and b + 1).
template <int kBits, int kRows>
RM_INLINE void add_rows(const FewArgs& a, int64_t b, int64_t r, const Ints (*planes)[kParts],
                        const Floats* factors, Sums& s) {
  constexpr bool kOne = kHalves<kBits>;  // both planes are of one block
  const int64_t first = b * a.rows + r, second = first + (kOne ? 0 : a.rows);
  Ints sum[kRows][2];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
    sum[i][0] = kByteProducts ? every(a.offsets[first + i]) : Ints{};
    sum[i][1] = kByteProducts ? every(a.offsets[second + i]) : Ints{};
  }
#pragma GCC unroll 8
  for (int u = 0; u < kParts; ++u) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const Ints x = four_of(a.x + (first + i) * kBlock + 4 * u);
      sum[i][0] = add_products(sum[i][0], planes[0][u], x);
      const Ints y = kOne ? x : four_of(a.x + (second + i) * kBlock + 4 * u);
      sum[i][1] = add_products(sum[i][1], planes[1][u], y);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
    float* even = s.of[0][r + i];
    const Floats f = multiply(factors[0], every(a.scales[first + i]));
    const Floats before = multiply_add(close<kOne>(sum[i], every(a.offsets[first + i])), f, get(even));
    if constexpr (kOne) {
      put(even, before);
      continue;
    }
    const Ints more = close<false>(sum[i] + 1, every(a.offsets[second + i]));
    const Floats g = multiply(factors[1], every(a.scales[second + i]));
    if constexpr (kBits == 8) {
      put(even, multiply_add(more, g, before));
    } else {
      float* odd = s.of[1][r + i];
      put(even, before), put(odd, multiply_add(more, g, get(odd)));
    }
  }
}

/// All rows of x times one vector of the weight's rows: columns tile * kTile on.
template <int kBits>
RM_INLINE void columns(const FewArgs& a, int64_t tile) {
  constexpr int kStep = kHalves<kBits> ? 1 : 2;  // blocks
  Sums s;
  for (int half = 0; half < (kBits == 4 ? 2 : 1); ++half) {
    for (int64_t r = 0; r < a.rows; ++r) put(s.of[half][r], Floats{});
  }
  for (int64_t b = 0; b < a.blocks; b += kStep) {
    Ints planes[2][kParts];
    unpack<kBits>(a, tile, b, planes);
    const Floats factors[2] = {load_scales(a, tile, scales_at(a, b)),
                               load_scales(a, tile, scales_at(a, b + kStep - 1))};
    int64_t r = 0;
    for (; r + kAtOnce <= a.rows; r += kAtOnce) add_rows<kBits, kAtOnce>(a, b, r, planes, factors, s);
    for (; r < a.rows; ++r) add_rows<kBits, 1>(a, b, r, planes, factors, s);
  }
  for (int64_t r = 0; r < a.rows; ++r) {
    const Floats even = get(s.of[0][r]);
    put_anywhere(a.acc + r * a.acc_step + tile * kTile, kBits == 8 ? even : add(even, get(s.of[1][r])));
  }
}

template <int kBits>
void strip(const FewArgs& a) {
  for (int64_t tile = 0; tile < kStrip / kLanes; ++tile) columns<kBits>(a, tile);
}

void nothing() {}
void nothing_of(int64_t) {}

}  // namespace

extern constinit const FewSet few_kernels = {nothing_of, {strip<8>, strip<4>}, nothing};

}  // namespace rm::cpu::quant::RM_ISA
#endif
