// The Python form of an epilogue: bias, bias_kind, activation, slope, scale, residual, aux.
#pragma once

#include <cstring>

#include "_shim/epilogue_shim.hpp"
#include "module_kit.hpp"

namespace rm::ops_bindings {

inline constexpr const char* kEpilogueText =
    "t = scale * product + bias; aux = t where given; result = activation(t) + residual.\n"
    "bias_kind: scalar (bias[0]), row (bias[m]) or column (bias[n]); activation: none, relu,\n"
    "leaky_relu (slope), gelu (erf), gelu_tanh, silu, tanh, sigmoid; residual, aux: like the "
    "result.";

template <std::size_t kCount>
int index_of(const char* op, const char* what, const char* const (&names)[kCount],
             const std::string& name) {
  std::string all;
  for (std::size_t i = 0; i < kCount; ++i) {
    if (name == names[i]) return static_cast<int>(i);
    all += (i ? ", " : "") + std::string(names[i]);
  }
  check(cuda_ops::invalid("[" + std::string(op) + "] expected " + what + " of " + all + ", got " +
                          name));
  return 0;
}

/// Options of an epilogue without its tensors.
inline cuda_ops::Epilogue epilogue_of(const char* op, bool has_bias, const std::string& bias_kind,
                                      const std::string& activation, float slope, float scale) {
  cuda_ops::Epilogue e;
  const int kind = index_of(op, "bias_kind", cuda_ops::kBiasNames, bias_kind);
  e.bias_kind = has_bias ? static_cast<cuda_ops::BiasKind>(kind) : cuda_ops::BiasKind::none;
  e.activation = static_cast<cuda_ops::Activation>(
      index_of(op, "activation", cuda_ops::kActivationNames, activation));
  e.slope = slope, e.scale = scale;
  return e;
}

}  // namespace rm::ops_bindings
