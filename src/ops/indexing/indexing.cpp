// gather, scatter, index, index_copy, embedding: elements chosen by index values. Inference checks
// the shapes, references and kernels check every index.
#include <algorithm>

#include "base/error.hpp"
#include "ir/scalar.hpp"
#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Dims;
using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

void check_index(const Node& node, const TensorType& index) {
  if (index.dtype != ir::DType::kI64 && index.dtype != ir::DType::kI32) {
    fail(node, "i64 or i32 indices", index.str() + "; try a cast");
  }
}

int64_t checked(const Node& node, int64_t index, int64_t size) {
  if (index < 0 || index >= size) {
    throw Error(RM_OUT_OF_RANGE, "[" + node.op + "] expected indices in [0," +
                                     std::to_string(size) + "), got " + std::to_string(index));
  }
  return index;
}

// An index must not be longer than what it points into, but along the axis its values run over.
void check_inside(const Node& node, const TensorType& index, const TensorType& x, size_t axis) {
  for (size_t d = 0; d < x.rank(); ++d) {
    if (d == axis) continue;
    const ir::Dim room = x.dims[d] - index.dims[d];
    if (room.is_static() && room.value() < 0) {
      fail(node, "an index of at most " + x.dims[d].str() + " along axis " + std::to_string(d),
           index.dims[d].str());
    }
  }
}

Types infer_gather(const Graph& graph, const Node& node) {
  const TensorType &x = operand_type(graph, node, 0), &index = operand_type(graph, node, 1);
  check_index(node, index);
  check_rank(node, index, x.rank(), "an index");
  check_inside(node, index, x, axis_of(node, x.rank()));
  return {{x.dtype, index.dims}};
}

// For every element of the index: where it points in a contiguous tensor of `shape`.
std::vector<int64_t> pointed_at(const Node& node, const HostTensor& index, const Dims& shape) {
  size_t axis = axis_of(node, shape.size());
  std::vector<int64_t> strides = contiguous_strides(sizes(shape));
  int64_t along = strides[axis];
  strides[axis] = 0;
  std::vector<int64_t> at = strided_offsets(sizes(index.type.dims), strides);
  std::vector<int64_t> ids = to_ints(index);
  for (size_t i = 0; i < at.size(); ++i)
    at[i] += checked(node, ids[i], shape[axis].value()) * along;
  return at;
}

std::vector<HostTensor> reference_gather(const Node& node, const HostOperands& in,
                                         const Types& out) {
  return {take(*in[0], out[0], pointed_at(node, *in[1], in[0]->type.dims))};
}

Types infer_scatter(const Graph& graph, const Node& node) {
  const TensorType &x = operand_type(graph, node, 0), &index = operand_type(graph, node, 1),
                   &src = operand_type(graph, node, 2);
  check_index(node, index);
  check_rank(node, index, x.rank(), "an index");
  check_rank(node, src, x.rank(), "a source");
  check_dtype(node, src, x.dtype, "a source");
  check_inside(node, index, x, axis_of(node, x.rank()));
  for (size_t d = 0; d < src.rank(); ++d)
    unify(node, src.dims[d], index.dims[d], "source and index sizes");
  std::string kind = node.s_or("kind", "set");
  if (kind != "set" && kind != "add" && kind != "mul" && kind != "max" && kind != "min")
    fail(node, "kind set, add, mul, max or min", "'" + kind + "'");
  return {x};
}

// What a place holds after `src`. NaN wins in max and min; integers wrap.
template <class T, class Wrap>
T combined(const std::string& kind, T old, T src) {
  if (kind == "add") return static_cast<T>(static_cast<Wrap>(old) + static_cast<Wrap>(src));
  if (kind == "mul") return static_cast<T>(static_cast<Wrap>(old) * static_cast<Wrap>(src));
  if (kind == "set" || src != src) return src;
  if (old != old) return old;
  return (kind == "max") == (src > old) ? src : old;
}

