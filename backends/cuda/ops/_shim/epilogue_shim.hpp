// What gemm and gemv do to a product before it is stored:
//   t = scale * (a b) + bias;  aux = t;  c = activation(t) + residual
#pragma once

#include <cstdint>
#include <string>

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

enum class Activation : int { none, relu, leaky_relu, gelu, gelu_tanh, silu, tanh, sigmoid };
inline constexpr const char* kActivationNames[] = {"none",      "relu", "leaky_relu", "gelu",
                                                   "gelu_tanh", "silu", "tanh",       "sigmoid"};

/// Which element of the bias an element of c [.., M, N] gets: bias[0], bias[m] or bias[n].
enum class BiasKind : int { none, scalar, row, column };
inline constexpr const char* kBiasNames[] = {"none", "scalar", "row", "column"};

struct Epilogue {
  BiasKind bias_kind = BiasKind::none;
  const Tensor* bias = nullptr;  // [1], [M] or [N], dense, of c's dtype
  Activation activation = Activation::none;
  float slope = 0.01f;               // leaky_relu
  float scale = 1.0f;                // of the product
  const Tensor* residual = nullptr;  // like c
  const Tensor* aux = nullptr;       // result, like c: what the activation was given
};

/// The same for a kernel: c is [batch, M, N] with a dense last axis.
struct EpilogueArgs {
  const void *bias, *residual;
  void* aux;
  int bias_kind, activation;
  float slope, scale;
  std::int64_t residual_pitch, residual_batch, aux_pitch, aux_batch;
};

/// c [M, N] or [.., M, N] whose leading axes have one stride; rows dense.
struct Matrix {
  std::int64_t batch = 1, rows = 1, columns = 1, pitch = 0, batch_stride = 0;
  bool valid = false;
};

inline Matrix matrix_of(const Tensor& t) {
  Matrix m;
  if (t.rank < 2) return m;
  m.rows = t.shape[t.rank - 2], m.columns = t.shape[t.rank - 1];
  m.pitch = m.rows == 1 && t.stride[t.rank - 2] < m.columns ? m.columns : t.stride[t.rank - 2];
  m.valid = (m.columns <= 1 || t.stride[t.rank - 1] == 1) && (m.rows <= 1 || m.pitch >= m.columns);
  std::int64_t expected = -1;
  for (int d = t.rank - 3; d >= 0; --d) {
    if (t.shape[d] == 1) continue;
    if (expected < 0) {
      m.batch_stride = t.stride[d];
    } else if (t.stride[d] != expected) {
      m.valid = false;
    }
    m.batch *= t.shape[d];
    expected = t.stride[d] * t.shape[d];
  }
  return m;
}

inline Status check_like_c(const char* op, const char* what, const Tensor& t, const Tensor& c) {
  if (t.dtype == c.dtype && same_shape(t, c) && matrix_of(t).valid) return {};
  return invalid(std::string("[") + op + "] expected " + what + " of c's shape and dtype (" +
                 name_of(c.dtype) + ") with a dense last axis, got " + name_of(t.dtype) +
                 " of rank " + std::to_string(t.rank) + "; try a contiguous tensor like c");
}

inline Status check_epilogue(const char* op, const Epilogue& e, const Tensor& c) {
  const Matrix m = matrix_of(c);
  if ((e.bias_kind == BiasKind::none) != (e.bias == nullptr)) {
    return invalid(std::string("[") + op + "] expected a bias and its kind together");
  }
  if (e.bias) {
    const std::int64_t n = e.bias_kind == BiasKind::scalar ? 1
                           : e.bias_kind == BiasKind::row  ? m.rows
                                                           : m.columns;
    if (e.bias->dtype != c.dtype || numel(*e.bias) != n || !is_contiguous(*e.bias)) {
      return invalid(std::string("[") + op + "] expected bias dense [" + std::to_string(n) +
                     "] of " + name_of(c.dtype) + ", got " + name_of(e.bias->dtype) + " with " +
                     std::to_string(numel(*e.bias)) + " elements; try bias_kind");
    }
  }
  if (e.residual) {
    if (Status s = check_like_c(op, "residual", *e.residual, c); !s) return s;
  }
  if (e.aux) return check_like_c(op, "aux", *e.aux, c);
  return {};
}

/// Every row of the matrix starts on 16 bytes.
inline bool rows_in_vectors(const Tensor& t) {
  const Matrix m = matrix_of(t);
  return is_aligned(t.data, m.pitch, t.dtype, 16) && m.batch_stride * size_of(t.dtype) % 16 == 0;
}

inline bool epilogue_in_vectors(const Epilogue& e) {
  return (!e.bias || is_aligned(e.bias->data, 0, e.bias->dtype, 16)) &&
         (!e.residual || rows_in_vectors(*e.residual)) && (!e.aux || rows_in_vectors(*e.aux));
}

inline EpilogueArgs epilogue_args(const Epilogue& e) {
  EpilogueArgs a{};
  a.bias_kind = static_cast<int>(e.bias_kind), a.activation = static_cast<int>(e.activation);
  a.slope = e.slope, a.scale = e.scale;
  if (e.bias) a.bias = e.bias->data;
  if (e.residual) {
    const Matrix m = matrix_of(*e.residual);
    a.residual = e.residual->data, a.residual_pitch = m.pitch, a.residual_batch = m.batch_stride;
  }
  if (e.aux) {
    const Matrix m = matrix_of(*e.aux);
    a.aux = e.aux->data, a.aux_pitch = m.pitch, a.aux_batch = m.batch_stride;
  }
  return a;
}

}  // namespace rm::cuda_ops
