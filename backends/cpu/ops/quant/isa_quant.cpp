// Products with weights of 8 or 4 bits for one ISA, bound by reading the weight once.
//
// Activations become integers of 16 bits that share a scale where the weight's elements do, so that
// the products of a group are exact integers and each group costs one conversion. 4-bit weights
// multiply the high and the low byte apart.
#include "ops/quant/isa_half.hpp"
#include "ops/quant/kernels.hpp"

namespace rm::cpu::quant::RM_ISA {
namespace {

using namespace gemm::RM_ISA;
constexpr float kLimit = 32639.f;       // 256 * 127 + 127: the high byte fits a signed one
constexpr float kRounder = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
constexpr int64_t kAhead = 1024;        // prefetch distance, bytes

// ---- activations
// ----------------------------------------------------------------------------------

/// A block of x as f32, zeros past the end.
template <class T>
RM_INLINE void load_block(const SpreadArgs& a, int64_t block, float* x) {
  using S = typename T::Scalar;
  const S* src = static_cast<const S*>(a.src) + block * kBlock * a.col_stride;
  const int64_t left = a.k - block * kBlock;
  const int64_t count = left < kBlock ? (left < 0 ? 0 : left) : kBlock;
  S copy[kBlock] = {};
  if (count < kBlock || a.col_stride != 1) {
    for (int64_t i = 0; i < count; ++i) copy[i] = src[i * a.col_stride];
    src = copy;
  }
  for (int i = 0; i < kBlock; i += kWidth) F32::store(x + i, T::load(src + i));
}

RM_INLINE float max_lanes(vf v) {
  float most = v[0];
  for (int i = 1; i < kWidth; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

/// Takes a block's largest magnitude and whether all of it is finite (0, else NaN) into account.
RM_INLINE void look_at(const float* x, vf* high, vf* finite) {
  for (int i = 0; i < kBlock; i += kWidth) {
    const vf v = F32::load(x + i), magnitude = (vf)((vu)v & 0x7fffffff);
    *high = magnitude > *high ? magnitude : *high;
    *finite += v * 0.f;
  }
}

/// Integers of a block; returns their sum.
RM_INLINE int32_t to_integers(const float* x, bool good, float inverse, int32_t* out) {
  int32_t sum = 0;
  for (int i = 0; i < kBlock; i += kWidth) {
    const vf v = good ? F32::load(x + i) : vf{};
    const vf shifted = v * inverse + kRounder;
    const vu q = (vu)shifted - 0x4b400000u;
    __builtin_memcpy(out + i, &q, sizeof q);
  }
  for (int i = 0; i < kBlock; ++i) sum += out[i];
  return sum;
}

RM_INLINE void store_integers(const SpreadArgs& a, int64_t block, const int32_t* q) {
  if (a.bits == 8) {
    auto* out = reinterpret_cast<int16_t*>(a.values) + block * kBlock;
    for (int i = 0; i < kBlock; ++i) out[i] = static_cast<int16_t>(q[i]);
    return;
  }
  auto* high = reinterpret_cast<int8_t*>(a.values) + block * 2 * kBlock;
  int8_t* low = high + kBlock;
  for (int i = 0; i < kBlock; ++i) {
    const int32_t h = (q[i] + 128) >> 8;
    high[i] = static_cast<int8_t>(h);
    low[i] = static_cast<int8_t>(q[i] - h * 256);
  }
}

template <class T>
void spread(const SpreadArgs& a) {
  for (int64_t g = a.groups; g < a.groups + kSpare; ++g) a.sums[g] = a.scales[g] = 0;
  float x[kMostBlocks * kBlock];
  int32_t q[kBlock];
  for (int64_t g = 0; g < a.groups; ++g) {
    const int64_t first = g * a.group_blocks;
    const int64_t count = a.blocks - first < a.group_blocks ? a.blocks - first : a.group_blocks;
    vf high{}, finite{};
    for (int64_t b = 0; b < count; ++b) {
      load_block<T>(a, first + b, x + b * kBlock);
      look_at(x + b * kBlock, &high, &finite);
    }
    float check = 0;
    for (int i = 0; i < kWidth; ++i) check += finite[i];
    const bool good = check == check;
    const float most = max_lanes(high);
    // Below 2^-110 the inverse would overflow: such groups are zero beside any other.
    const float inverse = good && most > 0x1p-110f ? kLimit / most : 0.f;
    const float scale = good ? most / kLimit : __builtin_nanf("");
    float sum = 0;
    for (int64_t b = 0; b < count; ++b) {
      sum += static_cast<float>(to_integers(x + b * kBlock, good, inverse, q));
      store_integers(a, first + b, q);
    }
    a.scales[g] = scale;
    a.sums[g] = scale * sum;
  }
  // Blocks of padding behind the last group are zero.
  for (int64_t b = a.groups * a.group_blocks; b < a.blocks; ++b) {
    __builtin_memset(a.values + b * 2 * kBlock, 0, 2 * kBlock);
  }
}

// ---- products
// -------------------------------------------------------------------------------------

/// factors[g] = scale of group g of x times that of the weight's, zeros behind the last. What zero
/// points take away begins the row's sum, lane by lane.
RM_INLINE vf make_factors(const DotArgs& a, int s, float* factors) {
  const uint16_t *scale = a.scale[s], *zero = a.zero[s];
  const bool centred = !zero && a.zero_point == 0.f;
  vf taken{};
  for (int64_t g = 0; g < a.groups; g += kWidth) {
    const int64_t count = a.groups - g < kWidth ? a.groups - g : kWidth;
    uint16_t some[2][kWidth] = {};
    const uint16_t *scales = scale + g, *zeros = zero ? zero + g : nullptr;
    if (count < kWidth) {
      for (int64_t i = 0; i < count; ++i) some[0][i] = scales[i];
      for (int64_t i = 0; zero && i < count; ++i) some[1][i] = zeros[i];
      scales = some[0], zeros = zero ? some[1] : nullptr;
    }
    const vf v = F16::load(scales);
    if (!centred) {
      const vf z = zeros ? F16::load(zeros) : vf{} + a.zero_point;
      taken -= v * z * F32::load(a.sums + g);  // sums and scales are zero behind the last group
    }
    F32::store(factors + g, v * F32::load(a.scales + g));
  }
  // Blocks come in pairs: the last of them may have no group.
  if (a.groups % kWidth == 0) factors[a.groups] = 0;
  return taken;
}

#if defined(__AVX2__)
typedef __m256 Sum;
RM_INLINE Sum add_scaled(Sum sum, __m256i products, float factor) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), _mm256_set1_ps(factor), sum);
}
/// The vector's lanes in the order of the sum's.
RM_INLINE Sum begin_sum(vf v) {
#if defined(__AVX512F__)
  const __m512 wide = (__m512)v;
  return _mm256_add_ps(_mm512_castps512_ps256(wide), _mm512_extractf32x8_ps(wide, 1));
#else
  return (__m256)v;
#endif
}
RM_INLINE float total(Sum v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/// A block of x times one of the weight, added up in eight lanes.
RM_INLINE __m256i byte_products(const uint8_t* w, __m256i x0, __m256i x1) {
  const auto* at = reinterpret_cast<const __m128i*>(w);
  const __m256i w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128(at));
  const __m256i w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128(at + 1));
  return _mm256_add_epi32(_mm256_madd_epi16(w0, x0), _mm256_madd_epi16(w1, x1));
}

