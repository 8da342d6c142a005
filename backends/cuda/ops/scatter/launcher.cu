// The table of scatter: x is copied to y, then src is written.
#include "_shim/alias_shim.hpp"
#include "_shim/dispatch_shim.hpp"
#include "copy/api.hpp"
#include "scatter/kernels/scatter_rows.cuh"

namespace rm::cuda_ops {
namespace {

bool is_wide(const Scatter& p) { return p.index.dtype == DType::i64; }

Status begin(const Scatter& p, Stream stream) {
  if (p.x.data == p.y.data) return {};
  return copy({p.x, p.y}, "", stream);
}

const char* rows_why_not(const Scatter& p) {
  if (p.kind != ScatterKind::add) return "it does not add";
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

Status launch_lines(const Scatter& p, Workspace, Stream stream) {
  if (Status s = begin(p, stream); !s) return s;
  ScatterLinesArgs a{};
  a.index = p.index.data, a.wide = is_wide(p);
  a.src = static_cast<const float*>(p.src.data), a.y = static_cast<float*>(p.y.data);
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
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>(ceil_div(a.lines, 256), 1 << 16));
  switch (p.kind) {
    case ScatterKind::set:
      scatter_lines<ScatterKind::set><<<blocks, 256, 0, stream>>>(a);
      break;
    case ScatterKind::add:
      scatter_lines<ScatterKind::add><<<blocks, 256, 0, stream>>>(a);
      break;
    case ScatterKind::mul:
      scatter_lines<ScatterKind::mul><<<blocks, 256, 0, stream>>>(a);
      break;
    case ScatterKind::max:
      scatter_lines<ScatterKind::max><<<blocks, 256, 0, stream>>>(a);
      break;
    case ScatterKind::min:
      scatter_lines<ScatterKind::min><<<blocks, 256, 0, stream>>>(a);
      break;
  }
  return launch_status("scatter");
}

double cost(const Scatter& p, double factor) {
  return move_us(8.0 * static_cast<double>(numel(p.y))) +
         factor * move_us(8.0 * static_cast<double>(numel(p.src)));
}

constexpr KernelRow<Scatter> kRows[] = {
    {"scatter_add_rows_any", "rows added to rows of a matrix", rows_why_not,
     [](const Scatter& p) { return cost(p, 2); }, launch_rows},
    {"scatter_lines_any", "any problem", [](const Scatter&) -> const char* { return nullptr; },
     [](const Scatter& p) { return cost(p, 16); }, launch_lines},
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

Status legal(const Scatter& p) {
  const bool floats = p.x.dtype == DType::f32 && p.src.dtype == DType::f32 && p.y.dtype == DType::f32;
  if (!floats || (p.index.dtype != DType::i32 && !is_wide(p)) || !shapes_agree(p)) {
    return invalid(
        "[scatter] expected x, src and y of float32, an index of int32 or int64 and shapes as "
        "docs/operators.md says, got others");
  }
  return check_memory("scatter", {{"y", &p.y, true}},
                      {{"x", &p.x, true}, {"index", &p.index}, {"src", &p.src}});
}

Status scatter(const Scatter& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (numel(p.y) == 0) return {};
  if (numel(p.src) == 0) return begin(p, stream);
  const KernelRow<Scatter>* row = nullptr;
  if (Status s = select_row<Scatter>("scatter", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
