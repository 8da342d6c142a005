// The gradient table of sdpa: checks, choice and launches.
#include <tuple>

#include "_shim/alias_shim.hpp"
#include "_shim/launch_shim.hpp"
#include "sdpa/common.hpp"
#include "sdpa/kernels/sdpa_backward_f32_sm80.cuh"
#include "sdpa/kernels/sdpa_backward_naive_any.cuh"
#include "sdpa/kernels/sdpa_backward_tiles_any.cuh"
#include "sdpa/kernels/sdpa_backward_wgmma_sm90a.cuh"
#include "sdpa/tensor_map.hpp"

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

template <class T, bool kVectors>
Status launch_statistics(const SdpaGradArgs& a, Stream stream) {
  const std::int64_t rows =
      static_cast<std::int64_t>(a.f.batch) * a.f.heads * grad_padded(a.f.rows);
  if (rows == 0) return {};
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(ceil_div(rows, 4), 1 << 20));
  sdpa_backward_statistics<T, kVectors><<<blocks, 128, 0, stream>>>(a);
  return launch_status("sdpa");
}

template <class T, int kD, bool kQueries>
Status launch_tiles_part(const SdpaGradArgs& a, Stream stream) {
  using Shape = GradTilesShape<kD>;
  const int rows = kQueries ? a.f.rows : a.f.keys;
  if (rows == 0) return {};
  auto* kernel = sdpa_backward_tiles<T, kD, kQueries>;
  if (Status s = allow_shared_memory("sdpa", kernel, Shape::kMemory); !s) return s;
  const dim3 grid(static_cast<unsigned>(ceil_div(rows, Shape::kRows)),
                  static_cast<unsigned>(a.f.batch * (kQueries ? a.f.heads : a.f.groups)));
  kernel<<<grid, Shape::kThreads, Shape::kMemory, stream>>>(a);
  return launch_status("sdpa");
}

template <class T, int kD>
Status launch_tiles_dim(const SdpaGradArgs& a, Stream stream) {
  if (Status s = launch_statistics<T, false>(a, stream); !s) return s;
  if (Status s = launch_tiles_part<T, kD, true>(a, stream); !s) return s;
  return launch_tiles_part<T, kD, false>(a, stream);
}

Status launch_tiles(const SdpaBackward& p, Workspace workspace, Stream stream) {
  SdpaGradArgs a = grad_args(p, workspace);
  a.vectors = a.f.dim * size_of(p.f.q.dtype) % 16 == 0;
  for (const Tensor* t : {&p.f.q, &p.f.k, &p.f.v, &p.d_o}) a.vectors &= rows_aligned(*t);
  return dispatch_float(p.f.q.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (a.f.dim <= 128) return launch_tiles_dim<T, 128>(a, stream);
    return launch_tiles_dim<T, 256>(a, stream);
  });
}

template <int kD, bool kQueries>
Status launch_f32_part(const SdpaGradArgs& a, Stream stream) {
  using Shape = GradF32Shape<kD>;
  const int rows = kQueries ? a.f.rows : a.f.keys;
  if (rows == 0) return {};
  auto* kernel = sdpa_backward_f32<kD, kQueries>;
  if (Status s = allow_shared_memory("sdpa", kernel, Shape::kMemory); !s) return s;
  const dim3 grid(static_cast<unsigned>(ceil_div(rows, Shape::kRows)),
                  static_cast<unsigned>(a.f.batch * (kQueries ? a.f.heads : a.f.groups)));
  kernel<<<grid, Shape::kThreads, Shape::kMemory, stream>>>(a);
  return launch_status("sdpa");
}

template <int kD>
Status launch_f32_dim(const SdpaGradArgs& a, Stream stream) {
  if (Status s = launch_statistics<float, false>(a, stream); !s) return s;
  if (Status s = launch_f32_part<kD, true>(a, stream); !s) return s;
  return launch_f32_part<kD, false>(a, stream);
}

Status launch_f32(const SdpaBackward& p, Workspace workspace, Stream stream) {
  const SdpaGradArgs a = grad_args(p, workspace);
  return a.f.dim <= 64 ? launch_f32_dim<64>(a, stream) : launch_f32_dim<128>(a, stream);
}

