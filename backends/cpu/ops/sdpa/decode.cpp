// Attention of a few queries over many keys, bound by reading K and V once: every query of a group
// of heads uses a key while it is in registers.  Works on pieces of the keys; combine() joins them
// in a fixed order.
#include "common/vec_math.hpp"
#include "ops/sdpa/mask.hpp"

namespace rm::cpu::RM_ISA {
namespace {

RM_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
RM_INLINE int64_t queries_of(const SdpaShape& p) { return p.heads / p.groups * p.s; }
RM_INLINE int64_t partial_size(const SdpaShape& p) { return 2 + p.e; }

/// The four sums of lanes.
RM_INLINE void sum4(const vf* a, float* out) {
#if RM_ISA_LEVEL == 1
  const __m256 low = _mm256_hadd_ps(reinterpret_cast<__m256>(a[0]), reinterpret_cast<__m256>(a[1]));
  const __m256 high =
      _mm256_hadd_ps(reinterpret_cast<__m256>(a[2]), reinterpret_cast<__m256>(a[3]));
  const __m256 all = _mm256_hadd_ps(low, high);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  for (int i = 0; i < 4; ++i) out[i] = vsum(a[i]);
#endif
}

/// Four products of dense rows: a[i] . b[i]. A row that repeats is loaded once.
template <class T, bool kSameKey>
RM_INLINE void dot4(const float* q, int64_t q_step, const T* k, int64_t k_step, int64_t d,
                    float* out) {
  vf acc[4] = {};
  int64_t i = 0;
  for (; i + kWidth <= d; i += kWidth) {
    const vf shared = kSameKey ? vload(k + i) : vload(q + i);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      acc[j] += shared * (kSameKey ? vload(q + j * q_step + i) : vload(k + j * k_step + i));
    }
  }
  sum4(acc, out);
  for (; i < d; ++i) {
    for (int j = 0; j < 4; ++j) {
      out[j] += q[(kSameKey ? j * q_step : 0) + i] * widen(k[(kSameKey ? 0 : j * k_step) + i]);
    }
  }
}

template <class T>
float dot(const float* q, const T* k, int64_t stride, int64_t d) {
  vf acc{};
  int64_t i = 0;
  if (stride == 1) {
    for (; i + kWidth <= d; i += kWidth) acc += vload(q + i) * vload(k + i);
  }
  float total = vsum(acc);
  for (; i < d; ++i) total += q[i] * widen(k[i * stride]);
  return total;
}

/// scores[r * n + t] = scale * q[r] . k[t].
template <class T>
void score(const float* q, int64_t ldq, int64_t rows, const T* k, int64_t row, int64_t column,
           int64_t n, int64_t d, float scale, float* scores) {
  int64_t r = 0;
  float four[4];
  if (column == 1) {
    for (; r + 4 <= rows; r += 4) {
      for (int64_t t = 0; t < n; ++t) {
        dot4<T, true>(q + r * ldq, ldq, k + t * row, 0, d, four);
        for (int j = 0; j < 4; ++j) scores[(r + j) * n + t] = scale * four[j];
      }
    }
  }
  for (; r < rows; ++r) {
    int64_t t = 0;
    if (column == 1) {
      for (; t + 4 <= n; t += 4) {
        dot4<T, false>(q + r * ldq, 0, k + t * row, row, d, four);
        for (int j = 0; j < 4; ++j) scores[r * n + t + j] = scale * four[j];
      }
    }
    for (; t < n; ++t) scores[r * n + t] = scale * dot(q + r * ldq, k + t * row, column, d);
  }
}

/// out[r][e] = sum over keys of weight[r][t] * v[t][e], for R rows that share every load of v.
template <class T, int R>
void weighted(const float* weight, int64_t ldw, const T* v, int64_t row, int64_t column, int64_t n,
              int64_t e, float* out, int64_t ldo) {
  constexpr int kVectors = R == 1 ? 4 : 2;
  int64_t i = 0;
  if (column == 1) {
    for (; i + kVectors * kWidth <= e; i += kVectors * kWidth) {
      vf acc[R][kVectors] = {};
      for (int64_t t = 0; t < n; ++t) {
        const T* at = v + t * row + i;
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; ++c) {
          const vf value = vload(at + c * kWidth);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) acc[r][c] += weight[r * ldw + t] * value;
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; ++c) vstore(out + r * ldo + i + c * kWidth, acc[r][c]);
      }
    }
  }
  for (; i < e; ++i) {
    for (int r = 0; r < R; ++r) {
      float a = 0;
      for (int64_t t = 0; t < n; ++t) a += weight[r * ldw + t] * widen(v[t * row + i * column]);
      out[r * ldo + i] = a;
    }
  }
}

/// Scores to weights in place; the maximum and the sum go to partial[0] and [1].
void soften(float* row, int64_t n, float* partial) {
  float most = -kInf, sum = 0;
  for (int64_t t = 0; t < n; ++t) most = row[t] > most ? row[t] : most;
  const float shift = most == -kInf ? 0.0f : most;
  for (int64_t t = 0; t < n; t += kWidth) {
    const int64_t c = imin(kWidth, n - t);
    const vf w = vexp_nonpositive(vload_part(row + t, c, -kInf) - shift);
    vstore_part(row + t, w, c);
    for (int64_t i = 0; i < c; ++i) sum += w[i];
  }
  partial[0] = most;
  partial[1] = sum;
}

