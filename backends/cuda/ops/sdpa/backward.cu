// The gradient table of sdpa: checks, choice and launches.
#include "sdpa/common.hpp"
#include "sdpa/kernels/sdpa_backward_naive_any.cuh"

namespace rm::cuda_ops {
namespace {

SdpaGradArgs grad_args(const SdpaBackward& p, Workspace workspace) {
  SdpaGradArgs a{};
  a.f = args_of(p.f);
  a.d_o = p.d_o.data, a.dq = p.dq.data, a.dk = p.dk.data, a.dv = p.dv.data;
  a.delta = static_cast<float*>(workspace.data);
  a.d_o_batch = p.d_o.stride[0], a.d_o_head = p.d_o.stride[1], a.d_o_row = p.d_o.stride[2];
  a.dq_batch = p.dq.stride[0], a.dq_head = p.dq.stride[1], a.dq_row = p.dq.stride[2];
  a.dk_batch = p.dk.stride[0], a.dk_head = p.dk.stride[1], a.dk_row = p.dk.stride[2];
  a.dv_batch = p.dv.stride[0], a.dv_head = p.dv.stride[1], a.dv_row = p.dv.stride[2];
  return a;
}

Status launch_naive(const SdpaBackward& p, Workspace workspace, Stream stream) {
  const SdpaGradArgs a = grad_args(p, workspace);
  const auto blocks = [](std::int64_t rows) {
    return static_cast<unsigned>(std::min<std::int64_t>(ceil_div(rows, 4), 1 << 20));
  };
  const std::int64_t q_rows = static_cast<std::int64_t>(a.f.batch) * a.f.heads * a.f.rows,
                     k_rows = static_cast<std::int64_t>(a.f.batch) * a.f.groups * a.f.keys;
  return dispatch_float(p.f.q.dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    if (q_rows > 0) {
      sdpa_backward_naive_q<T><<<blocks(q_rows), 128, 0, stream>>>(a);
      if (Status s = launch_status("sdpa"); !s) return s;
    }
    if (k_rows == 0) return {};
    sdpa_backward_naive_k<T><<<blocks(k_rows), 128, 0, stream>>>(a);
    return launch_status("sdpa");
  });
}

double flops(const SdpaBackward& p) {
  return 10.0 * static_cast<double>(numel(p.f.q)) * static_cast<double>(p.f.k.shape[2]);
}

constexpr KernelRow<SdpaBackward> kRows[] = {
    {"sdpa_backward_naive_any", "any problem with D <= 512",
     [](const SdpaBackward&) -> const char* { return nullptr; },
     [](const SdpaBackward& p) { return 20 + flops(p) / 1e6; }, launch_naive},
};

Status check(const SdpaBackward& p) {
  if (Status s = check_sdpa(p.f); !s) return s;
  if (p.f.lse == nullptr) return invalid("[sdpa] expected the forward's lse, got none");
  const std::pair<const char*, const Tensor*> all[] = {
      {"d_o", &p.d_o}, {"dq", &p.dq}, {"dk", &p.dk}, {"dv", &p.dv}};
  for (const auto& [what, t] : all) {
    const bool key = t == &p.dk || t == &p.dv;
    if (Status s = check_sdpa_tensor(what, *t, p.f, key); !s) return s;
  }
  return {};
}

}  // namespace

std::span<const KernelRow<SdpaBackward>> sdpa_backward_rows() { return kRows; }

std::size_t sdpa_backward_workspace(const SdpaBackward& p) {
  if (p.f.q.rank != 4) return 0;
  return static_cast<std::size_t>(p.f.q.shape[0] * p.f.q.shape[1] * p.f.q.shape[2]) * 4;
}

Status sdpa_backward(const SdpaBackward& p, const char* kernel, Workspace workspace,
                     Stream stream) {
  if (Status s = check(p); !s) return s;
  if (numel(p.dq) == 0 && numel(p.dk) == 0) return {};
  if (const std::size_t wanted = sdpa_backward_workspace(p); workspace.bytes < wanted) {
    return invalid("[sdpa] expected a workspace of " + std::to_string(wanted) + " bytes, got " +
                   std::to_string(workspace.bytes) + "; try backward_workspace()");
  }
  const KernelRow<SdpaBackward>* row = nullptr;
  if (Status s = select_row<SdpaBackward>("sdpa", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, workspace, stream);
}

}  // namespace rm::cuda_ops
