// Attention's gradients in blocks: scores are made again from q, k and the log-sum-exp of the rows,
// a block of rows x keys at a time, and the five products read them from the second-level cache. One
// call serves a group of heads, whose keys and values get sums over them. Everything in f32, in an
// order that neither threads nor blocks of other heads change. Bound by FMA throughput.
#include "common/vec_math.hpp"
#include "ops/sdpa/backward.hpp"
#include "ops/sdpa/mask.hpp"
#include "ops/sdpa/products.hpp"

namespace rm::cpu::RM_ISA {
namespace {

constexpr int64_t kKeys = 256;            // a block: panels and sums of them stay in L2
constexpr int64_t kRowBlock = 4 * kRows;  // rows a block

struct Scratch {
  // Panels of keys and values, keys as rows, sums for both; rows of q and dy; weights and gradients
  // of scores; dq of all rows of the group's heads; dy . y of a row, its log-sum-exp.
  float *key_panels, *value_panels, *keys, *dk, *dv, *q, *dy, *weights, *ds, *dq, *mean, *lse,
      *addend;
  int64_t d, e;  // columns of rows, multiples of kPanel
};

uint64_t lay_out(const SdpaBackwardShape& shape, char* base, Scratch* out) {
  const SdpaShape& p = shape.forward;
  const int64_t d = round_up(imax(p.d, 1), kPanel), e = round_up(imax(p.e, 1), kPanel);
  const int64_t n = imin(kKeys, round_up(imax(p.t, 1), kPanel)), rows = imin(kRowBlock, p.s);
  const int64_t share = p.groups ? p.heads / p.groups : 0;
  const int64_t sizes[13] = {n * p.d,  n * p.e,  n * d,    n * d,              n * e, rows * d, rows * e,
                             rows * n, rows * n, share * p.s * d, rows, rows,  n};
  float** fields[13] = {&out->key_panels, &out->value_panels, &out->keys,    &out->dk, &out->dv,
                        &out->q,          &out->dy,           &out->weights, &out->ds, &out->dq,
                        &out->mean,       &out->lse,          &out->addend};
  uint64_t bytes = 0;
  for (int i = 0; i < 13; ++i) {
    *fields[i] = reinterpret_cast<float*>(base + bytes);
    bytes += (static_cast<uint64_t>(sizes[i]) * 4 + 63) & ~63ull;
  }
  out->d = d, out->e = e;
  return bytes;
}

RM_INLINE void clear(float* at, int64_t n) { __builtin_memset(at, 0, static_cast<size_t>(n) * 4); }

/// Rows of T as dense rows of f32; columns [n, width) are zero.
template <class T>
void load_rows(const T* from, int64_t row, int64_t column, int64_t rows, int64_t n, float* to,
               int64_t width) {
  for (int64_t i = 0; i < rows; ++i) {
    widen_row(from + i * row, column, to + i * width, n);
    for (int64_t j = n; j < width; ++j) to[i * width + j] = 0;
  }
}

template <class T>
void store_rows(const float* from, int64_t width, int64_t rows, int64_t n, T* to, int64_t row,
                int64_t column) {
  for (int64_t i = 0; i < rows; ++i) narrow_row(from + i * width, to + i * row, column, n);
}

RM_INLINE float dot(const float* a, const float* b, int64_t n) {
  vf sum{};
  for (int64_t i = 0; i < n; i += kWidth) sum += vload(a + i) * vload(b + i);
  return vsum(sum);
}

template <class T>
struct Group {
  const SdpaBackwardShape& shape;
  const SdpaBackwardData& data;
  int64_t b, g;
  Scratch s;

  const SdpaShape& p() const { return shape.forward; }
  const T* at(const void* base, const int64_t* stride, int64_t head, int64_t row) const {
    return static_cast<const T*>(base) + b * stride[0] + head * stride[1] + row * stride[2];
  }
  T* at(void* base, const int64_t* stride, int64_t head, int64_t row) const {
    return const_cast<T*>(at(static_cast<const void*>(base), stride, head, row));
  }

  void run() {
    const int64_t share = p().heads / p().groups, end = imin(p().t, data.keys);
    clear(s.dq, share * p().s * s.d);
    for (int64_t t0 = 0; t0 < p().t; t0 += kKeys) {
      const int64_t n = imin(kKeys, p().t - t0);
      clear(s.dk, n * s.d);
      clear(s.dv, n * s.e);
      if (t0 < end) keys(t0, imin(n, end - t0), share);
      store_rows(s.dk, s.d, n, p().d, at(data.dk, shape.dk, g, t0), shape.dk[2], shape.dk[3]);
      store_rows(s.dv, s.e, n, p().e, at(data.dv, shape.dv, g, t0), shape.dv[2], shape.dv[3]);
    }
    for (int64_t h = 0; h < share; ++h) {
      store_rows(s.dq + h * p().s * s.d, s.d, p().s, p().d,
                 at(data.dq, shape.dq, g * share + h, 0), shape.dq[2], shape.dq[3]);
    }
  }

  /// Keys [t0, t0 + n) under all queries.
  void keys(int64_t t0, int64_t n, int64_t share) {
    const T* k = at(data.forward.k, p().k, g, t0);
    const T* v = at(data.forward.v, p().v, g, t0);
    pack_keys(k, p().k[2], p().k[3], n, p().d, s.key_panels);
    pack_keys(v, p().v[2], p().v[3], n, p().e, s.value_panels);
    load_rows(k, p().k[2], p().k[3], n, p().d, s.keys, s.d);
    for (int64_t h = g * share; h < (g + 1) * share; ++h) {
      float* dq = s.dq + (h - g * share) * p().s * s.d;
      for (int64_t r0 = 0; r0 < p().s; r0 += kRowBlock) {
        const int64_t rows = imin(kRowBlock, p().s - r0);
        const int64_t seen = imin(n, keys_end(p(), data.forward, b, h, r0, r0 + rows) - t0);
        if (seen > 0) block(h, t0, seen, r0, rows, dq + r0 * s.d);
      }
    }
  }

