// The table of gather, index and index_copy: checks, arguments, launch.
#include "_shim/alias_shim.hpp"
#include "_shim/dispatch_shim.hpp"
#include "indexing/kernels/indexing_any.cuh"

namespace rm::cuda_ops {
namespace {

IndexingArgs args_of(const Indexed& p) {
  IndexingArgs a{};
  const bool copy = p.kind == IndexKind::copy;
  const Tensor& walked = copy ? p.x : p.y;
  a.x = p.x.data, a.y = p.y.data;
  a.rank = walked.rank, a.indices = p.indices, a.total = numel(walked);
  a.moves_y = copy, a.from_end = p.kind == IndexKind::select;
  for (int d = 0; d < walked.rank; ++d) a.shape[d] = walked.shape[d];
  const Tensor& moved = copy ? p.y : p.x;  // the tensor whose axes are indexed
  const int shape_rank = p.index[0].rank;
  std::int64_t* moved_stride = copy ? a.y_stride : a.x_stride;
  std::int64_t* other_stride = copy ? a.x_stride : a.y_stride;
  for (int d = 0; d < walked.rank; ++d) {
    other_stride[d] = walked.stride[d];
    if (p.kind == IndexKind::select) {
      const bool before = d < p.axis, behind = d >= p.axis + shape_rank;
      const int of_moved = before ? d : d - shape_rank + p.indices;
      moved_stride[d] = before || behind ? moved.stride[of_moved] : 0;
    } else {
      moved_stride[d] = d == p.axis ? 0 : moved.stride[d];
    }
  }
  for (int k = 0; k < p.indices; ++k) {
    a.index[k] = p.index[k].data, a.wide[k] = p.index[k].dtype == DType::i64;
    a.size[k] = moved.shape[p.axis + k], a.step[k] = moved.stride[p.axis + k];
    for (int d = 0; d < p.index[k].rank; ++d) {
      const int at = p.kind == IndexKind::gather ? d : p.axis + d;
      a.index_stride[k][at] = p.index[k].stride[d];
    }
  }
  return a;
}

Status launch_any(const Indexed& p, Workspace, Stream stream) {
  const IndexingArgs a = args_of(p);
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>(ceil_div(a.total, 256), 1 << 16));
  switch (size_of(p.x.dtype)) {
    case 1:
      indexing_elements<std::uint8_t><<<blocks, 256, 0, stream>>>(a);
      break;
    case 2:
      indexing_elements<std::uint16_t><<<blocks, 256, 0, stream>>>(a);
      break;
    case 4:
      indexing_elements<std::uint32_t><<<blocks, 256, 0, stream>>>(a);
      break;
    default:
      indexing_elements<std::uint64_t><<<blocks, 256, 0, stream>>>(a);
  }
  return launch_status("indexed");
}

constexpr KernelRow<Indexed> kRows[] = {
    {"indexing_any", "any problem", [](const Indexed&) -> const char* { return nullptr; },
     [](const Indexed& p) {
       const Tensor& walked = p.kind == IndexKind::copy ? p.x : p.y;
       return 3 * move_us(2.0 * static_cast<double>(numel(walked)) * size_of(p.x.dtype));
     },
     launch_any},
};

bool shapes_agree(const Indexed& p) {
  const Tensor& i = p.index[0];
  if (p.axis < 0 || p.axis >= p.x.rank || p.indices < 1 || p.indices > kMostIndices) return false;
  if (p.kind == IndexKind::gather) {
    if (p.indices != 1 || i.rank != p.x.rank || !same_shape(i, p.y)) return false;
    for (int d = 0; d < i.rank; ++d) {
      if (d != p.axis && i.shape[d] > p.x.shape[d]) return false;
    }
    return true;
  }
  if (p.kind == IndexKind::copy) {
    if (p.indices != 1 || i.rank != 1 || p.x.rank != p.y.rank) return false;
    for (int d = 0; d < p.x.rank; ++d) {
      if (p.x.shape[d] != (d == p.axis ? i.shape[0] : p.y.shape[d])) return false;
    }
    return true;
  }
  if (p.axis + p.indices > p.x.rank || p.y.rank != p.x.rank - p.indices + i.rank) return false;
  for (int k = 1; k < p.indices; ++k) {
    if (!same_shape(p.index[k], i)) return false;
  }
  for (int d = 0; d < p.y.rank; ++d) {
    const bool before = d < p.axis, inside = !before && d < p.axis + i.rank;
    const std::int64_t wanted = before   ? p.x.shape[d]
                                : inside ? i.shape[d - p.axis]
                                         : p.x.shape[d - i.rank + p.indices];
    if (p.y.shape[d] != wanted) return false;
  }
  return true;
}

}  // namespace

std::span<const KernelRow<Indexed>> indexed_rows() { return kRows; }

Status legal(const Indexed& p) {
  bool ok = p.x.dtype == p.y.dtype && shapes_agree(p);
  for (int k = 0; ok && k < p.indices; ++k) {
    ok = p.index[k].dtype == DType::i32 || p.index[k].dtype == DType::i64;
  }
  if (!ok) {
    return invalid(
        "[indexed] expected x and y of one dtype, indices of int32 or int64 and shapes as "
        "docs/operators.md says, got others");
  }
  Operand operands[1 + kMostIndices] = {{"x", &p.x}};
  for (int k = 0; k < p.indices; ++k) operands[1 + k] = {"index", &p.index[k]};
  const Operand results[] = {{"y", &p.y}};
  return check_memory("indexed", std::span<const Operand>(results),
                      std::span<const Operand>(operands, 1 + static_cast<std::size_t>(p.indices)));
}

Status indexed(const Indexed& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (numel(p.kind == IndexKind::copy ? p.x : p.y) == 0) return {};
  const KernelRow<Indexed>* row = nullptr;
  if (Status s = select_row<Indexed>("indexed", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