/// `kCount` blocks from block `b` on share factor `g`. A lane adds up to 16 products: below 2^27.
template <int kCount>
RM_INLINE void add_group8(const DotArgs& a, int64_t b, int64_t g, Sum* sum) {
  __m256i products[kStreams];
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) {
    const auto* x = reinterpret_cast<const __m256i*>(a.values + (b + i) * 64);
    const __m256i x0 = _mm256_loadu_si256(x), x1 = _mm256_loadu_si256(x + 1);
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; ++s) {
      const uint8_t* w = a.w[s] + (b + i) * 32;
      if (i % 2 == 0) __builtin_prefetch(w + kAhead, 0, 3);
      const __m256i more = byte_products(w, x0, x1);
      products[s] = i == 0 ? more : _mm256_add_epi32(products[s], more);
    }
  }
  for (int s = 0; s < kStreams; ++s) {
    sum[s] = add_scaled(sum[s], products[s], a.factors[s * (a.blocks + kSpare) + g]);
  }
}

template <int kGroupBlocks>
void dot8_of(const DotArgs& a) {
  Sum sum[kStreams];
  for (int s = 0; s < kStreams; ++s) {
    sum[s] = begin_sum(make_factors(a, s, a.factors + s * (a.blocks + kSpare)));
  }
  int64_t b = 0, g = 0;
  for (; b + kGroupBlocks <= a.blocks; b += kGroupBlocks, ++g) {
    add_group8<kGroupBlocks>(a, b, g, sum);
  }
  for (; b < a.blocks; ++b) add_group8<1>(a, b, g, sum);
  for (int s = 0; s < kStreams; ++s) *a.out[s] = total(sum[s]);
}

