// c [.., M, N] = epilogue(op(a) op(b)) and its gradients. a is [.., M, K] (trans_a: [.., K, M]), b
// is
// [.., K, N] (trans_b: [.., N, K], torch's Linear weight). Leading axes of a and c agree; b has the
// same or none. Last axes are dense.
#pragma once

#include "_shim/epilogue_shim.hpp"
#include "gemm/library.hpp"

namespace rm::cuda_ops {

struct Gemm {
  Tensor a, b, c;
  bool trans_a = false, trans_b = false;
  bool tf32 = false;  // fp32 operands may be rounded to 10 bits of mantissa
  Epilogue epilogue;
  GemmLibrary* library = nullptr;  // null: the rows that need cuBLASLt do not apply
  /// Time what could run a problem the first time it is seen outside a capture, and remember it.
  bool tune = false;
  /// As in Gemv, of b and the bias: with both, gemm_few_sm90a reads them before earlier work of the
  /// stream has ended. Other rows read everything behind it.
  bool stable_weights = false, overlap = false;
  /// What the call's workspace has, so that a row knows beforehand whether it can run.
  std::size_t workspace_bytes = ~std::size_t{0};
};

/// From dc: da, db, dbias where given. `epilogue` is forward's: activation and slope, bias_kind,
/// scale, and aux (what forward stored) where there is an activation. The residual's gradient is
/// dc.
struct GemmBackward {
  Tensor dc, a, b;
  bool trans_a = false, trans_b = false, tf32 = false;
  Epilogue epilogue;
  const Tensor* da = nullptr;
  const Tensor* db = nullptr;
  const Tensor* dbias = nullptr;
  GemmLibrary* library = nullptr;
  bool tune = false;
};

std::span<const KernelRow<Gemm>> gemm_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const Gemm& p);

/// Bytes that let every row run; less is legal and leaves algorithms out.
std::size_t gemm_workspace(const Gemm& p);
Status gemm(const Gemm& p, const char* kernel, Workspace workspace, Stream stream);

std::size_t gemm_backward_workspace(const GemmBackward& p);
/// `kernel`: how da and db are made, a name of gemm_pair_rows(); "" chooses.
Status gemm_backward(const GemmBackward& p, const char* kernel, Workspace workspace, Stream stream);
std::vector<std::pair<const char*, const char*>> gemm_pair_rows();  // (name, range)

}  // namespace rm::cuda_ops
