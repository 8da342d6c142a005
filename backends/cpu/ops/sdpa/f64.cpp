// sdpa in f64 by its definition: correct for every shape and stride, not made for speed.
#include <cmath>
#include <limits>

#include "common/plain_vec.hpp"
#include "ops/sdpa/shape.hpp"

namespace rm::cpu {
namespace {

double mask_value(const SdpaShape& p, const SdpaData& data, int64_t offset) {
  switch (p.mask) {
    case DType::boolean:
      return static_cast<const uint8_t*>(data.mask)[offset]
                 ? 0.0
                 : -std::numeric_limits<double>::infinity();
    case DType::f64:
      return static_cast<const double*>(data.mask)[offset];
    case DType::f32:
      return static_cast<const float*>(data.mask)[offset];
    case DType::bf16:
      return get(static_cast<const bf16*>(data.mask)[offset]);
    case DType::f16:
      return get(static_cast<const f16*>(data.mask)[offset]);
    default:
      return 0.0;
  }
}

}  // namespace

void sdpa_f64(const SdpaShape& p, const SdpaData& data, int64_t b, int64_t h, int64_t s,
              double* scratch) {
  const int64_t g = h / (p.heads / p.groups);
  const auto* q = static_cast<const double*>(data.q) + b * p.q[0] + h * p.q[1] + s * p.q[2];
  const auto* k = static_cast<const double*>(data.k) + b * p.k[0] + g * p.k[1];
  const auto* v = static_cast<const double*>(data.v) + b * p.v[0] + g * p.v[1];
  auto* o = static_cast<double*>(data.o) + b * p.o[0] + h * p.o[1] + s * p.o[2];
  const int64_t end = p.causal && s + 1 < p.t ? s + 1 : p.t;
  double most = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int64_t t = 0; t < end; ++t) {
    double x = 0;
    for (int64_t d = 0; d < p.d; ++d) x += q[d * p.q[3]] * k[t * p.k[2] + d * p.k[3]];
    x *= p.scale64;
    if (p.mask != DType::invalid) {
      x += mask_value(p, data, b * p.m[0] + h * p.m[1] + s * p.m[2] + t * p.m[3]);
    }
    scratch[t] = x;
    if (x > most) most = x;
  }
  const double shift = std::isinf(most) && most < 0 ? 0.0 : most;
  for (int64_t t = 0; t < end; ++t) {
    scratch[t] = std::exp(scratch[t] - shift);
    sum += scratch[t];
  }
  for (int64_t e = 0; e < p.e; ++e) {
    double x = 0;
    for (int64_t t = 0; t < end; ++t) x += scratch[t] * v[t * p.v[2] + e * p.v[3]];
    o[e * p.o[3]] = sum == 0 ? 0.0 : x / sum;
  }
  if (data.lse == nullptr) return;
  static_cast<double*>(data.lse)[(b * p.heads + h) * p.s + s] =
      sum == 0 ? -std::numeric_limits<double>::infinity() : most + std::log(sum);
}

}  // namespace rm::cpu
