// Attention of many queries: blocks of kBlock keys, K transposed into panels, an online softmax
// between two register-blocked products, everything in f32.  One call serves some rows of one head.
// Bound by FMA throughput from S and T of about 64 on; below that by packing.
#include "ops/sdpa/products.hpp"
#include "ops/sdpa/soften.hpp"

namespace rm::cpu::RM_ISA {
namespace {

constexpr int64_t kBlock = 256;           // keys a block: K and V panels stay in L2
constexpr int64_t kRowBlock = 4 * kRows;  // rows between softmax and the second product

struct Scratch {
  float *keys, *values, *queries, *scores, *acc, *most, *sum, *addend;
  int64_t* ends;  // of each kRowBlock rows: what is behind their last key
  int64_t e;  // columns of values and acc, a multiple of kPanel
};

uint64_t lay_out(const SdpaShape& p, int64_t rows, char* base, Scratch* out) {
  const int64_t e = round_up(imax(p.e, 1), kPanel), block = imin(kBlock, round_up(p.t, kPanel));
  const int64_t sizes[8] = {block * p.d, block * e, rows * p.d, kRowBlock * block,
                            rows * e,    rows,      rows,       block};
  float** fields[8] = {&out->keys, &out->values, &out->queries, &out->scores,
                       &out->acc,  &out->most,   &out->sum,     &out->addend};
  uint64_t bytes = 0;
  for (int i = 0; i < 8; ++i) {
    *fields[i] = reinterpret_cast<float*>(base + bytes);
    bytes += (static_cast<uint64_t>(sizes[i]) * 4 + 63) & ~63ull;
  }
  out->ends = reinterpret_cast<int64_t*>(base + bytes);
  bytes += (static_cast<uint64_t>((rows + kRowBlock - 1) / kRowBlock) * 8 + 63) & ~63ull;
  out->e = e;
  return bytes;
}

template <class T>
struct Rows {
  const SdpaShape& p;
  const SdpaData& data;
  Scratch scratch;
  int64_t b, h, s0, s1;
  const float* queries;
  int64_t ldq;

  void load_queries() {
    const T* q = static_cast<const T*>(data.q) + b * p.q[0] + h * p.q[1] + s0 * p.q[2];
    if (__is_same(T, float) && p.q[3] == 1) {
      queries = reinterpret_cast<const float*>(q);
      ldq = p.q[2];
      return;
    }
    for (int64_t s = 0; s < s1 - s0; ++s) {
      widen_row(q + s * p.q[2], p.q[3], scratch.queries + s * p.d, p.d);
    }
    queries = scratch.queries;
    ldq = p.d;
  }

  /// Values [t0, t0 + n) as dense f32 rows: in place when they already are.
  const float* load_values(int64_t t0, int64_t n, int64_t* ld) {
    const int64_t g = h / (p.heads / p.groups);
    const T* v = static_cast<const T*>(data.v) + b * p.v[0] + g * p.v[1] + t0 * p.v[2];
    if (__is_same(T, float) && p.v[3] == 1 && p.v[2] == p.e && p.e == scratch.e) {
      *ld = p.e;
      return reinterpret_cast<const float*>(v);
    }
    *ld = scratch.e;
    for (int64_t t = 0; t < n; ++t) {
      float* row = scratch.values + t * scratch.e;
      widen_row(v + t * p.v[2], p.v[3], row, p.e);
      for (int64_t i = p.e; i < scratch.e; ++i) row[i] = 0;
    }
    return scratch.values;
  }

  void block(int64_t t0, int64_t n) {
    const int64_t g = h / (p.heads / p.groups);
    const T* k = static_cast<const T*>(data.k) + b * p.k[0] + g * p.k[1] + t0 * p.k[2];
    pack_keys(k, p.k[2], p.k[3], n, p.d, scratch.keys);
    int64_t ldv;
    const float* values = load_values(t0, n, &ldv);
    for (int64_t r0 = s0; r0 < s1; r0 += kRowBlock) {
      const int64_t rows = imin(kRowBlock, s1 - r0);
      // Under a causal or banded mask the rows end long before the block does.
      const int64_t end = imin(n, scratch.ends[(r0 - s0) / kRowBlock] - t0);
      if (end > 0) {
        row_block(t0, end, r0, rows, values, ldv);
      } else if (t0 == 0) {
        float* acc = scratch.acc + (r0 - s0) * scratch.e;
        for (int64_t i = 0; i < rows * scratch.e; ++i) acc[i] = 0;
      }
    }
  }