void dot8(const DotArgs& a) {
  a.group_blocks == 4 ? dot8_of<4>(a) : a.group_blocks == 2 ? dot8_of<2>(a) : dot8_of<1>(a);
}

/// Sums of n (0..15) times 256 * high + low. No sum of two products leaves 16 bits.
RM_INLINE __m256i nibble_products(__m256i n, const __m256i* x) {
  const __m256i high = _mm256_maddubs_epi16(n, _mm256_loadu_si256(x));
  const __m256i low = _mm256_maddubs_epi16(n, _mm256_loadu_si256(x + 1));
  return _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(256)),
                          _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
}

/// `kPairs` times 64 elements from block `b` on share factor `g`; with 0 of them the two blocks of
/// 32 have a factor each.
template <int kPairs>
RM_INLINE void add_group4(const DotArgs& a, int64_t b, int64_t g, Sum* sum) {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i products[kStreams];
#pragma GCC unroll 2
  for (int i = 0; i < (kPairs == 0 ? 1 : kPairs); ++i) {
    const auto* x = reinterpret_cast<const __m256i*>(a.values + (b + 2 * i) * 64);
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; ++s) {
      const auto* w = reinterpret_cast<const __m256i*>(a.w[s] + (b + 2 * i) * 16);
      if (i == 0) __builtin_prefetch(reinterpret_cast<const char*>(w) + kAhead, 0, 3);
      const float* factor = a.factors + s * (a.blocks + kSpare) + g;
      const __m256i both = _mm256_loadu_si256(w);
      const __m256i p0 = nibble_products(_mm256_and_si256(both, mask), x);
      const __m256i p1 = nibble_products(_mm256_and_si256(_mm256_srli_epi16(both, 4), mask), x + 2);
      if (kPairs == 0) {
        sum[s] = add_scaled(add_scaled(sum[s], p0, factor[0]), p1, factor[1]);
      } else {
        const __m256i more = _mm256_add_epi32(p0, p1);
        products[s] = i == 0 ? more : _mm256_add_epi32(products[s], more);
      }
    }
  }
  if (kPairs == 0) return;
  for (int s = 0; s < kStreams; ++s) {
    sum[s] = add_scaled(sum[s], products[s], a.factors[s * (a.blocks + kSpare) + g]);
  }
}

template <int kGroupBlocks>
void dot4_of(const DotArgs& a) {
  constexpr int kStep = kGroupBlocks == 1 ? 2 : kGroupBlocks;
  Sum sum[kStreams];
  for (int s = 0; s < kStreams; ++s) {
    sum[s] = begin_sum(make_factors(a, s, a.factors + s * (a.blocks + kSpare)));
  }
  int64_t b = 0, g = 0;
  for (; b + kStep <= a.blocks; b += kStep, g += kStep / kGroupBlocks) {
    add_group4<kGroupBlocks / 2>(a, b, g, sum);
  }
  if (b < a.blocks) add_group4<1>(a, b, g, sum);
  for (int s = 0; s < kStreams; ++s) *a.out[s] = total(sum[s]);
}

