// The gradient table of cross entropy: checks, choice and launches.
#include "_shim/alias_shim.hpp"
#include "cross_entropy/common.hpp"
#include "cross_entropy/kernels/cross_entropy_online_sm80.cuh"

namespace rm::cuda_ops {
namespace {

template <bool kVector>
Status launch(const CrossEntropyBackward& p, Workspace, Stream stream) {
  CrossEntropyArgs a{};
  const Rows x = rows_of(p.logits);
  const Split s = split_vocabulary(x.rows, x.n);
  a.logits = p.logits.data, a.target = static_cast<const std::int64_t*>(p.target.data);
  a.lse = static_cast<float*>(p.lse.data), a.dloss = static_cast<const float*>(p.dloss.data);
  a.dlogits = p.dlogits.data, a.out_pitch = rows_of(p.dlogits).pitch;
  a.rows = x.rows, a.pitch = x.pitch, a.n = x.n, a.ignore_index = p.ignore_index;
  a.chunks = s.chunks, a.chunk = s.chunk;
  const dim3 grid(static_cast<unsigned>(s.chunks),
                  static_cast<unsigned>(std::min<std::int64_t>(x.rows, 65535)));
  dispatch_float(p.logits.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    cross_entropy_backward_chunks<T, kVector><<<grid, 256, 0, stream>>>(a);
  });
  return launch_status("cross_entropy");
}

double cost(const CrossEntropyBackward& p) {
  return move_us(2.0 * static_cast<double>(numel(p.logits)) * size_of(p.logits.dtype));
}

constexpr KernelRow<CrossEntropyBackward> kRows[] = {
    {"cross_entropy_online_sm80", "rows that begin at 16 bytes",
     [](const CrossEntropyBackward& p) {
       return cross_entropy_vector_why_not({&p.logits, &p.dlogits});
     },
     cost, launch<true>},
    {"cross_entropy_naive_any", "any row",
     [](const CrossEntropyBackward&) -> const char* { return nullptr; },
     [](const CrossEntropyBackward& p) { return 4 * cost(p); }, launch<false>},
};

}  // namespace

std::span<const KernelRow<CrossEntropyBackward>> cross_entropy_backward_rows() { return kRows; }

Status legal(const CrossEntropyBackward& p) {
  if (Status s = check_logits("logits", p.logits, p.logits); !s) return s;
  if (Status s = check_logits("dlogits", p.dlogits, p.logits); !s) return s;
  if (Status s = check_per_row("target", p.target, DType::i64, p.logits); !s) return s;
  if (Status s = check_per_row("lse", p.lse, DType::f32, p.logits); !s) return s;
  if (Status s = check_per_row("dloss", p.dloss, DType::f32, p.logits); !s) return s;
  return check_memory("cross_entropy", {{"dlogits", &p.dlogits, true}},
                              {{"logits", &p.logits, true},
                               {"target", &p.target},
                               {"lse", &p.lse},
                               {"dloss", &p.dloss}});
}

Status cross_entropy_backward(const CrossEntropyBackward& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (numel(p.logits) == 0) return {};
  const KernelRow<CrossEntropyBackward>* row = nullptr;
  if (Status s = select_row<CrossEntropyBackward>("cross_entropy", kRows, p, kernel, &row); !s)
    return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
