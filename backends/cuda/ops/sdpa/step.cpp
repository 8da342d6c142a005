// A step of decoding: its table and checks.
#include "_shim/alias_shim.hpp"
#include "sdpa/common.hpp"

namespace rm::cuda_ops {
namespace {

/// The tensors that a step reads besides the caches are read in words of so many bytes.
bool words_of(const SdpaStep& p, int bytes) {
  for (const Tensor* t : {&p.s.q, &p.k_new, &p.v_new, p.cos, p.sin}) {
    if (t == nullptr) continue;
    if (!is_aligned(t->data, 0, t->dtype, bytes)) return false;
    for (int d = 0; d < 2; ++d) {
      if (t->shape[d] > 1 && t->stride[d] * size_of(t->dtype) % bytes != 0) return false;
    }
  }
  return true;
}

const char* step_why_not(const SdpaStep& p) {
  const std::int64_t dim = p.s.q.shape[3];
  if (dim != 64 && dim != 128 && dim != 256) return "the head dim is not 64, 128 or 256";
  if (const char* why = decode_why_not(p.s)) return why;
  return words_of(p, 4) ? nullptr : "a row is not 4-byte aligned";
}

const char* step_f32_why_not(const SdpaStep& p) {
  const std::int64_t dim = p.s.q.shape[3];
  if (dim != 64 && dim != 128 && dim != 256) return "the head dim is not 64, 128 or 256";
  if (const char* why = decode_f32_why_not(p.s)) return why;
  return words_of(p, 16) ? nullptr : "a row is not 16-byte aligned";
}

/// Of the same step where every tensor begins on 16 bytes: other steps are as fast as the operators
/// that they are made of.
const char* elsewhere_why_not(const SdpaStep& given) {
  SdpaStep p = given;
  for (Tensor* t : {&p.s.q, &p.s.k, &p.s.v, &p.s.o, &p.k_new, &p.v_new}) t->data = nullptr;
  Tensor angles[2];
  for (const Tensor** t : {&p.cos, &p.sin}) {
    if (*t == nullptr) continue;
    Tensor& at = angles[t == &p.sin];
    at = **t, at.data = nullptr, *t = &at;
  }
  return p.s.q.dtype == DType::f32 ? step_f32_why_not(p) : step_why_not(p);
}

/// What decoding is asked for: keys up to the position, or all that the mask lets through.
Sdpa whole(const SdpaStep& p) {
  Sdpa s = p.s;
  if (p.ends) s.lengths = &p.position, s.lengths_are_last = true;
  s.overlap = p.overlap;
  return s;
}

SdpaStepArgs step_args(const SdpaStep& p) {
  SdpaStepArgs a{};
  a.k = p.k_new.data, a.v = p.v_new.data;
  if (p.cos) {
    a.cos = p.cos->data, a.sin = p.sin->data;
    a.cos_batch = p.cos->stride[0], a.sin_batch = p.sin->stride[0];
  }
  a.position = p.position.data, a.position_is_64 = p.position.dtype == DType::i64;
  a.k_cache = p.s.k.data, a.v_cache = p.s.v.data;
  a.k_batch = p.k_new.stride[0], a.k_head = p.k_new.stride[1];
  a.v_batch = p.v_new.stride[0], a.v_head = p.v_new.stride[1];
  return a;
}

Status launch_step(const SdpaStep& p, Workspace workspace, Stream stream) {
  return launch_decode_step(whole(p), step_args(p), p.stable_caches, workspace, stream);
}

Status launch_step_32(const SdpaStep& p, Workspace workspace, Stream stream) {
  return launch_step_f32(whole(p), step_args(p), p.stable_caches, workspace, stream);
}

constexpr KernelRow<SdpaStep> kRows[] = {
    {"sdpa_step_sm80", "bfloat16, float16; up to 16 query heads a key head; D = 64, 128, 256",
     step_why_not,
     [](const SdpaStep& p) {
       return 2 + move_us(static_cast<double>(numel(p.s.k)) * 2 * size_of(p.s.k.dtype));
     },
     launch_step},
    {"sdpa_step_f32_sm80", "float32; up to 16 query heads a key head; D = 64, 128, 256",
     step_f32_why_not,
     [](const SdpaStep& p) {
       return 2 + move_us(static_cast<double>(numel(p.s.k)) * 2 * size_of(p.s.k.dtype));
     },
     launch_step_32},
    {"sdpa_step_naive_any", "the same problems, wherever their tensors begin", elsewhere_why_not,
     [](const SdpaStep& p) {
       return 20 + static_cast<double>(p.s.k.shape[2] * p.s.k.shape[3]) / 100;
     },
     [](const SdpaStep& p, Workspace, Stream stream) {
       return launch_step_naive(whole(p), step_args(p), stream);
     }},
};

bool is_new_row(const Tensor& t, const SdpaStep& p) {
  const Tensor& k = p.s.k;
  return t.rank == 4 && t.dtype == k.dtype && t.shape[0] == k.shape[0] && t.shape[1] == k.shape[1] &&
         t.shape[2] == 1 && t.shape[3] == k.shape[3] && (t.shape[3] <= 1 || t.stride[3] == 1);
}

bool is_angles(const Tensor& t, const SdpaStep& p) {
  const Tensor& q = p.s.q;
  return t.rank == 4 && t.dtype == q.dtype && t.shape[0] == q.shape[0] &&
         (t.shape[1] == 1 || t.stride[1] == 0) && t.shape[2] == 1 && t.shape[3] == q.shape[3] &&
         (t.shape[3] <= 1 || t.stride[3] == 1);
}

Status wrong(const char* what) {
  return invalid(text_of({"[sdpa_step] expected ", what, ", got another"}));
}

}  // namespace

std::span<const KernelRow<SdpaStep>> sdpa_step_rows() { return kRows; }

Status legal(const SdpaStep& p) {
  if (Status s = check_sdpa(p.s); !s) return s;
  if (p.s.lengths || p.s.lse || p.s.causal) return wrong("no lengths, lse or causality");
  if (p.s.q.shape[2] != 1) return wrong("one query a head");
  if (!is_new_row(p.k_new, p) || !is_new_row(p.v_new, p)) {
    return wrong("a new key and value [B, G, 1, D] with a dense last axis");
  }
  if ((p.cos == nullptr) != (p.sin == nullptr)) return wrong("cos and sin, or none of them");
  if (p.cos && (!is_angles(*p.cos, p) || !is_angles(*p.sin, p))) {
    return wrong("cos and sin [B, 1, 1, D] of q's dtype with a dense last axis");
  }
  if (p.position.rank != 1 || p.position.shape[0] != 1 ||
      (p.position.dtype != DType::i32 && p.position.dtype != DType::i64)) {
    return wrong("a position [1] of int32 or int64");
  }
  return check_memory("sdpa_step", {{"o", &p.s.o}, {"k", &p.s.k}, {"v", &p.s.v}},
                      {{"q", &p.s.q},
                       {"k_new", &p.k_new},
                       {"v_new", &p.v_new},
                       {"cos", p.cos},
                       {"sin", p.sin},
                       {"mask", p.s.mask},
                       {"position", &p.position}});
}

std::size_t sdpa_step_workspace(const SdpaStep& p) {
  if (numel(p.s.q) == 0) return 0;
  const bool is_f32 = p.s.q.dtype == DType::f32;
  return (is_f32 ? step_f32_why_not(p) : step_why_not(p)) != nullptr ? 0 : decode_workspace(p.s);
}

Status sdpa_step(const SdpaStep& p, const char* kernel, Workspace workspace, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (Status s = check_workspace("sdpa_step", sdpa_step_workspace(p), workspace); !s) return s;
  if (numel(p.s.o) == 0) return {};
  const KernelRow<SdpaStep>* row = nullptr;
  if (Status s = select_row<SdpaStep>("sdpa_step", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, workspace, stream);
}

}  // namespace rm::cuda_ops
