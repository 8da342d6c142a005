// The table of scatter: x is copied to y, then src is written.
#include "_shim/alias_shim.hpp"
#include "_shim/dispatch_shim.hpp"
#include "copy/api.hpp"
#include "scatter/kernels/scatter_rows.cuh"
#include "scatter/kernels/scatter_set.cuh"
#include "scatter/kernels/scatter_targets.cuh"

namespace rm::cuda_ops {
namespace {

bool is_wide(const Scatter& p) { return p.index.dtype == DType::i64; }

Status begin(const Scatter& p, Stream stream) {
  if (p.x.data == p.y.data) return {};
  return copy({p.x, p.y}, "", stream);
}

const char* rows_why_not(const Scatter& p) {
  if (p.kind != ScatterKind::add || p.x.dtype != DType::f32) return "it does not add float32";
  if (p.x.rank != 2 || p.axis != 0) return "no rows of a matrix";
  if (p.index.shape[1] > 1 && p.index.stride[1] != 0) return "elements of a row go to several rows";
  return nullptr;
}

Status launch_rows(const Scatter& p, Workspace, Stream stream) {
  if (Status s = begin(p, stream); !s) return s;
  const ScatterRowsArgs a{p.index.data,
                          is_wide(p),
                          static_cast<const float*>(p.src.data),
                          static_cast<float*>(p.y.data),
                          p.src.shape[0],
                          p.src.shape[1],
                          p.y.shape[0],
                          p.index.stride[0],
                          p.src.stride[0],
                          p.src.stride[1],
                          p.y.stride[0],
                          p.y.stride[1]};
  const dim3 blocks(static_cast<unsigned>(a.rows),
                    static_cast<unsigned>(ceil_div(a.columns, kScatterColumns)));
  scatter_add_rows<<<blocks, 256, 0, stream>>>(a);
  return launch_status("scatter");
}

ScatterLinesArgs lines_of(const Scatter& p) {
  ScatterLinesArgs a{};
  a.index = p.index.data, a.wide = is_wide(p), a.src = p.src.data, a.y = p.y.data;
  a.lines = 1;
  for (int d = 0; d < p.x.rank; ++d) {
    if (d == p.axis) continue;
    const int to = a.rank++;
    a.shape[to] = p.src.shape[d], a.lines *= p.src.shape[d];
    a.index_stride[to] = p.index.stride[d], a.src_stride[to] = p.src.stride[d];
    a.y_stride[to] = p.y.stride[d];
  }
  a.length = p.src.shape[p.axis], a.targets = p.y.shape[p.axis];
  a.index_step = p.index.stride[p.axis], a.src_step = p.src.stride[p.axis];
  a.y_step = p.y.stride[p.axis];
  return a;
}

/// fn(Type<T>{}) of what values are combined as; legal() has refused other types.
template <class Fn>
void with_number(DType t, Fn&& fn) {
  switch (t) {
    case DType::f64:
      return fn(Type<double>{});
    case DType::i64:
      return fn(Type<std::int64_t>{});
    case DType::i32:
      return fn(Type<std::int32_t>{});
    default:
      return dispatch_float(t, fn);
  }
}

/// fn(Type<T>{}) of an integer of the dtype's size.
template <class Fn>
void with_bits(DType t, Fn&& fn) {
  switch (size_of(t)) {
    case 1:
      return fn(Type<std::uint8_t>{});
    case 2:
      return fn(Type<std::uint16_t>{});
    case 4:
      return fn(Type<std::uint32_t>{});
    default:
      return fn(Type<std::uint64_t>{});
  }
}

/// fn(Type<T>{}, kind as a constant) of a kind that combines.
template <class Fn>
void with_kind(const Scatter& p, Fn&& fn) {
  with_number(p.x.dtype, [&](auto type) {
    switch (p.kind) {
      case ScatterKind::mul:
        return fn(type, std::integral_constant<ScatterKind, ScatterKind::mul>{});
      case ScatterKind::max:
        return fn(type, std::integral_constant<ScatterKind, ScatterKind::max>{});
      case ScatterKind::min:
        return fn(type, std::integral_constant<ScatterKind, ScatterKind::min>{});
      default:
        return fn(type, std::integral_constant<ScatterKind, ScatterKind::add>{});
    }
  });
}

unsigned blocks_for(std::int64_t wanted) {
  return static_cast<unsigned>(std::min<std::int64_t>(wanted, 1 << 20));
}

Status launch_lines(const Scatter& p, Workspace, Stream stream) {
  if (Status s = begin(p, stream); !s) return s;
  const ScatterLinesArgs a = lines_of(p);
  const unsigned blocks = blocks_for(ceil_div(a.lines, 256));
  if (p.kind == ScatterKind::set) {
    with_bits(p.x.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      scatter_lines<T, ScatterKind::set><<<blocks, 256, 0, stream>>>(a);
    });
  } else {
    with_kind(p, [&](auto type, auto kind) {
      using T = typename decltype(type)::type;
      scatter_lines<T, decltype(kind)::value><<<blocks, 256, 0, stream>>>(a);
    });
  }
  return launch_status("scatter");
}

Status launch_targets(const Scatter& p, Workspace, Stream stream) {
  if (Status s = begin(p, stream); !s) return s;
  const ScatterLinesArgs a = lines_of(p);
  with_kind(p, [&](auto type, auto kind) {
    using T = typename decltype(type)::type;
    scatter_targets<T, decltype(kind)::value>
        <<<blocks_for(a.lines * a.targets), 256, 0, stream>>>(a);
  });
  return launch_status("scatter");
}

Status launch_set(const Scatter& p, Workspace workspace, Stream stream) {
  if (Status s = begin(p, stream); !s) return s;
  const ScatterLinesArgs a = lines_of(p);
  auto* winner = static_cast<int*>(workspace.data);
  if (Status s = cuda_status("scatter",
                             cudaMemsetAsync(winner, 0xff, scatter_workspace(p), stream),
                             "a workspace that can be set");
      !s) {
    return s;
  }
  const unsigned blocks = blocks_for(ceil_div(a.lines * a.length, 256));
  with_bits(p.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    scatter_set<T, false><<<blocks, 256, 0, stream>>>(a, winner);
    scatter_set<T, true><<<blocks, 256, 0, stream>>>(a, winner);
  });
  return launch_status("scatter");
}

