// The table of reduction: checks, choice and launches.
#include "_shim/alias_shim.hpp"
#include "_shim/launch_shim.hpp"
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
  a.kept_total = a.kept.total, a.reduced_total = a.reduced.total;
  if (a.reduced.rank == 1) a.reduced_pitch = a.reduced.stride[0][0];
  a.flat = a.kept.rank <= 1;
  if (a.kept.rank == 1) a.x_pitch = a.kept.stride[0][0], a.y_pitch = a.kept.stride[1][0];
  a.divisor = p.kind == Reduce::mean ? static_cast<float>(a.reduced.total) : 1.0f;
  return a;
}

/// fn(integral_constant<Reduce, kind>); a mean is a sum with a divisor.
template <class Fn>
Status with_kind(Reduce kind, Fn&& fn) {
  switch (kind) {
#define RM_CASE(name) \
  case Reduce::name:  \
    return fn(std::integral_constant<Reduce, Reduce::name>{});
    RM_CASE(prod)
    RM_CASE(max)
    RM_CASE(min)
    RM_CASE(argmax)
    RM_CASE(argmin)
#undef RM_CASE
    default:
      return fn(std::integral_constant<Reduce, Reduce::sum>{});
  }
}

template <class Fn>
Status launch_with(const Reduction& p, const ReductionArgs& a, Fn&& fn) {
  return dispatch_float(p.x.dtype, [&](auto type) {
    return with_kind(p.kind, [&](auto kind) { return fn(a, type, kind); });
  });
}

std::int64_t part_bytes(const Reduction& p) {
  return p.kind == Reduce::argmax || p.kind == Reduce::argmin ? sizeof(Best) : sizeof(float);
}

/// fn launches with a second axis of the grid of `splits`, whose parts are then joined.
template <class Fn>
Status launch_split(const Reduction& p, std::int64_t splits, Workspace workspace, Fn&& fn) {
  ReductionArgs a = args_of(p);
  if (workspace.bytes < static_cast<std::size_t>(splits * a.kept.total * part_bytes(p))) splits = 1;
  if (splits > 1) a.parts = workspace.data;
  return launch_with(p, a, [&](const ReductionArgs& with, auto type, auto kind) {
    return fn(with, type, kind, static_cast<unsigned>(splits));
  });
}

/// Joins the parts, where there are any.
template <class T, Reduce kKind>
Status launch_finish(const ReductionArgs& a, unsigned splits, Stream stream) {
  if (splits == 1) return {};
  int width = 1;
  while (width < 32 && width < a.kept_total) width *= 2;
  return launch_overlapped("reduction", reduce_finish<T, kKind>,
                           static_cast<unsigned>(ceil_div(a.kept_total, width)), 256, 0, stream, a,
                           static_cast<int>(splits), width);
}

Status launch_axes(const Reduction& p, Workspace, Stream stream) {
  return launch_with(p, args_of(p), [&](const ReductionArgs& a, auto type, auto kind) {
    const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(a.kept.total, 1 << 20));
    return launch_overlapped("reduction",
                             reduce_axes<typename decltype(type)::type, decltype(kind)::value>,
                             blocks, 256, 0, stream, a);
  });
}

/// Blocks along the reduced axes, of `least` or more, about `share` a multiprocessor: short ones,
/// so that all multiprocessors end together, but of columns few, whose parts are as many.
std::int64_t splits_for(std::int64_t blocks, std::int64_t reduced, std::int64_t least,
                        std::int64_t share = 16) {
  const std::int64_t wanted =
      ceil_div(share * std::max(1, multiprocessors()), std::max<std::int64_t>(1, blocks));
  return std::clamp<std::int64_t>(std::min(wanted, reduced / least), 1, 2112);
}
/// 16-byte vectors of a row.
std::int64_t packs_of(const Reduction& p, const ReductionArgs& a) {
  return a.reduced.total * size_of(p.x.dtype) / 16;
}
bool warp_a_row(const Reduction& p, const ReductionArgs& a) {
  return packs_of(p, a) <= 256 && a.kept.total > 512;
}
std::int64_t row_splits(const Reduction& p, const ReductionArgs& a) {
  return warp_a_row(p, a) ? 1 : splits_for(a.kept.total, packs_of(p, a), 2048);
}