std::vector<HostTensor> reference_scatter(const Node& node, const HostOperands& in,
                                          const Types& out) {
  HostTensor y = *in[0];
  ir::DType dtype = out[0].dtype;
  const std::string kind = node.s_or("kind", "set");
  std::vector<int64_t> at = pointed_at(node, *in[1], out[0].dims);
  for (size_t i = 0; i < at.size(); ++i) {
    const char* src = in[2]->at(static_cast<int64_t>(i));
    char* dst = y.at(at[i]);
    if (ir::is_floating(dtype)) {
      ir::store_element(dtype, dst,
                        combined<double, double>(kind, ir::load_element(dtype, dst),
                                                 ir::load_element(dtype, src)));
    } else {
      ir::store_int(dtype, dst,
                    combined<int64_t, uint64_t>(kind, ir::load_int(dtype, dst),
                                                ir::load_int(dtype, src)));
    }
  }
  return {y};
}

Types infer_index_copy(const Graph& graph, const Node& node) {
  const TensorType &x = operand_type(graph, node, 0), &index = operand_type(graph, node, 1),
                   &src = operand_type(graph, node, 2);
  check_index(node, index);
  check_rank(node, index, 1, "an index");
  check_rank(node, src, x.rank(), "a source");
  check_dtype(node, src, x.dtype, "a source");
  size_t axis = axis_of(node, x.rank());
  for (size_t d = 0; d < src.rank(); ++d) {
    unify(node, src.dims[d], d == axis ? index.dims[0] : x.dims[d], "source sizes");
  }
  return {x};
}

std::vector<HostTensor> reference_index_copy(const Node& node, const HostOperands& in,
                                             const Types& out) {
  HostTensor y = *in[0];
  const TensorType& src = in[2]->type;
  size_t axis = axis_of(node, out[0].rank());
  std::vector<int64_t> ids = to_ints(*in[1]), shape = sizes(src.dims);
  std::vector<int64_t> strides = contiguous_strides(sizes(out[0].dims));
  int64_t along = strides[axis], item = static_cast<int64_t>(ir::size_bytes(src.dtype));
  strides[axis] = 0;
  std::vector<int64_t> at = strided_offsets(shape, strides);
  std::vector<int64_t> axis_only(shape.size(), 0);
  axis_only[axis] = 1;
  std::vector<int64_t> position = strided_offsets(shape, axis_only);
  for (size_t i = 0; i < at.size(); ++i) {
    int64_t id = checked(node, ids[static_cast<size_t>(position[i])], out[0].dims[axis].value());
    const char* from = in[2]->at(static_cast<int64_t>(i));
    std::copy(from, from + item, y.at(at[i] + id * along));
  }
  return {y};
}

Types infer_index(const Graph& graph, const Node& node) {
  const TensorType& x = operand_type(graph, node, 0);
  const auto& axes = node.ints("axes");
  if (axes.empty() || axes.size() + 1 != node.operands.size()) {
    fail(node, "one axis per index operand", std::to_string(axes.size()) + " axes");
  }
  for (size_t i = 0; i < axes.size(); ++i) {
    if (axes[i] < 0 || axes[i] >= static_cast<int64_t>(x.rank()) ||
        axes[i] != axes[0] + static_cast<int64_t>(i)) {
      fail(node, "consecutive axes of " + x.str(), "axis " + std::to_string(axes[i]));
    }
  }
  Dims shared;
  for (size_t i = 1; i < node.operands.size(); ++i) {
    const TensorType& index = operand_type(graph, node, i);
    check_index(node, index);
    shared = broadcast(node, shared, index.dims);
  }
  auto first = static_cast<size_t>(axes.front()), last = static_cast<size_t>(axes.back());
  Dims dims(x.dims.begin(), x.dims.begin() + static_cast<std::ptrdiff_t>(first));
  dims.insert(dims.end(), shared.begin(), shared.end());
  dims.insert(dims.end(), x.dims.begin() + static_cast<std::ptrdiff_t>(last) + 1, x.dims.end());
  return {{x.dtype, dims}};
}

