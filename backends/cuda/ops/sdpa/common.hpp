// What the files of sdpa share: the arguments of a problem, alignment, the gradient's and Hopper's
// rows.
#pragma once

#include "_shim/dispatch_shim.hpp"
#include "sdpa/api.hpp"
#include "sdpa/kernels/sdpa_args.hpp"

namespace rm::cuda_ops {

inline SdpaArgs args_of(const Sdpa& p) {
  SdpaArgs a{};
  a.q = p.q.data, a.k = p.k.data, a.v = p.v.data, a.o = p.o.data;
  a.q_batch = p.q.stride[0], a.q_head = p.q.stride[1], a.q_row = p.q.stride[2];
  a.k_batch = p.k.stride[0], a.k_head = p.k.stride[1], a.k_row = p.k.stride[2];
  a.v_batch = p.v.stride[0], a.v_head = p.v.stride[1], a.v_row = p.v.stride[2];
  a.o_batch = p.o.stride[0], a.o_head = p.o.stride[1], a.o_row = p.o.stride[2];
  a.batch = static_cast<int>(p.q.shape[0]), a.heads = static_cast<int>(p.q.shape[1]);
  a.rows = static_cast<int>(p.q.shape[2]), a.dim = static_cast<int>(p.q.shape[3]);
  a.groups = static_cast<int>(p.k.shape[1]), a.keys = static_cast<int>(p.k.shape[2]);
  a.ratio = a.groups ? a.heads / a.groups : 1;
  if (p.mask) {
    a.mask = p.mask->data, a.mask_is_bool = p.mask->dtype == DType::boolean;
    a.mask_batch = p.mask->stride[0], a.mask_head = p.mask->stride[1];
    a.mask_row = p.mask->stride[2], a.mask_column = p.mask->stride[3];
  }
  if (p.lengths) {
    a.lengths = p.lengths->data, a.lengths_are_64 = p.lengths->dtype == DType::i64;
    a.lengths_step = p.lengths->shape[0] == 1 ? 0 : 1, a.lengths_more = p.lengths_are_last ? 1 : 0;
  }
  if (p.lse) a.lse = static_cast<float*>(p.lse->data);
  a.causal = p.causal, a.causal_offset = p.causal_offset, a.scale = p.scale, a.splits = 1;
  return a;
}

inline bool rows_aligned(const Tensor& t) {
  bool ok = reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
  for (int d = 0; d < 3; ++d)
    ok = ok && (t.shape[d] <= 1 || t.stride[d] * size_of(t.dtype) % 16 == 0);
  return ok;
}

template <class Fn>
Status with_type(const Sdpa& p, Fn&& fn) {
  return p.q.dtype == DType::bf16 ? fn(Type<__nv_bfloat16>{}) : fn(Type<__half>{});
}

/// What forward and backward check alike: shapes, dtypes, mask, lengths, lse.
Status check_sdpa(const Sdpa& p);
Status check_sdpa_tensor(const char* what, const Tensor& t, const Sdpa& p, bool key);

/// What all rows on tensor cores ask for: 16-bit floats, a head dim up to `longest`, aligned rows.
const char* tensor_why_not(const Sdpa& p, int longest);

/// Rows that few queries take, and the bytes that their blocks leave for each other.
const char* decode_why_not(const Sdpa& p);
const char* decode_f32_why_not(const Sdpa& p);
Status launch_decode(const Sdpa& p, Workspace, Stream stream);
Status launch_decode_f32(const Sdpa& p, Workspace, Stream stream);
std::size_t decode_workspace(const Sdpa& p);
Status launch_decode_step(const Sdpa& p, const SdpaStepArgs& step, bool stable_caches, Workspace,
                          Stream stream);
Status launch_step_f32(const Sdpa& p, const SdpaStepArgs& step, bool stable_caches, Workspace, Stream stream);
Status launch_step_naive(const Sdpa& p, const SdpaStepArgs& step, Stream stream);

const char* short_why_not(const Sdpa& p);
double short_us(const Sdpa& p);
Status launch_short(const Sdpa& p, Workspace, Stream stream);

const char* wgmma_why_not(const Sdpa& p);
Status launch_wgmma(const Sdpa& p, Workspace, Stream stream);

}  // namespace rm::cuda_ops
