// The two rows that cuBLASLt runs. It computes in columns: c's transpose is op(b)^T op(a)^T, and a
// row-major matrix is a column-major one transposed, so b is its first operand and nothing moves.
#include <algorithm>

#include "gemm/common.hpp"

namespace rm::cuda_ops {
namespace {

std::int32_t alignment_of(const void* p) {
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  return address == 0
             ? 256
             : static_cast<std::int32_t>(std::min<std::uintptr_t>(address & -address, 256));
}

LibraryProduct product_of(const Gemm& p, const GemmShape& s, std::int32_t epilogue,
                          std::size_t workspace_bytes) {
  LibraryProduct q{};
  q.rows = s.n, q.columns = s.m, q.depth = s.k, q.batch = s.batch;
  q.a_pitch = s.b.pitch, q.b_pitch = s.a.pitch, q.d_pitch = q.c_pitch = s.c.pitch;
  q.a_batch = s.b.batch_stride, q.b_batch = s.a.batch_stride;
  q.d_batch = q.c_batch = s.c.batch_stride;
  q.trans_a = p.trans_b, q.trans_b = p.trans_a, q.tf32 = p.tf32, q.epilogue = epilogue;
  q.dtype = static_cast<std::int32_t>(p.c.dtype);
  q.workspace_bytes = static_cast<std::int64_t>(std::min(workspace_bytes, kLibraryWorkspace));
  const void *c = p.c.data, *aux = nullptr;
  if (s.epilogue.residual) {
    const Matrix r = matrix_of(*s.epilogue.residual);
    q.add_c = 1, q.c_pitch = r.pitch, q.c_batch = s.batch == 1 ? 0 : r.batch_stride;
    c = s.epilogue.residual->data;
  }
  if (epilogue & 128) {
    const Matrix x = matrix_of(*s.epilogue.aux);
    q.aux_pitch = x.pitch, q.aux_batch = s.batch == 1 ? 0 : x.batch_stride;
    aux = s.epilogue.aux->data;
  }
  const void* pointers[] = {p.b.data, p.a.data, c, p.c.data, aux};
  for (int i = 0; i < 5; ++i) q.alignment[i] = alignment_of(pointers[i]);
  q.alignment[5] =
      alignment_of(epilogue & kBias && s.epilogue.bias ? s.epilogue.bias->data : nullptr);
  q.device = std::max(0, card().device);
  return q;
}

LibraryOperands operands_of(const Gemm& p, const GemmShape& s) {
  LibraryOperands o{};
  o.a = p.b.data, o.b = p.a.data, o.d = p.c.data, o.alpha = s.epilogue.scale;
  if (s.epilogue.residual) o.c = s.epilogue.residual->data;
  if (s.epilogue.bias) o.bias = s.epilogue.bias->data;
  if (s.epilogue.aux) o.aux = s.epilogue.aux->data;
  return o;
}

const char* plan_why_not(const Gemm& p, std::int32_t epilogue) {
  if (p.library == nullptr) return "no library was given";
  if (const char* why = p.library->why_not()) return why;
  const GemmShape s = gemm_shape(p);
  if (s.k == 0) return "the product sums over nothing";
  if (s.m > 0x7fffffff || s.n > 0x7fffffff || s.k > 0x7fffffff || s.batch > 0x7fffffff) {
    return "an axis is longer than 2^31";
  }
  return p.library->plan(product_of(p, s, epilogue, p.workspace_bytes), 0);
}

}  // namespace

std::int32_t library_epilogue(const Gemm& p) {
  const Epilogue& e = p.epilogue;
  const bool bias = e.bias_kind == BiasKind::column;
  if (e.bias_kind != BiasKind::none && !bias) return 0;
  if (e.aux && e.activation != Activation::gelu_tanh) return 0;
  if (e.residual && e.activation != Activation::none) return 0;  // it would come before it
  switch (e.activation) {
    case Activation::none:
      return bias ? kBias : kPlain;
    case Activation::relu:
      return bias ? kReluBias : kRelu;
    case Activation::gelu_tanh:
      if (e.aux) return bias ? kGeluAuxBias : kGeluAux;
      return bias ? kGeluBias : kGelu;
    default:
      return 0;
  }
}

const char* library_why_not(const Gemm& p) {
  const std::int32_t epilogue = library_epilogue(p);
  if (epilogue == 0) return "cuBLASLt has no such epilogue";
  if (epilogue & 128 && matrix_of(*p.epilogue.aux).pitch % 8 != 0) {
    return "cuBLASLt wants rows of aux in multiples of 8";
  }
  const Epilogue& e = p.epilogue;
  if ((e.bias && !is_aligned(e.bias->data, 0, e.bias->dtype, 16)) ||
      (e.aux && !is_aligned(e.aux->data, 0, e.aux->dtype, 16))) {
    return "cuBLASLt reads bias and aux in vectors of 16 bytes, wherever they lie";
  }
  return plan_why_not(p, epilogue);
}

const char* library_ewise_why_not(const Gemm& p) {
  if (p.epilogue.residual && p.epilogue.residual->data == p.c.data) {
    return "the residual is c itself, which the product would overwrite";
  }
  Gemm plain = p;
  plain.epilogue = {};
  return plan_why_not(plain, kPlain);
}

Status launch_library(const Gemm& p, Workspace workspace, Stream stream) {
  const GemmShape s = gemm_shape(p);
  const LibraryProduct q = product_of(p, s, library_epilogue(p), workspace.bytes);
  return p.library->run(q, operands_of(p, s), workspace, stream, p.tune);
}

Status launch_library_ewise(const Gemm& p, Workspace workspace, Stream stream) {
  Gemm plain = p;
  plain.epilogue = {};
  const GemmShape s = gemm_shape(plain);
  const LibraryProduct q = product_of(plain, s, kPlain, workspace.bytes);
  if (Status done = p.library->run(q, operands_of(plain, s), workspace, stream, p.tune); !done) {
    return done;
  }
  return launch_epilogue(p, stream);
}

}  // namespace rm::cuda_ops
