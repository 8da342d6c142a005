// The forward table of softmax: checks, choice and launches.
#include "_shim/alias_shim.hpp"
#include "softmax/common.hpp"
#include "softmax/kernels/softmax_naive_any.cuh"
#include "softmax/kernels/softmax_vector_sm80.cuh"

namespace rm::cuda_ops {
namespace {

SoftmaxArgs args_of(const SoftmaxForward& p) {
  const Rows x = rows_of(p.x);
  return {p.x.data, nullptr, p.y.data,           x.rows,
          x.pitch,  0,       rows_of(p.y).pitch, static_cast<int>(x.n)};
}

template <bool kLog>
Status launch_vector_kind(const SoftmaxForward& p, Stream stream) {
  const SoftmaxArgs a = args_of(p);
  const SoftmaxShape s = softmax_shape(a.rows, a.n, p.x.dtype, false);
  Status status;
  dispatch_float(p.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    dispatch_softmax(s, [&](auto warp, auto per) {
      status = launch_overlapped(
          "softmax", softmax_forward_vector<T, kLog, decltype(warp)::value, decltype(per)::value>,
          s.blocks, s.threads, 0, stream, a);
    });
  });
  return status;
}

Status launch_vector(const SoftmaxForward& p, Workspace, Stream stream) {
  return p.log ? launch_vector_kind<true>(p, stream) : launch_vector_kind<false>(p, stream);
}

Status launch_naive(const SoftmaxForward& p, Workspace, Stream stream) {
  const SoftmaxArgs a = args_of(p);
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(a.rows, 1 << 20));
  const int threads = a.n <= 256 ? 64 : a.n <= 8192 ? 256 : 1024;
  dispatch_float(p.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.log) {
      softmax_forward_naive<T, true><<<blocks, threads, 0, stream>>>(a);
    } else {
      softmax_forward_naive<T, false><<<blocks, threads, 0, stream>>>(a);
    }
  });
  return launch_status("softmax");
}

constexpr KernelRow<SoftmaxForward> kRows[] = {
    {"softmax_vector_sm80", "rows of whole 16-byte vectors up to 64 KiB",
     [](const SoftmaxForward& p) {
       return softmax_vector_why_not({&p.x, &p.y});
     },
     [](const SoftmaxForward& p) { return softmax_cost(p.x, 2); }, launch_vector},
    {"softmax_naive_any", "any row", [](const SoftmaxForward&) -> const char* { return nullptr; },
     [](const SoftmaxForward& p) { return 2 * softmax_cost(p.x, 4); }, launch_naive},
};

}  // namespace

std::span<const KernelRow<SoftmaxForward>> softmax_forward_rows() { return kRows; }

Status legal(const SoftmaxForward& p) {
  if (Status s = check_softmax("x", p.x, p.x); !s) return s;
  if (Status s = check_softmax("y", p.y, p.x); !s) return s;
  return check_memory("softmax", {{"y", &p.y, true}}, {{"x", &p.x, true}});
}

Status softmax_forward(const SoftmaxForward& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (numel(p.x) == 0) return {};
  const KernelRow<SoftmaxForward>* row = nullptr;
  if (Status s = select_row<SoftmaxForward>("softmax", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