template <class T, int kD, GradPart kPart>
Status launch_part(const SdpaGradArgs& a, const GradMaps& maps, Stream stream) {
  using Shape = GradShape<kD, kPart>;
  constexpr bool kQueries = kPart == GradPart::queries;
  auto* kernel = sdpa_backward_wgmma<T, kD, kPart>;
  if (Status s = allow_shared_memory("sdpa", kernel, Shape::kMemory); !s) return s;
  const dim3 grid(static_cast<unsigned>(ceil_div(kQueries ? a.f.rows : a.f.keys, Shape::kRows)),
                  static_cast<unsigned>(a.f.batch * (kQueries ? a.f.heads : a.f.groups)));
  return launch("sdpa", kernel, {grid, Shape::kThreads, Shape::kMemory, 1, !kQueries}, stream, a,
                maps);
}

template <class T, int kD>
Status launch_wgmma_dim(const SdpaBackward& p, const SdpaGradArgs& a, Stream stream) {
  using Queries = GradShape<kD, GradPart::queries>;
  using Keys = GradShape<kD, GradPart::keys>;
  GradMaps of_queries, of_keys;
  const std::tuple<const Tensor*, int, CUtensorMap*> all[] = {
      {&p.f.q, Queries::kRows, &of_queries.rows_1},  {&p.d_o, Queries::kRows, &of_queries.rows_2},
      {&p.f.k, Queries::kTile, &of_queries.tiles_1}, {&p.f.v, Queries::kTile, &of_queries.tiles_2},
      {&p.f.k, Keys::kRows, &of_keys.rows_1},        {&p.f.v, Keys::kRows, &of_keys.rows_2},
      {&p.f.q, Keys::kTile, &of_keys.tiles_1},       {&p.d_o, Keys::kTile, &of_keys.tiles_2}};
  for (const auto& [tensor, count, map] : all) {
    if (Status s = encode_tiles(*tensor, count, map); !s) return s;
  }
  if (Status s = launch_statistics<T, true>(a, stream); !s) return s;
  if (Status s = launch_part<T, kD, GradPart::queries>(a, of_queries, stream); !s) return s;
  if constexpr (kD <= 128) {
    return launch_part<T, kD, GradPart::keys>(a, of_keys, stream);
  } else {
    if (Status s = launch_part<T, kD, GradPart::dk>(a, of_keys, stream); !s) return s;
    return launch_part<T, kD, GradPart::dv>(a, of_keys, stream);
  }
}

Status launch_wgmma(const SdpaBackward& p, Workspace workspace, Stream stream) {
  const SdpaGradArgs a = grad_args(p, workspace);
  return with_type(p.f, [&](auto type) {
    using T = typename decltype(type)::type;
    if (a.f.dim <= 64) return launch_wgmma_dim<T, 64>(p, a, stream);
    if (a.f.dim <= 128) return launch_wgmma_dim<T, 128>(p, a, stream);
    return launch_wgmma_dim<T, 256>(p, a, stream);
  });
}

const char* plain_tiles_why_not(const SdpaBackward& p) {
  if (p.f.q.shape[3] > 256) return "the head dim is above 256";
  if (p.f.q.shape[0] * p.f.q.shape[1] > 65535) return "more than 65535 heads";
  return shared_why_not(p.f.q.shape[3] <= 128 ? GradTilesShape<128>::kMemory
                                              : GradTilesShape<256>::kMemory);
}

const char* f32_why_not(const SdpaBackward& p) {
  if (const char* why = sm80_why_not()) return why;
  if (p.f.q.dtype != DType::f32) return "not float32";
  if (p.f.q.shape[3] > 128 || p.f.q.shape[3] % 4 != 0) {
    return "the head dim is not a multiple of 4 up to 128";
  }
  for (const Tensor* t : {&p.f.q, &p.f.k, &p.f.v, &p.d_o}) {
    if (!rows_aligned(*t)) return "rows are not 16-byte aligned";
  }
  if (p.f.q.shape[0] * p.f.q.shape[1] > 65535) return "more than 65535 heads";
  return shared_why_not(p.f.q.shape[3] <= 64 ? GradF32Shape<64>::kMemory
                                             : GradF32Shape<128>::kMemory);
}

