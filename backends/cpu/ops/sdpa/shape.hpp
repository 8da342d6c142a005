// What sdpa kernels know of a problem, and their entry points.  Strides are in elements.
#pragma once

#include "common/types.hpp"

namespace rm::cpu {

struct SdpaShape {
  int64_t batch, heads, groups, s, t, d, e;  // heads = queries' heads, groups = heads of k and v
  int64_t q[4], k[4], v[4], o[4], m[4];      // strides; m is unused without a mask
  DType type, mask;                          // mask = invalid: none
  float scale;
  double scale64;
  bool causal;
};

struct SdpaData {
  const void *q, *k, *v, *mask;
  void* o;
  void* lse;  // [batch, heads, s], dense: log-sum-exp of the scores, f64 for f64 operands, else f32;
              // nullptr: not asked for
};

/// Prefill: rows [s0, s1) of one head; scratch is 64-byte aligned.
struct SdpaPrefill {
  void (*run)(const SdpaShape&, const SdpaData&, int64_t b, int64_t h, int64_t s0, int64_t s1,
              char* scratch);
  uint64_t (*scratch_bytes)(const SdpaShape&, int64_t rows);
  int64_t rows, row_block, columns, key_block;  // edges: of a tile, between softmaxes, of a panel
};

/// Keys [t0, t1) of one group of heads.
struct SdpaPiece {
  int64_t b, g, t0, t1;
};

/// Decode (few queries): a piece for every query of its group. `partial` receives, for each of
/// heads/groups * s rows, [maximum, sum, e weighted sums]; combine() then makes o. Keys of `next`,
/// which may be empty, are fetched meanwhile.
struct SdpaDecode {
  void (*run)(const SdpaShape&, const SdpaData&, const SdpaPiece&, const SdpaPiece& next,
              float* partial, char* scratch);
  uint64_t (*scratch_bytes)(const SdpaShape&, int64_t keys);
  void (*combine)(const SdpaShape&, const SdpaData&, int64_t b, int64_t g, const float* partials,
                  int64_t pieces, float* scratch_e);
  int64_t tile, near_keys;  // edges
};

/// Plain loops in f64, for f64 operands; scratch is t doubles.
void sdpa_f64(const SdpaShape&, const SdpaData&, int64_t b, int64_t h, int64_t s, double* scratch);

}  // namespace rm::cpu
