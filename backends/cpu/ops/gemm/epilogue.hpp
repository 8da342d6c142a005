// What happens to a finished tile: scale, bias, activation, residual, one rounding.
#pragma once

#include "common/vec_math.hpp"
#include "ops/gemm/elements.hpp"

namespace rm::cpu::gemm::RM_ISA {
namespace {

template <int A>
RM_INLINE vf activate(vf x) {
  if constexpr (A == kRelu) return (x < 0.f) ? vf{} : x;
  if constexpr (A == kGelu) return vgelu(x);
  if constexpr (A == kGeluTanh) return vgelu_tanh(x);
  if constexpr (A == kSilu) return vsilu(x);
  if constexpr (A == kTanh) return vtanh(x);
  if constexpr (A == kSigmoid) return vsigmoid(x);
  return x;
}

template <class C, int A>
RM_INLINE void store_row(const float* acc, float alpha, const typename C::Scalar* bias,
                         const typename C::Scalar* residual, typename C::Scalar* c) {
#pragma GCC unroll 2
  for (int j = 0; j < kNr; j += kWidth) {
    vf x = F32::load(acc + j) * alpha;
    if (bias) x += C::load(bias + j);
    x = activate<A>(x);
    if (residual) x += C::load(residual + j);
    C::store(c + j, x);
  }
}

template <class C, int A>
void store(const StoreArgs& args) {
  using S = typename C::Scalar;
  const S* bias = static_cast<const S*>(args.bias);
  const S* residual = static_cast<const S*>(args.residual);
  S* c = static_cast<S*>(args.c);
  if (args.cols == kNr) {
    for (int64_t i = 0; i < args.rows; ++i) {
      store_row<C, A>(args.acc + i * kNr, args.alpha, bias,
                      residual ? residual + i * args.residual_stride : nullptr,
                      c + i * args.c_stride);
    }
    return;
  }
  // The ragged last panel: the same arithmetic on copies of full width.
  S bias_row[kNr] = {}, residual_row[kNr] = {}, c_row[kNr];
  const size_t bytes = static_cast<size_t>(args.cols) * sizeof(S);
  if (bias) __builtin_memcpy(bias_row, bias, bytes);
  for (int64_t i = 0; i < args.rows; ++i) {
    if (residual) __builtin_memcpy(residual_row, residual + i * args.residual_stride, bytes);
    store_row<C, A>(args.acc + i * kNr, args.alpha, bias ? bias_row : nullptr,
                    residual ? residual_row : nullptr, c_row);
    __builtin_memcpy(c + i * args.c_stride, c_row, bytes);
  }
}

template <class C, int A>
constexpr void fill_stores(StoreFn* row) {
  row[A] = store<C, A>;
  if constexpr (A > 0) fill_stores<C, A - 1>(row);
}

}  // namespace
}  // namespace rm::cpu::gemm::RM_ISA