const char* wgmma_why_not(const SdpaBackward& p) {
  const Tensor& q = p.f.q;
  if (const char* why = sm90a_why_not()) return why;
  if (q.dtype == DType::f32) return "float32: the tensor cores would round it";
  if (q.shape[3] > 256 || q.shape[3] % 8 != 0) {
    return "the head dim is not a multiple of 8 up to 256";
  }
  if (q.shape[2] == 0 || p.f.k.shape[2] == 0) return "no queries or no keys";
  if (q.shape[0] * q.shape[1] > 65535) return "more than 65535 heads";
  for (const Tensor* t : {&q, &p.f.k, &p.f.v, &p.d_o}) {
    if (const char* why = tiles_why_not(*t)) return why;
  }
  for (const Tensor* t : {&p.f.o, &p.dq, &p.dk, &p.dv}) {
    if (!rows_aligned(*t)) return "rows are not 16-byte aligned";
  }
  return nullptr;
}

double flops(const SdpaBackward& p) {
  return 10.0 * static_cast<double>(numel(p.f.q)) * static_cast<double>(p.f.k.shape[2]);
}

constexpr KernelRow<SdpaBackward> kRows[] = {
    {"sdpa_backward_wgmma_sm90a", "bfloat16, float16; D <= 256", wgmma_why_not,
     [](const SdpaBackward& p) { return 20 + flops(p) / compute_rate(300e6); }, launch_wgmma},
    {"sdpa_backward_f32_sm80", "float32; D <= 128", f32_why_not,
     [](const SdpaBackward& p) { return 25 + flops(p) / compute_rate(40e6); }, launch_f32},
    {"sdpa_backward_tiles_any", "D <= 256, by multiply-adds", plain_tiles_why_not,
     [](const SdpaBackward& p) { return 25 + flops(p) / compute_rate(14e6); }, launch_tiles},
    {"sdpa_backward_naive_any", "any problem with D <= 512",
     [](const SdpaBackward&) -> const char* { return nullptr; },
     [](const SdpaBackward& p) { return 20 + flops(p) / compute_rate(1e6); }, launch_naive},
};

Status check(const SdpaBackward& p, const Workspace& workspace = {}) {
  if (Status s = check_sdpa(p.f); !s) return s;
  if (p.f.lse == nullptr) return invalid("[sdpa] expected the forward's lse, got none");
  const std::pair<const char*, const Tensor*> all[] = {
      {"d_o", &p.d_o}, {"dq", &p.dq}, {"dk", &p.dk}, {"dv", &p.dv}};
  for (const auto& [what, t] : all) {
    const bool key = t == &p.dk || t == &p.dv;
    if (Status s = check_sdpa_tensor(what, *t, p.f, key); !s) return s;
  }
  return check_memory("sdpa", {{"dq", &p.dq}, {"dk", &p.dk}, {"dv", &p.dv}},
                      {{"d_o", &p.d_o},
                       {"q", &p.f.q},
                       {"k", &p.f.k},
                       {"v", &p.f.v},
                       {"o", &p.f.o},
                       {"lse", p.f.lse},
                       {"mask", p.f.mask},
                       {"lengths", p.f.lengths}},
                      workspace);
}

}  // namespace

std::span<const KernelRow<SdpaBackward>> sdpa_backward_rows() { return kRows; }

Status legal(const SdpaBackward& p) { return check(p); }

std::size_t sdpa_backward_workspace(const SdpaBackward& p) {
  if (p.f.q.rank != 4) return 0;
  return static_cast<std::size_t>(p.f.q.shape[0] * p.f.q.shape[1]) *
         grad_padded(static_cast<int>(p.f.q.shape[2])) * 8;
}

Status sdpa_backward(const SdpaBackward& p, const char* kernel, Workspace workspace,
                     Stream stream) {
  if (Status s = check(p, workspace); !s) return s;
  if (numel(p.dq) == 0 && numel(p.dk) == 0) return {};
  if (Status s = check_workspace("sdpa", sdpa_backward_workspace(p), workspace); !s) return s;
  const KernelRow<SdpaBackward>* row = nullptr;
  if (Status s = select_row<SdpaBackward>("sdpa", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, workspace, stream);
}

}  // namespace rm::cuda_ops
