// The tables of counting and cumsum: checks, choice and launches.
#include "_shim/alias_shim.hpp"
#include "counting/api.hpp"
#include "counting/kernels/counting_any.cuh"

namespace rm::cuda_ops {
namespace {

constexpr std::int64_t kFew = 32;  // elements that a thread goes through by itself

bool is_arg(Count kind) { return kind == Count::argmax || kind == Count::argmin; }
bool is_logic(Count kind) { return kind == Count::any || kind == Count::all; }

CountingArgs args_of(const Counting& p) {
  CountingArgs a{};
  a.x = p.x.data, a.y = p.y.data, a.from = p.x.dtype, a.to = p.y.dtype, a.kind = p.kind;
  Tensor kept = p.x, out = p.y, reduced = p.x;
  for (int d = 0; d < p.x.rank; ++d) {
    (p.y.shape[d] == p.x.shape[d] ? reduced : kept).shape[d] = 1;
  }
  a.kept = walk_of<2>({&kept, &out});
  a.reduced = walk_of<1>({&reduced});
  return a;
}

template <int kThreads>
Status launch_axes(const Counting& p, Workspace, Stream stream) {
  const CountingArgs a = args_of(p);
  const auto blocks = static_cast<unsigned>(
      std::min<std::int64_t>(ceil_div(a.kept.total, 256 / kThreads), 1 << 20));
  return launch_overlapped("counting", count_axes<kThreads>, blocks, 256, 0, stream, a);
}

CumsumArgs args_of(const Cumsum& p) {
  CumsumArgs a{};
  a.x = p.x.data, a.y = p.y.data, a.from = p.x.dtype;
  a.length = p.x.shape[p.axis];
  a.x_step = p.x.stride[p.axis], a.y_step = p.y.stride[p.axis];
  Tensor x = p.x, y = p.y;
  x.shape[p.axis] = y.shape[p.axis] = 1;
  a.lines = walk_of<2>({&x, &y});
  return a;
}

/// fn of what is summed in.
template <class Fn>
Status with_sum(DType t, Fn&& fn) {
  if (is_float(t)) return fn(Type<float>{});
  if (t == DType::f64) return fn(Type<double>{});
  return fn(Type<unsigned long long>{});
}

template <bool kBlocks>
Status launch_lines(const Cumsum& p, Workspace, Stream stream) {
  const CumsumArgs a = args_of(p);
  return with_sum(p.x.dtype, [&](auto type) {
    using S = typename decltype(type)::type;
    if constexpr (kBlocks) {
      const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(a.lines.total, 1 << 20));
      return launch_overlapped("cumsum", cumsum_blocks<S>, blocks, 256, 0, stream, a);
    } else {
      const auto blocks = static_cast<unsigned>(ceil_div(a.lines.total, 256));
      return launch_overlapped("cumsum", cumsum_threads<S>, blocks, 256, 0, stream, a);
    }
  });
}

double bytes_of(const Tensor& x, const Tensor& y) {
  return static_cast<double>(numel(x)) * size_of(x.dtype) +
         static_cast<double>(numel(y)) * size_of(y.dtype);
}

std::int64_t reduced_elements(const Counting& p) {
  return numel(p.x) / std::max<std::int64_t>(1, numel(p.y));
}

constexpr KernelRow<Counting> kRows[] = {
    {"counting_threads_any", "few elements of x an element of y",
     [](const Counting& p) -> const char* {
       return reduced_elements(p) <= kFew ? nullptr : "more than 32 elements of x an element of y";
     },
     [](const Counting& p) { return 2 * move_us(bytes_of(p.x, p.y)); }, launch_axes<1>},
    {"counting_blocks_any", "any problem", [](const Counting&) -> const char* { return nullptr; },
     [](const Counting& p) { return 1 + 4 * move_us(bytes_of(p.x, p.y)); }, launch_axes<256>},
};

constexpr KernelRow<Cumsum> kCumsumRows[] = {
    {"cumsum_blocks_any", "lines of more than 32 elements",
     [](const Cumsum& p) -> const char* {
       return p.x.shape[p.axis] > kFew ? nullptr : "lines of up to 32 elements";
     },
     [](const Cumsum& p) { return 2 * move_us(bytes_of(p.x, p.y)); }, launch_lines<true>},
    {"cumsum_threads_any", "any problem", [](const Cumsum&) -> const char* { return nullptr; },
     [](const Cumsum& p) {
       return move_us(2 * bytes_of(p.x, p.y)) + 0.05 * static_cast<double>(p.x.shape[p.axis]);
     },
     launch_lines<false>},
};

}  // namespace

std::span<const KernelRow<Counting>> counting_rows() { return kRows; }
std::span<const KernelRow<Cumsum>> cumsum_rows() { return kCumsumRows; }

Status legal(const Counting& p) {
  const bool floats = is_float(p.x.dtype) || p.x.dtype == DType::f64;
  const DType result = is_logic(p.kind) ? DType::boolean
                       : is_arg(p.kind) || p.kind == Count::sum || p.kind == Count::prod
                           ? DType::i64
                           : p.x.dtype;
  bool ok = p.x.rank == p.y.rank && p.y.dtype == result && (!floats || is_logic(p.kind));
  for (int d = 0; ok && d < p.x.rank; ++d) {
    ok = p.y.shape[d] == p.x.shape[d] || p.y.shape[d] == 1;
  }
  if (ok && is_arg(p.kind) && numel(p.y) > 0) ok = numel(p.x) > 0;
  if (!ok) {
    return invalid(
        "[counting] expected integers or bool (any, all: anything) and y of x's rank with reduced axes "
        "of size 1 and the kind's dtype, got others");
  }
  return check_memory("counting", {{"y", &p.y}}, {{"x", &p.x}});
}

Status legal(const Cumsum& p) {
  const bool floats = is_float(p.x.dtype) || p.x.dtype == DType::f64;
  if (!same_shape(p.x, p.y) || p.axis < 0 || p.axis >= p.x.rank ||
      p.y.dtype != (floats ? p.x.dtype : DType::i64)) {
    return invalid(
        "[cumsum] expected y of x's shape, of x's dtype for floats and of int64 for others, and an axis "
        "of them, got others");
  }
  return check_memory("cumsum", {{"y", &p.y}}, {{"x", &p.x}});
}

Status counting(const Counting& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (numel(p.y) == 0) return {};
  const KernelRow<Counting>* row = nullptr;
  if (Status s = select_row<Counting>("counting", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

Status cumsum(const Cumsum& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (numel(p.y) == 0) return {};
  const KernelRow<Cumsum>* row = nullptr;
  if (Status s = select_row<Cumsum>("cumsum", kCumsumRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