void dot4(const DotArgs& a) {
  a.group_blocks == 4 ? dot4_of<4>(a) : a.group_blocks == 2 ? dot4_of<2>(a) : dot4_of<1>(a);
}
#else
void dot8(const DotArgs& a) {
  for (int s = 0; s < kStreams; ++s) {
    const vf taken = make_factors(a, s, a.factors);
    float sum = 0;
    for (int i = 0; i < kWidth; ++i) sum += taken[i];
    for (int64_t b = 0; b < a.blocks; ++b) {
      const auto* x = reinterpret_cast<const int16_t*>(a.values) + b * kBlock;
      const auto* w = reinterpret_cast<const int8_t*>(a.w[s]) + b * kBlock;
      int32_t products = 0;
      for (int i = 0; i < kBlock; ++i) products += x[i] * w[i];
      sum += static_cast<float>(products) * a.factors[b / a.group_blocks];
    }
    *a.out[s] = sum;
  }
}

void dot4(const DotArgs& a) {
  for (int s = 0; s < kStreams; ++s) {
    const vf taken = make_factors(a, s, a.factors);
    float sum = 0;
    for (int i = 0; i < kWidth; ++i) sum += taken[i];
    for (int64_t b = 0; b < a.blocks; ++b) {
      const auto* high = reinterpret_cast<const int8_t*>(a.values) + b * 2 * kBlock;
      const uint8_t* w = a.w[s] + b / 2 * 32;
      int32_t products = 0;
      for (int i = 0; i < kBlock; ++i) {
        const int32_t n = b % 2 == 0 ? w[i] & 15 : w[i] >> 4;
        products += n * (high[i] * 256 + high[kBlock + i]);
      }
      sum += static_cast<float>(products) * a.factors[b / a.group_blocks];
    }
    *a.out[s] = sum;
  }
}
#endif

template <int kBits>
void widen(const WidenArgs& a) {
  const int64_t blocks = (a.k + kBlock - 1) / kBlock;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t g = b * kBlock / a.group;
    const float scale = half_to_float(a.scale[g]);
    const float zero = a.zero ? half_to_float(a.zero[g]) : a.zero_point;
    float* dst = a.dst + b * kBlock;
    int32_t q[kBlock];
    if constexpr (kBits == 8) {
      const auto* w = reinterpret_cast<const int8_t*>(a.w) + b * kBlock;
      for (int i = 0; i < kBlock; ++i) q[i] = w[i];
    } else {
      const uint8_t* w = a.w + b / 2 * 32;
      const int shift = b % 2 * 4;
      for (int i = 0; i < kBlock; ++i) q[i] = w[i] >> shift & 15;
    }
    for (int i = 0; i < kBlock; ++i) dst[i] = (static_cast<float>(q[i]) - zero) * scale;
  }
}

// ---- quantize
// -------------------------------------------------------------------------------------

RM_INLINE float rounded(float x) {
  // To even, for |x| < 2^22; beyond that the caller clamps anyway.
  const float magnitude = x < 0 ? -x : x;
  if (!(magnitude < 4194304.f)) return x;
  const float shifted = magnitude + 8388608.f;
  const float whole = shifted - 8388608.f;
  return x < 0 ? -whole : whole;
}

struct Group {
  float scale, zero;
};

/// A group as f32, zeros up to a whole number of vectors.
template <class T>
RM_INLINE void load_group(const QuantizeArgs& a, int64_t from, int64_t n, float* w) {
  using S = typename T::Scalar;
  const S* src = static_cast<const S*>(a.src) + from * a.col_stride;
  int64_t i = 0;
  if (a.col_stride == 1) {
    for (; i + kWidth <= n; i += kWidth) F32::store(w + i, T::load(src + i));
  }
  for (; i < n; i += kWidth) {
    S lanes[kWidth] = {};
    for (int64_t j = 0; j < kWidth && i + j < n; ++j) lanes[j] = src[(i + j) * a.col_stride];
    F32::store(w + i, T::load(lanes));
  }
}

