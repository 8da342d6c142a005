// Scaled dot-product attention o = softmax(scale q k^T + mask) v. q, o [B, H, S, D]; k, v [B, G, T,
// D], H a multiple of G; any strides with a dense last axis. Query i of S sees keys j <= i +
// causal_offset when causal (offset 0 is torch's is_causal; T - S is decoding with a cache), and
// keys below lengths[b]. A row that sees no key is 0.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

struct Sdpa {
  Tensor q, k, v, o;
  const Tensor* mask = nullptr;  // [B, H, S, T] by strides (0: broadcast); bool: true = attend, or
                                 // q's dtype: added to the scaled product
  const Tensor* lengths = nullptr;  // [B] int32 or int64: keys of each batch
  const Tensor* lse = nullptr;  // result [B, H, S] float32, dense: log-sum-exp, -inf without keys
  float scale = 1.0f;
  bool causal = false;
  std::int64_t causal_offset = 0;
  bool overlap = false;  // decoding may start before the stream's previous kernel, which then must
                         // not write k, v, mask or lengths, has ended
};

/// The gradients of q, k, v from the gradient of o: `f` is the forward's problem, whose results o
/// and lse are read. dq like q, dk and dv like k; each sum has a fixed order. The mask gets no
/// gradient.
struct SdpaBackward {
  Sdpa f;
  Tensor d_o, dq, dk, dv;
};

std::span<const KernelRow<Sdpa>> sdpa_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const Sdpa& p);
std::size_t sdpa_workspace(const Sdpa& p);
Status sdpa(const Sdpa& p, const char* kernel, Workspace workspace, Stream stream);

std::span<const KernelRow<SdpaBackward>> sdpa_backward_rows();
std::size_t sdpa_backward_workspace(const SdpaBackward& p);
Status sdpa_backward(const SdpaBackward& p, const char* kernel, Workspace workspace, Stream stream);

}  // namespace rm::cuda_ops