template <class T>
void run_as(const SdpaShape& p, const SdpaData& data, int64_t b, int64_t g, int64_t t0, int64_t t1,
            float* partial, char* memory) {
  const int64_t n = t1 - t0, share = p.heads / p.groups, ldq = round_up(p.d, 16);
  auto* queries = reinterpret_cast<float*>(memory);
  float* scores = queries + queries_of(p) * ldq;
  float* addend = scores + queries_of(p) * n;
  const T* k = static_cast<const T*>(data.k) + b * p.k[0] + g * p.k[1] + t0 * p.k[2];
  const T* v = static_cast<const T*>(data.v) + b * p.v[0] + g * p.v[1] + t0 * p.v[2];
  for (int64_t r = 0; r < queries_of(p); ++r) {
    const int64_t h = g * share + r / p.s, s = r % p.s;
    widen_row(static_cast<const T*>(data.q) + b * p.q[0] + h * p.q[1] + s * p.q[2], p.q[3],
              queries + r * ldq, p.d);
  }
  score(queries, ldq, queries_of(p), k, p.k[2], p.k[3], n, p.d, p.scale, scores);
  for (int64_t r = 0; r < queries_of(p); ++r) {
    const int64_t h = g * share + r / p.s, s = r % p.s;
    float* row = scores + r * n;
    if (p.mask != DType::invalid &&
        mask_addend(p.mask, mask_row(p, data, b, h, s) + t0 * p.m[3] * mask_bytes(p.mask), p.m[3],
                    n, addend)) {
      for (int64_t t = 0; t < n; ++t) row[t] += addend[t];
    }
    if (p.causal) {
      for (int64_t t = imax(0, s + 1 - t0); t < n; ++t) row[t] = -kInf;
    }
    soften(row, n, partial + r * partial_size(p));
  }
  const int64_t ldo = partial_size(p);
  int64_t r = 0;
  for (; r + 4 <= queries_of(p); r += 4) {
    weighted<T, 4>(scores + r * n, n, v, p.v[2], p.v[3], n, p.e, partial + r * ldo + 2, ldo);
  }
  for (; r < queries_of(p); ++r) {
    weighted<T, 1>(scores + r * n, n, v, p.v[2], p.v[3], n, p.e, partial + r * ldo + 2, ldo);
  }
}

void run(const SdpaShape& p, const SdpaData& data, int64_t b, int64_t g, int64_t t0, int64_t t1,
         float* partial, char* memory) {
  if (p.type == DType::f32) run_as<float>(p, data, b, g, t0, t1, partial, memory);
  if (p.type == DType::bf16) run_as<bf16>(p, data, b, g, t0, t1, partial, memory);
  if (p.type == DType::f16) run_as<f16>(p, data, b, g, t0, t1, partial, memory);
}

uint64_t scratch_bytes(const SdpaShape& p, int64_t keys) {
  const int64_t floats = queries_of(p) * (round_up(p.d, 16) + keys) + keys;
  return (static_cast<uint64_t>(floats) * 4 + 63) & ~63ull;
}

template <class T>
void combine_as(const SdpaShape& p, const SdpaData& data, int64_t b, int64_t g,
                const float* partials, int64_t pieces, float* row) {
  const int64_t share = p.heads / p.groups, step = queries_of(p) * partial_size(p);
  for (int64_t r = 0; r < queries_of(p); ++r) {
    const float* mine = partials + r * partial_size(p);
    float most = -kInf, sum = 0;
    for (int64_t i = 0; i < pieces; ++i) most = mine[i * step] > most ? mine[i * step] : most;
    for (int64_t e = 0; e < p.e; ++e) row[e] = 0;
    for (int64_t i = 0; i < pieces; ++i) {
      const float* piece = mine + i * step;
      // A piece that saw only NaN scores has maximum -inf and a NaN sum: it must count.
      const bool empty = piece[0] == -kInf && piece[1] == 0.0f;
      const float factor = empty              ? 0.0f
                           : piece[0] == most ? 1.0f
                                              : vexp_nonpositive(vset(piece[0] - most))[0];
      sum += factor * piece[1];
      if (factor == 0.0f && piece[1] == piece[1]) continue;
      for (int64_t e = 0; e < p.e; ++e) row[e] += factor * piece[2 + e];
    }
    const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int64_t e = 0; e < p.e; ++e) row[e] *= scale;
    const int64_t h = g * share + r / p.s, s = r % p.s;
    narrow_row(row, static_cast<T*>(data.o) + b * p.o[0] + h * p.o[1] + s * p.o[2], p.o[3], p.e);
  }
}

void combine(const SdpaShape& p, const SdpaData& data, int64_t b, int64_t g, const float* partials,
             int64_t pieces, float* row) {
  if (p.type == DType::f32) combine_as<float>(p, data, b, g, partials, pieces, row);
  if (p.type == DType::bf16) combine_as<bf16>(p, data, b, g, partials, pieces, row);
  if (p.type == DType::f16) combine_as<f16>(p, data, b, g, partials, pieces, row);
}

}  // namespace

extern const SdpaDecode sdpa_decode;
const SdpaDecode sdpa_decode = {run, scratch_bytes, combine};

}  // namespace rm::cpu::RM_ISA