/// As in src/ops/linear/quantized.cpp, bit for bit.
RM_INLINE Group choose(const float* w, int64_t n, int64_t bits, bool symmetric, uint16_t* scale,
                       uint16_t* zero) {
  vf lows{}, highs{}, finite{};
  for (int64_t i = 0; i < n; i += kWidth) {
    const vf v = F32::load(w + i);
    lows = v < lows ? v : lows;
    highs = v > highs ? v : highs;
    finite += v * 0.f;
  }
  float low = 0, high = 0, check = 0;
  for (int i = 0; i < kWidth; ++i) {
    low = lows[i] < low ? lows[i] : low;
    high = highs[i] > high ? highs[i] : high;
    check += finite[i];
  }
  float most = high > -low ? high : low;
  if (high == -low) {  // both ends are as far: the first counts
    for (int64_t i = n - 1; i >= 0; --i) most = w[i] == low || w[i] == high ? w[i] : most;
  }
  float wanted = symmetric ? (bits == 8 ? (most < 0 ? -most : most) / 127.f : most / -8.f)
                           : (high - low) / (bits == 8 ? 255.f : 15.f);
  if (check != check) wanted = __builtin_nanf("");
  *scale = float_to_half(wanted);
  Group g{half_to_float(*scale), bits == 4 ? 8.f : 0.f};
  if (!symmetric) {
    const float first = bits == 8 ? -128.f : 0.f;
    *zero = float_to_half(g.scale > 0 ? rounded(first - low / g.scale) : first);
    g.zero = half_to_float(*zero);
  }
  return g;
}

/// The integers of a group in the order of its elements.
RM_INLINE void integers_of(const float* w, int64_t n, const Group& group, float low, float high,
                           int32_t* out) {
  const bool usable = group.scale != 0.f && group.scale == group.scale;
  const float bound = 1e6f;  // far outside of all integers, small enough to be rounded by adding
  for (int64_t i = 0; i < n; i += kWidth) {
    vf q = vf{} + group.zero;
    if (usable) {
      vf scaled = F32::load(w + i) / group.scale;
      scaled = scaled < -bound ? vf{} - bound : scaled > bound ? vf{} + bound : scaled;
      q = (scaled + kRounder) - kRounder + group.zero;
    }
    q = q < low ? vf{} + low : q > high ? vf{} + high : q;
    const vu bits = (vu)(q + kRounder) - 0x4b400000u;
    __builtin_memcpy(out + i, &bits, sizeof bits);
  }
}

template <class T>
void quantize(const QuantizeArgs& a) {
  if (a.row_bytes > 0) __builtin_memset(a.q, 0, static_cast<size_t>(a.row_bytes));
  const float low = a.bits == 4 ? 0.f : a.symmetric ? -127.f : -128.f;
  const float high = a.bits == 4 ? 15.f : 127.f;
  float w[kMostBlocks * kBlock];
  int32_t q[kMostBlocks * kBlock];
  for (int64_t from = 0, g = 0; from < a.k; from += a.group, ++g) {
    const int64_t n = a.k - from < a.group ? a.k - from : a.group;
    load_group<T>(a, from, n, w);
    const Group group =
        choose(w, n, a.bits, a.symmetric, a.scale + g, a.symmetric ? nullptr : a.zero + g);
    integers_of(w, n, group, low, high, q);
    for (int64_t b = 0; b < n; b += kBlock) {
      const int64_t count = n - b < kBlock ? n - b : kBlock, at = from + b;
      if (a.bits == 8) {
        for (int64_t i = 0; i < count; ++i) a.q[at + i] = static_cast<uint8_t>(q[b + i]);
        continue;
      }
      uint8_t* out = a.q + at / 64 * 32;
      const int shift = at / 32 % 2 * 4;
      for (int64_t i = 0; i < count; ++i) out[i] |= static_cast<uint8_t>(q[b + i] << shift);
    }
  }
}

constexpr QuantSet make_set() {
  QuantSet set{};
  set.spread[gemm::kF32] = spread<F32>;
  set.spread[gemm::kBF16] = spread<BF16>;
  set.spread[gemm::kF16] = spread<F16>;
  set.dot[0] = dot8;
  set.dot[1] = dot4;
  set.widen[0] = widen<8>;
  set.widen[1] = widen<4>;
  set.quantize[gemm::kF32] = quantize<F32>;
  set.quantize[gemm::kBF16] = quantize<BF16>;
  set.quantize[gemm::kF16] = quantize<F16>;
  return set;
}

}  // namespace

extern constinit const QuantSet quant_kernels = make_set();

}  // namespace rm::cpu::quant::RM_ISA
