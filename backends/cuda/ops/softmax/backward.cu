// The gradient table of softmax: checks, choice and launches.
#include "_shim/alias_shim.hpp"
#include "softmax/common.hpp"
#include "softmax/kernels/softmax_naive_any.cuh"
#include "softmax/kernels/softmax_vector_sm80.cuh"

namespace rm::cuda_ops {
namespace {

SoftmaxArgs args_of(const SoftmaxBackward& p) {
  const Rows y = rows_of(p.y);
  return {p.y.data, p.dy.data,           p.dx.data,           y.rows,
          y.pitch,  rows_of(p.dy).pitch, rows_of(p.dx).pitch, static_cast<int>(y.n)};
}

template <bool kLog>
Status launch_vector_kind(const SoftmaxBackward& p, Stream stream) {
  const SoftmaxArgs a = args_of(p);
  const SoftmaxShape s = softmax_shape(a.rows, a.n, p.y.dtype, true);
  Status status;
  dispatch_float(p.y.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    dispatch_softmax(s, [&](auto warp, auto per) {
      if constexpr (decltype(per)::value <= 4) {
        status = launch_overlapped(
            "softmax",
            softmax_backward_vector<T, kLog, decltype(warp)::value, decltype(per)::value>, s.blocks,
            s.threads, 0, stream, a);
      }
    });
  });
  return status;
}

Status launch_vector(const SoftmaxBackward& p, Workspace, Stream stream) {
  return p.log ? launch_vector_kind<true>(p, stream) : launch_vector_kind<false>(p, stream);
}

Status launch_naive(const SoftmaxBackward& p, Workspace, Stream stream) {
  const SoftmaxArgs a = args_of(p);
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(a.rows, 1 << 20));
  const int threads = a.n <= 256 ? 64 : a.n <= 8192 ? 256 : 1024;
  dispatch_float(p.y.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.log) {
      softmax_backward_naive<T, true><<<blocks, threads, 0, stream>>>(a);
    } else {
      softmax_backward_naive<T, false><<<blocks, threads, 0, stream>>>(a);
    }
  });
  return launch_status("softmax");
}

/// Two rows live in registers here, so half of the forward's limit.
const char* vector_why_not(const SoftmaxBackward& p) {
  if (p.y.shape[p.y.rank - 1] * size_of(p.y.dtype) > 32 * 1024) {
    return "the rows do not fit a block's registers (32 KiB each)";
  }
  return softmax_vector_why_not({&p.y, &p.dy, &p.dx});
}

constexpr KernelRow<SoftmaxBackward> kRows[] = {
    {"softmax_vector_sm80", "rows of whole 16-byte vectors up to 32 KiB", vector_why_not,
     [](const SoftmaxBackward& p) { return softmax_cost(p.y, 3); }, launch_vector},
    {"softmax_naive_any", "any row", [](const SoftmaxBackward&) -> const char* { return nullptr; },
     [](const SoftmaxBackward& p) { return 2 * softmax_cost(p.y, 5); }, launch_naive},
};

}  // namespace

std::span<const KernelRow<SoftmaxBackward>> softmax_backward_rows() { return kRows; }

Status softmax_backward(const SoftmaxBackward& p, const char* kernel, Stream stream) {
  if (Status s = check_softmax("y", p.y, p.y); !s) return s;
  if (Status s = check_softmax("dy", p.dy, p.y); !s) return s;
  if (Status s = check_softmax("dx", p.dx, p.y); !s) return s;
  if (Status s =
          check_memory("softmax", {{"dx", &p.dx, true}}, {{"y", &p.y, true}, {"dy", &p.dy, true}});
      !s) {
    return s;
  }
  if (numel(p.y) == 0) return {};
  const KernelRow<SoftmaxBackward>* row = nullptr;
  if (Status s = select_row<SoftmaxBackward>("softmax", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