double bytes_of(const Tensor& t) { return static_cast<double>(numel(t)) * size_of(t.dtype); }

/// y is copied, src is read `reads` times.
double moved_us(const Scatter& p, double reads) {
  return move_us(2 * bytes_of(p.y)) + reads * move_us(2 * bytes_of(p.src));
}

double elements_along(const Scatter& p) { return static_cast<double>(p.src.shape[p.axis]); }
double lines_along(const Scatter& p) {
  return static_cast<double>(numel(p.src)) / std::max(1.0, elements_along(p));
}

constexpr KernelRow<Scatter> kRows[] = {
    {"scatter_add_rows_any", "float32 rows added to rows of a matrix", rows_why_not,
     [](const Scatter& p) { return moved_us(p, 2); }, launch_rows},
    {"scatter_targets_any", "many values combined in few places",
     [](const Scatter& p) -> const char* {
       return p.kind == ScatterKind::set ? "nothing is combined" : nullptr;
     },
     [](const Scatter& p) {  // the caches give some 3e5 ids a microsecond
       const double read = lines_along(p) * static_cast<double>(p.y.shape[p.axis]) * elements_along(p);
       return 1 + moved_us(p, 1) + read / 3e5;
     },
     launch_targets},
    {"scatter_set_any", "values written",
     [](const Scatter& p) -> const char* {
       if (p.kind != ScatterKind::set) return "values are combined";
       return elements_along(p) < 0x7fffffff ? nullptr : "a line has 2^31 elements or more";
     },
     [](const Scatter& p) { return 4 + moved_us(p, 2); }, launch_set},
    {"scatter_lines_any", "any problem", [](const Scatter&) -> const char* { return nullptr; },
     [](const Scatter& p) {  // half a microsecond a value, one after the other
       const double turns = std::max(1.0, lines_along(p) / (1024.0 * std::max(1, multiprocessors())));
       return moved_us(p, 1) + 0.5 * elements_along(p) * turns;
     },
     launch_lines},
};

bool shapes_agree(const Scatter& p) {
  if (p.x.rank < 1 || p.axis < 0 || p.axis >= p.x.rank) return false;
  if (!same_shape(p.x, p.y) || !same_shape(p.index, p.src) || p.src.rank != p.x.rank) return false;
  for (int d = 0; d < p.x.rank; ++d) {
    if (d != p.axis && p.src.shape[d] > p.x.shape[d]) return false;
  }
  return true;
}

}  // namespace

std::span<const KernelRow<Scatter>> scatter_rows() { return kRows; }

std::size_t scatter_workspace(const Scatter& p) {
  if (p.kind != ScatterKind::set || numel(p.src) == 0) return 0;
  const std::int64_t lines = numel(p.src) / p.src.shape[p.axis];
  return sizeof(int) * static_cast<std::size_t>(lines * p.y.shape[p.axis]);
}

namespace {

Status check(const Scatter& p, const Workspace& workspace = {}) {
  const DType t = p.x.dtype;
  const bool number = is_float(t) || t == DType::f64 || t == DType::i64 || t == DType::i32;
  if (p.src.dtype != t || p.y.dtype != t || (p.kind != ScatterKind::set && !number) ||
      (p.index.dtype != DType::i32 && !is_wide(p)) || !shapes_agree(p)) {
    return invalid(
        "[scatter] expected x, src and y of one dtype (of floats, int64 or int32 where they are combined), "
        "an index of int32 or int64 and shapes as docs/operators.md says, got others");
  }
  return check_memory("scatter", {{"y", &p.y, true}},
                      {{"x", &p.x, true}, {"index", &p.index}, {"src", &p.src}}, workspace);
}

}  // namespace

Status legal(const Scatter& p) { return check(p); }

Status scatter(const Scatter& p, const char* kernel, Workspace workspace, Stream stream) {
  if (Status s = check(p, workspace); !s) return s;
  if (numel(p.y) == 0) return {};
  if (numel(p.src) == 0) return begin(p, stream);
  const std::size_t needed = scatter_workspace(p);
  if (Status s = check_workspace("scatter", needed, workspace, "scatter_workspace()"); !s) return s;
  const KernelRow<Scatter>* row = nullptr;
  if (Status s = select_row<Scatter>("scatter", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, workspace, stream);
}

}  // namespace rm::cuda_ops
