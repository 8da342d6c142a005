// The table of reduction: checks, choice and launches.
#include "_shim/dispatch_shim.hpp"
#include "reduction/api.hpp"
#include "reduction/kernels/reduction_any.cuh"

namespace rm::cuda_ops {
namespace {

/// x's kept axes beside y's, and its reduced axes.
ReductionArgs args_of(const Reduction& p) {
  ReductionArgs a{};
  a.x = p.x.data, a.y = p.y.data;
  Tensor kept = p.x, out = p.y, reduced = p.x;
  for (int d = 0; d < p.x.rank; ++d) {
    if (p.y.shape[d] == p.x.shape[d]) {
      reduced.shape[d] = 1;
    } else {
      kept.shape[d] = 1;
    }
  }
  a.kept = walk_of<2>({&kept, &out});
  a.reduced = walk_of<1>({&reduced});
  return a;
}

/// fn(integral_constant<Reduce, kind>).
template <class Fn>
void with_kind(Reduce kind, Fn&& fn) {
  switch (kind) {
#define RM_CASE(name) \
  case Reduce::name:  \
    return fn(std::integral_constant<Reduce, Reduce::name>{});
    RM_CASE(sum)
    RM_CASE(mean)
    RM_CASE(prod)
    RM_CASE(max)
    RM_CASE(min)
    RM_CASE(argmax)
    RM_CASE(argmin)
#undef RM_CASE
  }
}

template <class Fn>
Status launch_with(const Reduction& p, Fn&& fn) {
  const ReductionArgs a = args_of(p);
  dispatch_float(p.x.dtype, [&](auto type) { with_kind(p.kind, [&](auto kind) { fn(a, type, kind); }); });
  return launch_status("reduction");
}

Status launch_axes(const Reduction& p, Workspace, Stream stream) {
  return launch_with(p, [&](const ReductionArgs& a, auto type, auto kind) {
    const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(a.kept.total, 1 << 20));
    reduce_axes<typename decltype(type)::type, decltype(kind)::value><<<blocks, 256, 0, stream>>>(a);
  });
}

Status launch_rows(const Reduction& p, Workspace, Stream stream) {
  return launch_with(p, [&](const ReductionArgs& a, auto type, auto kind) {
    using T = typename decltype(type)::type;
    constexpr Reduce kKind = decltype(kind)::value;
    if (a.reduced.total <= 2048 && a.kept.total > 512) {
      const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(ceil_div(a.kept.total, 8), 1 << 20));
      reduce_rows<T, kKind, true><<<blocks, 256, 0, stream>>>(a);
    } else {
      const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(a.kept.total, 1 << 20));
      reduce_rows<T, kKind, false><<<blocks, 256, 0, stream>>>(a);
    }
  });
}

Status launch_columns(const Reduction& p, Workspace, Stream stream) {
  return launch_with(p, [&](const ReductionArgs& a, auto type, auto kind) {
    const auto blocks = static_cast<unsigned>(ceil_div(a.kept.total, 32));
    reduce_columns<typename decltype(type)::type, decltype(kind)::value>
        <<<blocks, dim3(32, 8), 0, stream>>>(a);
  });
}

const char* rows_why_not(const Reduction& p) {
  const ReductionArgs a = args_of(p);
  const int per = 16 / size_of(p.x.dtype);
  if (a.reduced.rank != 1 || a.reduced.stride[0][0] != 1) return "the reduced axes are not dense";
  if (a.reduced.total % per != 0) return "rows are not whole 16-byte vectors";
  if (reinterpret_cast<std::uintptr_t>(p.x.data) % 16 != 0) return "x is not 16-byte aligned";
  for (int d = 0; d < a.kept.rank; ++d) {
    if (a.kept.stride[0][d] % per != 0) return "rows are not 16-byte aligned";
  }
  return nullptr;
}

const char* columns_why_not(const Reduction& p) {
  const ReductionArgs a = args_of(p);
  if (a.kept.rank == 0 || a.kept.stride[0][a.kept.rank - 1] != 1) {
    return "the last kept axis is not dense";
  }
  return a.kept.total < 32 ? "fewer than 32 results" : nullptr;
}

double cost(const Reduction& p, double factor) {
  return factor * move_us(static_cast<double>(numel(p.x)) * size_of(p.x.dtype));
}

constexpr KernelRow<Reduction> kRows[] = {
    {"reduction_rows_sm80", "reduced axes dense, rows of whole 16-byte vectors", rows_why_not,
     [](const Reduction& p) { return cost(p, 1); }, launch_rows},
    {"reduction_columns_any", "the last kept axis dense", columns_why_not,
     [](const Reduction& p) { return cost(p, 1.5); }, launch_columns},
    {"reduction_naive_any", "any axes", [](const Reduction&) -> const char* { return nullptr; },
     [](const Reduction& p) { return cost(p, 8); }, launch_axes},
};

Status check(const Reduction& p) {
  const bool arg = p.kind == Reduce::argmax || p.kind == Reduce::argmin;
  bool shapes = p.x.rank == p.y.rank;
  for (int d = 0; shapes && d < p.x.rank; ++d) {
    shapes = p.y.shape[d] == p.x.shape[d] || p.y.shape[d] == 1;
  }
  if (!is_float(p.x.dtype) || p.y.dtype != (arg ? DType::i64 : p.x.dtype) || !shapes) {
    return invalid("[reduction] expected x of float32, bfloat16 or float16 and y of its dtype (int64 "
                   "for argmax, argmin) with reduced axes of size 1, got " +
                   std::string(name_of(p.x.dtype)) + " and " + name_of(p.y.dtype));
  }
  if (arg && numel(p.x) == 0 && numel(p.y) > 0) {
    return invalid("[reduction] expected something to search, got an empty axis");
  }
  return {};
}

}  // namespace

std::span<const KernelRow<Reduction>> reduction_rows() { return kRows; }

Status reduction(const Reduction& p, const char* kernel, Stream stream) {
  if (Status s = check(p); !s) return s;
  if (numel(p.y) == 0) return {};
  const KernelRow<Reduction>* row = nullptr;
  if (Status s = select_row<Reduction>("reduction", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
