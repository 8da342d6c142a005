// Products of float32 matrices that are too small to fill a card by large tiles, as training steps of
// small models have them: c = epilogue(a b), c = program(a b, operands), and several products of
// transposed operands with sums of their columns in one launch. Each sum has one order.
#pragma once

#include <vector>

#include "_shim/epilogue_shim.hpp"
#include "ewise/api.hpp"

namespace rm::cuda_ops {

inline constexpr int kMostSmallOperands = 4;      // of a program, beside the product
inline constexpr int kMostSmallInstructions = 24;
inline constexpr int kMostSlopes = 12;            // products of one launch

/// c [M, N] = epilogue(a [M, K] b [K, N]), then, where there is one, the program: register 0 is the
/// product, the others are `operands`, each of c's shape, by stride 0 where they repeat.
struct SmallGemm {
  Tensor a, b, c;
  Epilogue epilogue;
  EwiseProgram program;  // of class float32 alone; empty: none
  std::vector<Tensor> operands;
};

/// From slopes g [M, N] and x [M, K] of each: dw [N, K] = g^T x and, where wanted, db [N], the sums of
/// g's columns.
struct SlopeProduct {
  Tensor g, x, dw, db;
  bool has_db = false;
};
struct Slopes {
  std::vector<SlopeProduct> products;
};

std::span<const KernelRow<SmallGemm>> small_gemm_rows();
std::span<const KernelRow<Slopes>> slopes_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const SmallGemm& p);
Status legal(const Slopes& p);
Status small_gemm(const SmallGemm& p, const char* kernel, Stream stream);
Status slopes(const Slopes& p, const char* kernel, Stream stream);

}  // namespace rm::cuda_ops
