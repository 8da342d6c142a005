// The forward table of cross entropy: checks, choice and launches.
#include "_shim/alias_shim.hpp"
#include "cross_entropy/common.hpp"
#include "cross_entropy/kernels/cross_entropy_online_sm80.cuh"

namespace rm::cuda_ops {
namespace {

template <bool kVector>
Status launch(const CrossEntropyForward& p, Workspace workspace, Stream stream) {
  CrossEntropyArgs a{};
  const Rows x = rows_of(p.logits);
  const Split s = split_vocabulary(x.rows, x.n);
  a.logits = p.logits.data, a.target = static_cast<const std::int64_t*>(p.target.data);
  a.loss = static_cast<float*>(p.loss.data), a.lse = static_cast<float*>(p.lse.data);
  a.partial = static_cast<float*>(workspace.data);
  a.rows = x.rows, a.pitch = x.pitch, a.n = x.n, a.ignore_index = p.ignore_index;
  a.chunks = s.chunks, a.chunk = s.chunk;
  const dim3 grid(static_cast<unsigned>(s.chunks),
                  static_cast<unsigned>(std::min<std::int64_t>(x.rows, 65535)));
  dispatch_float(p.logits.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    cross_entropy_chunks<T, kVector><<<grid, 256, 0, stream>>>(a);
    cross_entropy_join<T><<<static_cast<unsigned>(ceil_div(x.rows, 128)), 128, 0, stream>>>(a);
  });
  return launch_status("cross_entropy");
}

double cost(const CrossEntropyForward& p) {
  return 2 + move_us(static_cast<double>(numel(p.logits)) * size_of(p.logits.dtype));
}

constexpr KernelRow<CrossEntropyForward> kRows[] = {
    {"cross_entropy_online_sm80", "rows that begin at 16 bytes",
     [](const CrossEntropyForward& p) { return cross_entropy_vector_why_not({&p.logits}); }, cost,
     launch<true>},
    {"cross_entropy_naive_any", "any row",
     [](const CrossEntropyForward&) -> const char* { return nullptr; },
     [](const CrossEntropyForward& p) { return 4 * cost(p); }, launch<false>},
};

/// All but the workspace's size.
Status check(const CrossEntropyForward& p, Workspace workspace = {}) {
  if (Status s = check_logits("logits", p.logits, p.logits); !s) return s;
  if (Status s = check_per_row("target", p.target, DType::i64, p.logits); !s) return s;
  if (Status s = check_per_row("loss", p.loss, DType::f32, p.logits); !s) return s;
  if (Status s = check_per_row("lse", p.lse, DType::f32, p.logits); !s) return s;
  return check_memory("cross_entropy", {{"loss", &p.loss}, {"lse", &p.lse}},
                      {{"logits", &p.logits}, {"target", &p.target}}, workspace);
}

}  // namespace

std::span<const KernelRow<CrossEntropyForward>> cross_entropy_forward_rows() { return kRows; }

Status legal(const CrossEntropyForward& p) { return check(p); }

std::size_t cross_entropy_workspace(const CrossEntropyForward& p) {
  if (p.logits.rank != 2) return 0;
  const std::int64_t rows = p.logits.shape[0];
  return static_cast<std::size_t>(rows * split_vocabulary(rows, p.logits.shape[1]).chunks) * 8;
}

Status cross_entropy_forward(const CrossEntropyForward& p, const char* kernel, Workspace workspace,
                             Stream stream) {
  if (Status s = check(p, workspace); !s) return s;
  if (Status s = check_workspace("cross_entropy", cross_entropy_workspace(p), workspace,
                                 "forward_workspace()");
      !s) {
    return s;
  }
  if (p.logits.shape[0] == 0) return {};
  const KernelRow<CrossEntropyForward>* row = nullptr;
  if (Status s = select_row<CrossEntropyForward>("cross_entropy", kRows, p, kernel, &row); !s)
    return s;
  return row->launch(p, workspace, stream);
}

}  // namespace rm::cuda_ops