Status launch_rows(const Reduction& p, Workspace workspace, Stream stream) {
  const ReductionArgs args = args_of(p);
  const std::int64_t packs = packs_of(p, args);
  const bool warps = warp_a_row(p, args);
  return launch_split(p, row_splits(p, args), workspace,
                      [&](const ReductionArgs& a, auto type, auto kind, unsigned splits) {
                        using T = typename decltype(type)::type;
                        constexpr Reduce kKind = decltype(kind)::value;
                        const auto blocks = static_cast<unsigned>(
                            std::min<std::int64_t>(ceil_div(a.kept.total, warps ? 8 : 1), 1 << 20));
                        if (warps) {
                          return launch_overlapped("reduction", reduce_rows<T, kKind, true>, blocks,
                                                   256, 0, stream, a);
                        }  // else four loads a thread, where the row has as many
                        const int threads = packs > 512 || a.kept.total < 512 ? 256 : 128;
                        const Status status =
                            launch_overlapped("reduction", reduce_rows<T, kKind, false>,
                                              dim3(blocks, splits), threads, 0, stream, a);
                        return status ? launch_finish<T, kKind>(a, splits, stream) : status;
                      });
}

/// Elements of x a thread takes at once along the last kept axis.
int column_vector(const Reduction& p, const ReductionArgs& a) {
  const int per = 16 / size_of(p.x.dtype), last = a.kept.rank - 1;
  if (reinterpret_cast<std::uintptr_t>(p.x.data) % 16 != 0 || a.kept.shape[last] % per != 0)
    return 1;
  for (int d = 0; d < last; ++d) {
    if (a.kept.stride[0][d] % per != 0) return 1;
  }
  for (int d = 0; d < a.reduced.rank; ++d) {
    if (a.reduced.stride[0][d] % per != 0) return 1;
  }
  return a.kept.total / per < 64 ? 1 : per;
}
std::int64_t column_splits(const Reduction& p, const ReductionArgs& a) {
  return splits_for(ceil_div(a.kept.total, 32 * column_vector(p, a)), a.reduced.total, 64, 4);
}

Status launch_columns(const Reduction& p, Workspace workspace, Stream stream) {
  return launch_split(
      p, column_splits(p, args_of(p)), workspace,
      [&](const ReductionArgs& a, auto type, auto kind, unsigned splits) {
        using T = typename decltype(type)::type;
        constexpr Reduce kKind = decltype(kind)::value;
        constexpr int V = 16 / static_cast<int>(sizeof(T));
        const int per = column_vector(p, a);
        const dim3 grid(static_cast<unsigned>(ceil_div(a.kept.total, 32 * per)), splits);
        auto* kernel = per == V ? reduce_columns<T, kKind, V> : reduce_columns<T, kKind, 1>;
        const Status status =
            launch_overlapped("reduction", kernel, grid, dim3(32, 8), 0, stream, a);
        return status ? launch_finish<T, kKind>(a, splits, stream) : status;
      });
}

const char* rows_why_not(const Reduction& p) {
  const ReductionArgs a = args_of(p);
  const int per = 16 / size_of(p.x.dtype);
  if (a.reduced.rank != 1 || a.reduced.stride[0][0] != 1) return "the reduced axes are not dense";
  if (a.reduced.total % per != 0) return "rows are not whole 16-byte vectors";
  if (a.reduced.total / per > 0x7ff00000) return "rows of 32 GiB or more";
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
    return invalid(
        "[reduction] expected x of float32, bfloat16 or float16 and y of its dtype (int64 "
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

Status legal(const Reduction& p) {
  if (Status s = check(p); !s) return s;
  return check_memory("reduction", {{"y", &p.y}}, {{"x", &p.x}});
}

std::size_t reduction_workspace(const Reduction& p) {
  if (!check(p) || numel(p.x) == 0) return 0;
  const ReductionArgs a = args_of(p);
  std::int64_t splits = rows_why_not(p) ? 1 : row_splits(p, a);
  if (!columns_why_not(p)) splits = std::max(splits, column_splits(p, a));
  return splits > 1 ? static_cast<std::size_t>(splits * a.kept.total * part_bytes(p)) : 0;
}

Status reduction(const Reduction& p, const char* kernel, Workspace workspace, Stream stream) {
  if (Status s = check(p); !s) return s;
  if (Status s = check_workspace("reduction", 0, workspace); !s) return s;
  if (Status s = check_memory("reduction", {{"y", &p.y}}, {{"x", &p.x}}, workspace); !s) return s;
  if (numel(p.y) == 0) return {};
  const KernelRow<Reduction>* row = nullptr;
  if (Status s = select_row<Reduction>("reduction", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, workspace, stream);
}

}  // namespace rm::cuda_ops
