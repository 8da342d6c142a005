// Attention of a few queries over many keys, bound by reading K and V once: every query of a group
// of heads uses a key while it is in registers.  Works on pieces of the keys; combine() joins them
// in a fixed order.
#include "common/sum_lanes.hpp"
#include "common/vec_math.hpp"
#include "ops/sdpa/mask.hpp"

namespace rm::cpu::RM_ISA {
namespace {

RM_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
RM_INLINE int64_t queries_of(const SdpaShape& p) { return p.heads / p.groups * p.s; }
RM_INLINE int64_t partial_size(const SdpaShape& p) { return 2 + p.e; }

// ---- scores
// ---------------------------------------------------------------------------------------

constexpr int kTile = 8;  // sums in flight: queries x keys of a tile, as many as sum_eight takes

// Keys and values are read from four places of a piece at once: processors fetch ahead within a
// page, so one place at a time leaves bandwidth unused.
constexpr int kPlaces = 4;

/// Keys from one place to the next: an even quarter, but not a multiple of a page's part, for then
/// the places would fight for the same lines of the first-level cache.
RM_INLINE int64_t place_step(int64_t n, int64_t row_bytes) {
  const int64_t step = n / kPlaces / 2 * 2;
  return step > 8 && step * row_bytes % 1024 == 0 ? step - 2 : step;
}

/// scores[r * lds + t] = q[r] . k[t] for Q queries and kTile / Q dense keys: neighbours at four
/// places.
template <class T, int Q>
RM_INLINE void score_tile(const float* q, int64_t ldq, const T* k, int64_t row, int64_t step,
                          int64_t d, float* scores, int64_t lds) {
  constexpr int kKeys = kTile / Q;
  const auto at = [&](int t) { return t % kPlaces * step + t / kPlaces; };
  vf acc[kTile] = {};
  int64_t i = 0;
  for (; i + kWidth <= d; i += kWidth) {
    vf key[kKeys];
#pragma GCC unroll 8
    for (int t = 0; t < kKeys; ++t) key[t] = vload(k + at(t) * row + i);
#pragma GCC unroll 8
    for (int r = 0; r < Q; ++r) {
      const vf x = vload(q + r * ldq + i);
#pragma GCC unroll 8
      for (int t = 0; t < kKeys; ++t) acc[r * kKeys + t] += x * key[t];
    }
  }
  float sums[kTile];
  sum_eight(acc, sums);
  if (i < d) {
    for (int r = 0; r < Q; ++r) {
      for (int t = 0; t < kKeys; ++t) {
        float& total = sums[r * kKeys + t];
        for (int64_t j = i; j < d; ++j) total += q[r * ldq + j] * widen(k[at(t) * row + j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Q; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < kKeys; ++t) scores[r * lds + at(t)] = sums[r * kKeys + t];
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

template <class T>
struct Rows {
  const T* at;
  int64_t row, column;  // strides
};

/// Rows that are read next: fetched into the second-level cache, some at a time, while others are
/// computed with. Only where they are a few pages, which no processor fetches ahead by itself: on long
/// ones it does better alone.
struct Ahead {
  static constexpr int64_t kMostBytes = 16 << 10;
  const char* at = nullptr;
  int64_t row_bytes = 0, lines = 0, left = 0;

  template <class T>
  static Ahead of(const Rows<T>& rows, int64_t n, int64_t size) {
    constexpr auto kItem = static_cast<int64_t>(sizeof(T));
    if (rows.column != 1 || n <= 0 || n * size * kItem > kMostBytes) return {};
    return {reinterpret_cast<const char*>(rows.at), rows.row * kItem, (size * kItem + 63) / 64, n};
  }

  inline __attribute__((always_inline)) void fetch(int64_t rows) {
    for (; rows > 0 && left > 0; --rows, --left, at += row_bytes) {
      for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(at + i * 64, 0, 2);
    }
  }
};

/// Eight keys, or neighbours at four places when `step` says so, with all queries.
template <class T>
RM_INLINE void score_eight(const float* q, int64_t ldq, int64_t queries, const T* k, int64_t row,
                           int64_t step, int64_t d, float* scores, int64_t lds) {
  const int64_t second = step == 2 ? 4 : 1;  // where a pair's second tile of four keys begins
  int64_t r = 0;
  for (; r + 2 <= queries; r += 2) {
    for (int64_t t = 0; t <= second; t += second) {
      score_tile<T, 2>(q + r * ldq, ldq, k + t * row, row, step == 2 ? 1 : step, d,
                       scores + r * lds + t, lds);
    }
  }
  if (r < queries) score_tile<T, 1>(q + r * ldq, ldq, k, row, step, d, scores + r * lds, lds);
}

template <class T>
void score(const float* q, int64_t ldq, int64_t queries, const Rows<T>& k, int64_t n, int64_t d,
           float* scores, Ahead ahead) {
  int64_t t = 0;
  if (k.column == 1) {
    const int64_t step = place_step(n, k.row * static_cast<int64_t>(sizeof(T)));
    for (; t < step; t += 2) {
      ahead.fetch(2 * kPlaces);
      score_eight(q, ldq, queries, k.at + t * k.row, k.row, step, d, scores + t, n);
    }
    for (t = kPlaces * step; t + kTile <= n; t += kTile) {
      ahead.fetch(kTile);
      score_eight(q, ldq, queries, k.at + t * k.row, k.row, 2, d, scores + t, n);
    }
  }
  for (; t < n; ++t) {
    ahead.fetch(1);
    for (int64_t r = 0; r < queries; ++r) {
      scores[r * n + t] = dot(q + r * ldq, k.at + t * k.row, k.column, d);
    }
  }
}

// ---- weighted values
// ------------------------------------------------------------------------------

constexpr int64_t kNearKeys = 32;  // values that stay in the first level while all queries pass

/// out[r][i..] += sum of weight[r][t] * v[t][i..] over S places of n keys each, `step` keys apart,
/// for Q rows and C vectors.
template <class T, int Q, int C, int S>
RM_INLINE void weigh_tile(const float* weight, int64_t ldw, const T* v, int64_t row, int64_t step,
                          int64_t n, float* out, int64_t ldo, Ahead& ahead) {
  vf acc[Q][C];
#pragma GCC unroll 4
  for (int r = 0; r < Q; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) acc[r][c] = vload(out + r * ldo + c * kWidth);
  }
  for (int64_t t = 0; t < n; ++t) {
    ahead.fetch(S);
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) {
      const int64_t key = t + s * step;
      vf value[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) value[c] = vload(v + key * row + c * kWidth);
#pragma GCC unroll 4
      for (int r = 0; r < Q; ++r) {
        const float w = weight[r * ldw + key];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] += w * value[c];
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Q; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) vstore(out + r * ldo + c * kWidth, acc[r][c]);
  }
}

template <class T, int Q, int S>
RM_INLINE void weigh_rows(const float* weight, int64_t ldw, const T* v, int64_t row, int64_t step,
                          int64_t n, int64_t e, float* out, int64_t ldo, Ahead& ahead) {
  int64_t i = 0;
  for (; i + 4 * kWidth <= e; i += 4 * kWidth) {
    weigh_tile<T, Q, 4, S>(weight, ldw, v + i, row, step, n, out + i, ldo, ahead);
  }
  for (; i + kWidth <= e; i += kWidth) {
    weigh_tile<T, Q, 1, S>(weight, ldw, v + i, row, step, n, out + i, ldo, ahead);
  }
  for (; i < e; ++i) {
    for (int r = 0; r < Q; ++r) {
      float a = out[r * ldo + i];
      for (int64_t t = 0; t < n; ++t) {
        for (int s = 0; s < S; ++s) {
          const int64_t key = t + s * step;
          a += weight[r * ldw + key] * widen(v[key * row + i]);
        }
      }
      out[r * ldo + i] = a;
    }
  }
}

/// All queries with S places of n keys, a few keys at a time.
template <class T, int S>
RM_INLINE void weigh_places(const float* weight, int64_t ldw, int64_t queries, const T* v,
                            int64_t row, int64_t step, int64_t n, int64_t e, float* out,
                            int64_t ldo, Ahead& ahead) {
  for (int64_t t = 0; t < n; t += kNearKeys / S) {
    const int64_t keys = imin(kNearKeys / S, n - t);
    const T* from = v + t * row;
    int64_t r = 0;
    for (; r + 2 <= queries; r += 2) {
      weigh_rows<T, 2, S>(weight + r * ldw + t, ldw, from, row, step, keys, e, out + r * ldo, ldo,
                          ahead);
    }
    if (r < queries) {
      weigh_rows<T, 1, S>(weight + r * ldw + t, ldw, from, row, step, keys, e, out + r * ldo, ldo,
                          ahead);
    }
  }
}

/// out[r][e] = sum over keys of weight[r][t] * v[t][e].
template <class T>
void weigh(const float* weight, int64_t queries, const Rows<T>& v, int64_t n, int64_t e, float* out,
           int64_t ldo, Ahead ahead) {
  for (int64_t r = 0; r < queries; ++r) {
    for (int64_t i = 0; i < e; ++i) out[r * ldo + i] = 0;
  }
  if (v.column == 1) {
    const int64_t step = place_step(n, v.row * static_cast<int64_t>(sizeof(T)));
    const int64_t done = kPlaces * step;
    weigh_places<T, kPlaces>(weight, n, queries, v.at, v.row, step, step, e, out, ldo, ahead);
    weigh_places<T, 1>(weight + done, n, queries, v.at + done * v.row, v.row, 0, n - done, e, out,
                       ldo, ahead);
    return;
  }
  for (int64_t r = 0; r < queries; ++r) {
    for (int64_t t = 0; t < n; ++t) {
      for (int64_t i = 0; i < e; ++i) {
        out[r * ldo + i] += weight[r * n + t] * widen(v.at[t * v.row + i * v.column]);
      }
    }
  }
}

// ---- one piece
// ------------------------------------------------------------------------------------

RM_INLINE vf load_some(const float* p, int64_t n) {
  return n == kWidth ? vload(p) : vload_part(p, n);
}
RM_INLINE void store_some(float* p, vf v, int64_t n) {
  if (n == kWidth) {
    vstore(p, v);
  } else {
    vstore_part(p, v, n);
  }
}

/// Scores to weights in place, zeros from key `valid` on; the maximum and the sum go to partial[0] and [1].
void soften(float* row, int64_t n, int64_t valid, float scale, const float* addend, float* partial) {
  vf high = vset(-kInf), total{};
  for (int64_t t = 0; t < n; t += kWidth) {
    const int64_t c = imin(kWidth, n - t);
    vf x = load_some(row + t, c) * scale;
    if (addend) x += load_some(addend + t, c);
    if (t + kWidth > valid) {
      for (int64_t i = imax(0, valid - t); i < kWidth; ++i) x[i] = -kInf;
    }
    store_some(row + t, x, c);
    high = vmax(x, high);
  }
  const float most = vmax_of(high), shift = most == -kInf ? 0.0f : most;
  for (int64_t t = 0; t < n; t += kWidth) {
    const int64_t c = imin(kWidth, n - t);
    const vf x = c == kWidth ? vload(row + t) : vload_part(row + t, c, -kInf);
    const vf w = vexp_nonpositive(x - shift);
    store_some(row + t, w, c);
    total += w;
  }
  partial[0] = most;
  partial[1] = vsum(total);
}

template <class T>
Rows<T> keys_of(const SdpaShape& p, const SdpaData& data, const SdpaPiece& at) {
  return {static_cast<const T*>(data.k) + at.b * p.k[0] + at.g * p.k[1] + at.t0 * p.k[2], p.k[2],
          p.k[3]};
}

template <class T>
void run_as(const SdpaShape& p, const SdpaData& data, const SdpaPiece& piece, const SdpaPiece& next,
            float* partial, char* memory) {
  const auto [b, g, t0, t1] = piece;
  const int64_t n = t1 - t0, share = p.heads / p.groups, ldq = round_up(p.d, 16);
  auto* queries = reinterpret_cast<float*>(memory);
  float* scores = queries + queries_of(p) * ldq;
  float* addend = scores + queries_of(p) * n;
  const Rows<T> k = keys_of<T>(p, data, piece);
  const Rows<T> v{static_cast<const T*>(data.v) + b * p.v[0] + g * p.v[1] + t0 * p.v[2], p.v[2],
                  p.v[3]};
  for (int64_t r = 0; r < queries_of(p); ++r) {
    const int64_t h = g * share + r / p.s, s = r % p.s;
    widen_row(static_cast<const T*>(data.q) + b * p.q[0] + h * p.q[1] + s * p.q[2], p.q[3],
              queries + r * ldq, p.d);
  }
  score(queries, ldq, queries_of(p), k, n, p.d, scores, Ahead::of(v, n, p.e));
  const char* last = nullptr;  // the mask row that `addend` holds; heads often share one
  bool masked = false;
  for (int64_t r = 0; r < queries_of(p); ++r) {
    const int64_t h = g * share + r / p.s, s = r % p.s;
    float* row = scores + r * n;
    if (p.mask != DType::invalid) {
      const char* at = mask_row(p, data, b, h, s) + t0 * p.m[3] * mask_bytes(p.mask);
      if (at != last) masked = mask_addend(p.mask, at, p.m[3], n, addend);
      last = at;
    }
    const int64_t valid = p.causal ? imax(0, imin(n, s + 1 - t0)) : n;
    soften(row, n, valid, p.scale, masked ? addend : nullptr, partial + r * partial_size(p));
  }
  weigh(scores, queries_of(p), v, n, p.e, partial + 2, partial_size(p),
        Ahead::of(keys_of<T>(p, data, next), next.t1 - next.t0, p.d));
}

void run(const SdpaShape& p, const SdpaData& data, const SdpaPiece& piece, const SdpaPiece& next,
         float* partial, char* memory) {
  if (p.type == DType::f32) run_as<float>(p, data, piece, next, partial, memory);
  if (p.type == DType::bf16) run_as<bf16>(p, data, piece, next, partial, memory);
  if (p.type == DType::f16) run_as<f16>(p, data, piece, next, partial, memory);
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
    if (data.lse == nullptr) continue;
    static_cast<float*>(data.lse)[(b * p.heads + h) * p.s + s] =
        sum == 0.0f ? -kInf : most + __builtin_logf(sum);
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
const SdpaDecode sdpa_decode = {run, scratch_bytes, combine, kTile, kNearKeys};

}  // namespace rm::cpu::RM_ISA