  /// Queries [r0, r0 + rows) of a head with keys [t0, t0 + n).
  void block(int64_t h, int64_t t0, int64_t n, int64_t r0, int64_t rows, float* dq) {
    load_queries(h, r0, rows);
    const int64_t width = round_up(n, kPanel);
    multiply(s.q, s.d, s.key_panels, kPanel, p().d * kPanel, rows, width, p().d, s.weights, width,
             false);
    multiply(s.dy, s.e, s.value_panels, kPanel, p().e * kPanel, rows, width, p().e, s.ds, width,
             false);
    bool masked = false;
    for (int64_t i = 0; i < rows; ++i) {
      if (p().mask != DType::invalid && (i == 0 || p().m[2] != 0)) {
        const char* row = mask_row(p(), data.forward, b, h, r0 + i) +
                          t0 * p().m[3] * mask_bytes(p().mask);
        masked = mask_addend(p().mask, row, p().m[3], n, s.addend);
      }
      const int64_t valid = p().causal ? imax(0, imin(n, r0 + i + 1 - t0)) : n;
      differentiate(i, valid, width, masked ? s.addend : nullptr);
    }
    multiply(s.ds, width, s.keys, s.d, kPanel, rows, s.d, n, dq, s.d, true);
    multiply<true>(s.weights, width, s.dy, s.e, kPanel, n, s.e, rows, s.dv, s.e, true);
    multiply<true>(s.ds, width, s.q, s.d, kPanel, n, s.d, rows, s.dk, s.d, true);
  }

  /// Rows of q and dy, dy . y and the log-sum-exp of each.
  void load_queries(int64_t h, int64_t r0, int64_t rows) {
    load_rows(at(data.forward.q, p().q, h, r0), p().q[2], p().q[3], rows, p().d, s.q, s.d);
    load_rows(at(data.dy, shape.dy, h, r0), shape.dy[2], shape.dy[3], rows, p().e, s.dy, s.e);
    const T* y = at(data.forward.o, p().o, h, r0);
    const auto* lse = static_cast<const float*>(data.forward.lse) + b * shape.lse[0] +
                      h * shape.lse[1] + r0 * shape.lse[2];
    for (int64_t i = 0; i < rows; ++i) {
      float sum = 0;
      const float* dy = s.dy + i * s.e;
      if (__is_same(T, float) && p().o[3] == 1) {
        const auto* row = reinterpret_cast<const float*>(y + i * p().o[2]);
        int64_t j = p().e / kWidth * kWidth;
        sum = dot(row, dy, j);
        for (; j < p().e; ++j) sum += row[j] * dy[j];
      } else {
        for (int64_t j = 0; j < p().e; ++j) sum += widen(y[i * p().o[2] + j * p().o[3]]) * dy[j];
      }
      s.mean[i] = sum;
      s.lse[i] = lse[i * shape.lse[2]];
    }
  }

  /// Row i: its scores become weights, and the weights' gradients those of the scores. What a query
  /// does not see has no weight, whatever lies there.
  void differentiate(int64_t i, int64_t valid, int64_t width, const float* addend) {
    vi lane;
    for (int l = 0; l < kWidth; ++l) lane[l] = l;
    float *weights = s.weights + i * width, *ds = s.ds + i * width;
    const vf mean = vset(s.mean[i]), lse = vset(s.lse[i]), scale = vset(p().scale);
    if (s.lse[i] == -kInf) valid = 0;  // no key at all
    int64_t t = 0;
    for (; t < valid; t += kWidth) {
      const vf added = addend ? vload(addend + t) : vf{};
      vf w = vexp(vload(weights + t) * scale + added - lse);
      if (addend) w = added == -kInf ? vf{} : w;
      if (t + kWidth > valid) w = lane < static_cast<int32_t>(valid - t) ? w : vf{};
      const vf slope = w * (vload(ds + t) - mean) * scale;
      vstore(weights + t, w);
      vstore(ds + t, w == 0.0f ? vf{} : slope);
    }
    for (; t < width; t += kWidth) {
      vstore(weights + t, vf{});
      vstore(ds + t, vf{});
    }
  }
};

template <class T>
void run_as(const SdpaBackwardShape& shape, const SdpaBackwardData& data, int64_t b, int64_t g,
            char* memory) {
  Group<T> group{shape, data, b, g, {}};
  lay_out(shape, memory, &group.s);
  group.run();
}

void run(const SdpaBackwardShape& shape, const SdpaBackwardData& data, int64_t b, int64_t g,
         char* memory) {
  if (shape.forward.type == DType::f32) run_as<float>(shape, data, b, g, memory);
  if (shape.forward.type == DType::bf16) run_as<bf16>(shape, data, b, g, memory);
  if (shape.forward.type == DType::f16) run_as<f16>(shape, data, b, g, memory);
}

uint64_t scratch_bytes(const SdpaBackwardShape& shape) {
  Scratch unused;
  return lay_out(shape, nullptr, &unused);
}

}  // namespace

extern const SdpaBackwardTable sdpa_backward_table;
const SdpaBackwardTable sdpa_backward_table = {run,       scratch_bytes, kRows,
                                               kRowBlock, kPanel,        kKeys};

}  // namespace rm::cpu::RM_ISA
