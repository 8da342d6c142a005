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
  const Tensor* lengths = nullptr;  // [B] or [1] int32 or int64: keys of each batch
  bool lengths_are_last = false;    // they name the last key that is seen
  const Tensor* lse = nullptr;  // result [B, H, S] float32, dense: log-sum-exp, -inf without keys
  float scale = 1.0f;
  bool causal = false;
  std::int64_t causal_offset = 0;
  bool overlap = false;  // decoding may start before the stream's previous kernel has ended; it
                         // reads nothing before that
};

/// A step of decoding in one launch, S = 1: q and the new key are rotated by halves (y = x cos +
/// [-x2, x1] sin) where angles are given, key and value are written into the caches k and v at `position`, and q attends to
/// what the caches then hold, up to `position` where `ends`. A position outside writes nothing.
struct SdpaStep {
  Sdpa s;                  // lengths and lse absent, not causal
  Tensor k_new, v_new;     // [B, G, 1, D]
  const Tensor *cos = nullptr, *sin = nullptr;  // [B, 1, 1, D] by strides; both or none
  Tensor position;         // [1] int32 or int64
  bool ends = false;
  bool overlap = false;    // as in Sdpa
  bool stable_caches = false;  // with overlap: rows of the caches but the position's may be read
                               // early; what wrote them is behind something that started only after
                               // all before it had ended, and nothing since has
};

std::span<const KernelRow<SdpaStep>> sdpa_step_rows();
Status legal(const SdpaStep& p);
std::size_t sdpa_step_workspace(const SdpaStep& p);
Status sdpa_step(const SdpaStep& p, const char* kernel, Workspace workspace, Stream stream);

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
Status legal(const SdpaBackward& p);
std::size_t sdpa_backward_workspace(const SdpaBackward& p);
Status sdpa_backward(const SdpaBackward& p, const char* kernel, Workspace workspace, Stream stream);

}  // namespace rm::cuda_ops
