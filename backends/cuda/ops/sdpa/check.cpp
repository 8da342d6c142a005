// What a legal problem of sdpa is.
#include "sdpa/common.hpp"

namespace rm::cuda_ops {

Status check_sdpa_tensor(const char* what, const Tensor& t, const Sdpa& p, bool key) {
  const bool ok = t.rank == 4 && t.dtype == p.q.dtype && t.shape[0] == p.q.shape[0] &&
                  t.shape[3] == p.q.shape[3] && (t.shape[3] <= 1 || t.stride[3] == 1) &&
                  (key ? t.shape[2] == p.k.shape[2] && t.shape[1] == p.k.shape[1]
                       : t.shape[1] == p.q.shape[1] && t.shape[2] == p.q.shape[2]);
  if (ok) return {};
  return invalid(std::string("[sdpa] expected ") + what +
                 (key ? " [B, G, T, D]" : " [B, H, S, D]") + " of " + name_of(p.q.dtype) +
                 " with a dense last axis, got " + name_of(t.dtype) + " of rank " +
                 std::to_string(t.rank) + "; try matching q");
}

Status check_sdpa(const Sdpa& p) {
  if (p.q.rank != 4 || !is_float(p.q.dtype) || p.k.rank != 4) {
    return invalid("[sdpa] expected q, k, v of rank 4 in float32, bfloat16 or float16, got " +
                   std::string(name_of(p.q.dtype)) + " of rank " + std::to_string(p.q.rank));
  }
  const std::pair<const char*, const Tensor*> all[] = {
      {"q", &p.q}, {"k", &p.k}, {"v", &p.v}, {"o", &p.o}};
  for (const auto& [what, t] : all) {
    const bool key = t == &p.k || t == &p.v;
    if (Status s = check_sdpa_tensor(what, *t, p, key); !s) return s;
  }
  if (p.k.shape[1] == 0 ? p.q.shape[1] != 0 : p.q.shape[1] % p.k.shape[1] != 0) {
    return invalid("[sdpa] expected H a multiple of G, got " + std::to_string(p.q.shape[1]) +
                   " and " + std::to_string(p.k.shape[1]));
  }
  if (p.q.shape[3] > 512) return unsupported("[sdpa] expected a head dim up to 512, got more");
  if (p.mask &&
      (p.mask->rank != 4 || (p.mask->dtype != DType::boolean && p.mask->dtype != p.q.dtype) ||
       p.mask->shape[0] != p.q.shape[0] || p.mask->shape[1] != p.q.shape[1] ||
       p.mask->shape[2] != p.q.shape[2] || p.mask->shape[3] != p.k.shape[2])) {
    return invalid("[sdpa] expected mask [B, H, S, T] of bool or q's dtype, got " +
                   std::string(name_of(p.mask->dtype)) + " of rank " +
                   std::to_string(p.mask->rank) + "; try expand");
  }
  if (p.lengths && (p.lengths->rank != 1 ||
                    (p.lengths->shape[0] != p.q.shape[0] && p.lengths->shape[0] != 1) ||
                    (p.lengths->dtype != DType::i32 && p.lengths->dtype != DType::i64) ||
                    !is_contiguous(*p.lengths))) {
    return invalid("[sdpa] expected lengths [B] or [1] of int32 or int64, dense, got another");
  }
  if (p.lse && (p.lse->dtype != DType::f32 || !is_contiguous(*p.lse) ||
                numel(*p.lse) != p.q.shape[0] * p.q.shape[1] * p.q.shape[2])) {
    return invalid("[sdpa] expected lse [B, H, S] of float32, dense, got another");
  }
  return {};
}

}  // namespace rm::cuda_ops
