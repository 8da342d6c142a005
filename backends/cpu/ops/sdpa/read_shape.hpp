// What sdpa and its gradient read of a problem. Row sources only.
#pragma once

#include <cmath>

#include "common/problem.hpp"
#include "ops/sdpa/shape.hpp"

namespace rm::cpu {

inline void take_strides(const View& v, int64_t* stride) {
  for (int i = 0; i < v.rank(); ++i) stride[i] = v.stride[static_cast<size_t>(i)];
}

/// `o` is the result of sdpa.
inline SdpaShape read_sdpa_shape(const Problem& p, const View& o) {
  const View q = p.input(0), k = p.input(1), v = p.input(2);
  SdpaShape s{};
  s.batch = q.dim(0);
  s.heads = q.dim(1);
  s.groups = k.dim(1);
  s.s = q.dim(2);
  s.t = k.dim(2);
  s.d = q.dim(3);
  s.e = v.dim(3);
  take_strides(q, s.q);
  take_strides(k, s.k);
  take_strides(v, s.v);
  take_strides(o, s.o);
  s.type = q.dtype;
  s.mask = DType::invalid;
  if (p.has_input(3)) {
    const View m = p.input(3);
    s.mask = m.dtype;
    take_strides(m, s.m);
  }
  s.scale64 = p.attr_float("scale", s.d ? 1.0 / std::sqrt(static_cast<double>(s.d)) : 1.0);
  s.scale = static_cast<float>(s.scale64);
  s.causal = p.attr_int("is_causal", 0) != 0;
  return s;
}

}  // namespace rm::cpu