  /// Queries [r0, r0 + rows) with keys [t0, t0 + n).
  void row_block(int64_t t0, int64_t n, int64_t r0, int64_t rows, const float* values,
                 int64_t ldv) {
    const int64_t at = r0 - s0, width = round_up(n, kPanel);
    multiply(queries + at * ldq, ldq, scratch.keys, kPanel, p.d * kPanel, rows, width, p.d,
             scratch.scores, width, false);
    bool masked = false;
    for (int64_t i = 0; i < rows; ++i) {
      if (p.mask != DType::invalid && (i == 0 || p.m[2] != 0)) {
        const char* row = mask_row(p, data, b, h, r0 + i) + t0 * p.m[3] * mask_bytes(p.mask);
        masked = mask_addend(p.mask, row, p.m[3], n, scratch.addend);
      }
      const int64_t valid = p.causal ? imax(0, imin(n, r0 + i + 1 - t0)) : n;
      const float factor =
          soften(scratch.scores + i * width, valid, width, p.scale,
                 masked ? scratch.addend : nullptr, scratch.most + at + i, scratch.sum + at + i);
      if (t0 > 0 && factor != 1.0f) rescale(scratch.acc + (at + i) * scratch.e, factor);
    }
    multiply(scratch.scores, width, values, ldv, kPanel, rows, scratch.e, n,
             scratch.acc + at * scratch.e, scratch.e, t0 > 0);
  }

  void rescale(float* acc, float factor) const {
    for (int64_t i = 0; i < scratch.e; i += kWidth) vstore(acc + i, vload(acc + i) * factor);
  }
};

template <class T>
void run_as(const SdpaShape& p, const SdpaData& data, int64_t b, int64_t h, int64_t s0, int64_t s1,
            char* memory) {
  Rows<T> rows{p, data, {}, b, h, s0, s1, nullptr, 0};
  lay_out(p, s1 - s0, memory, &rows.scratch);
  for (int64_t i = 0; i < s1 - s0; ++i) {
    rows.scratch.most[i] = -kInf;
    rows.scratch.sum[i] = 0;
  }
  const int64_t end = find_keys_ends(p, data, b, h, s0, s1, kRowBlock, rows.scratch.ends);
  if (end == 0) {
    for (int64_t i = 0; i < (s1 - s0) * rows.scratch.e; ++i) rows.scratch.acc[i] = 0;
  } else {
    rows.load_queries();
  }
  for (int64_t t0 = 0; t0 < end; t0 += kBlock) rows.block(t0, imin(kBlock, end - t0));
  write_rows<T>(p, data, b, h, s0, s1, rows.scratch.acc, rows.scratch.e, rows.scratch.most, rows.scratch.sum);
}

void run(const SdpaShape& p, const SdpaData& data, int64_t b, int64_t h, int64_t s0, int64_t s1,
         char* memory) {
  if (p.type == DType::f32) run_as<float>(p, data, b, h, s0, s1, memory);
  if (p.type == DType::bf16) run_as<bf16>(p, data, b, h, s0, s1, memory);
  if (p.type == DType::f16) run_as<f16>(p, data, b, h, s0, s1, memory);
}

uint64_t scratch_bytes(const SdpaShape& p, int64_t rows) {
  Scratch unused;
  return lay_out(p, rows, nullptr, &unused);
}

}  // namespace

extern const SdpaPrefill sdpa_prefill;
const SdpaPrefill sdpa_prefill = {run, scratch_bytes, kRows, kRowBlock, kPanel, kBlock};

}  // namespace rm::cpu::RM_ISA