std::vector<HostTensor> reference_index(const Node& node, const HostOperands& in,
                                        const Types& out) {
  const TensorType& x = in[0]->type;
  const auto& axes = node.ints("axes");
  auto first = static_cast<size_t>(axes.front()), count = axes.size();
  std::vector<int64_t> shape = sizes(x.dims), strides = contiguous_strides(shape);
  size_t shared_rank = out[0].rank() - (x.rank() - count);
  Dims shared(out[0].dims.begin() + static_cast<std::ptrdiff_t>(first),
              out[0].dims.begin() + static_cast<std::ptrdiff_t>(first + shared_rank));
  std::vector<int64_t> points(static_cast<size_t>(TensorType{x.dtype, shared}.num_elements()), 0);
  for (size_t k = 0; k < count; ++k) {
    std::vector<int64_t> ids = to_ints(*in[k + 1]);
    std::vector<int64_t> at = broadcast_offsets(in[k + 1]->type.dims, shared);
    int64_t size = shape[first + k];
    for (size_t i = 0; i < points.size(); ++i) {
      int64_t id = ids[static_cast<size_t>(at[i])];
      points[i] += checked(node, id < 0 ? id + size : id, size) * strides[first + k];
    }
  }
  std::vector<int64_t> lead(shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(first));
  std::vector<int64_t> lead_strides(strides.begin(),
                                    strides.begin() + static_cast<std::ptrdiff_t>(first));
  std::vector<int64_t> tail(shape.begin() + static_cast<std::ptrdiff_t>(first + count),
                            shape.end());
  std::vector<int64_t> offsets, inner = strided_offsets(tail, contiguous_strides(tail));
  for (int64_t base : strided_offsets(lead, lead_strides)) {
    for (int64_t p : points) {
      for (int64_t t : inner) offsets.push_back(base + p + t);
    }
  }
  return {take(*in[0], out[0], offsets)};
}

Types infer_embedding(const Graph& graph, const Node& node) {
  const TensorType &table = operand_type(graph, node, 0), &ids = operand_type(graph, node, 1);
  check_rank(node, table, 2, "a table");
  check_index(node, ids);
  Dims dims = ids.dims;
  dims.push_back(table.dims[1]);
  return {{table.dtype, dims}};
}

std::vector<HostTensor> reference_embedding(const Node& node, const HostOperands& in,
                                            const Types& out) {
  int64_t rows = in[0]->type.dims[0].value(), width = in[0]->type.dims[1].value();
  std::vector<int64_t> offsets;
  for (int64_t id : to_ints(*in[1])) {
    checked(node, id, rows);
    for (int64_t j = 0; j < width; ++j) offsets.push_back(id * width + j);
  }
  return {take(*in[0], out[0], offsets)};
}

// Reads as much of the table as the result holds.
Cost lookup_cost(const Graph& graph, const Node& node) {
  double index_bytes = 0;
  for (size_t i = 1; i < node.operands.size(); ++i) {
    index_bytes += static_cast<double>(operand_type(graph, node, i).num_bytes());
  }
  return {0, 2.0 * static_cast<double>(result_type(graph, node).num_bytes()) + index_bytes};
}

}  // namespace

extern const OpDef kGather{"gather", 2, 2, kIndexing, infer_gather, lookup_cost, reference_gather};
extern const OpDef kScatter{"scatter",        3, 3, kIndexing, infer_scatter, copy_cost,
                            reference_scatter};
extern const OpDef kIndexCopy{"index_copy",         3,
                              3,                    kIndexing,
                              infer_index_copy,     copy_cost,
                              reference_index_copy, Effects::kNone,
                              /*updates=*/0};
extern const OpDef kIndex{"index",     2,           kAnyNumber,     kIndexing,
                          infer_index, lookup_cost, reference_index};
extern const OpDef kEmbedding{"embedding",        2, 2, kIndexing, infer_embedding, lookup_cost,
                              reference_embedding};

}  // namespace rm::ops
