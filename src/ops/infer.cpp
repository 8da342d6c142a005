// Dim comparison and broadcasting rules shared by the operators' inference.
#include "ops/infer.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace rm::ops {

using ir::Dim;
using ir::Dims;
using ir::Graph;
using ir::Node;
using ir::TensorType;

DimOrder compare(const Dim& a, const Dim& b) {
  if (a == b) return DimOrder::kEqual;
  if (a.is_static() && b.is_static()) return DimOrder::kDifferent;
  Dim difference = a - b;
  if (!difference.is_static()) return DimOrder::kUnknown;
  return difference.value() == 0 ? DimOrder::kEqual : DimOrder::kDifferent;
}

void fail(const Node& node, const std::string& expected, const std::string& got) {
  throw_invalid("[" + node.op + "] expected " + expected + ", got " + got);
}

bool present(const Node& node, size_t operand) {
  return operand < node.operands.size() && node.operands[operand] != ir::kNoValue;
}

const TensorType& operand_type(const Graph& graph, const Node& node, size_t operand) {
  if (!present(node, operand)) fail(node, "operand " + std::to_string(operand), "none");
  return graph.type(node.operands[operand]);
}

const TensorType& result_type(const Graph& graph, const Node& node, size_t result) {
  return graph.type(node.results.at(result));
}

Dim unify(const Node& node, const Dim& a, const Dim& b, const std::string& what) {
  if (compare(a, b) == DimOrder::kDifferent)
    fail(node, what + " to be equal", a.str() + " and " + b.str());
  return b.is_static() ? b : a;
}

Dims broadcast(const Node& node, const Dims& a, const Dims& b) {
  const Dims& longer = a.size() >= b.size() ? a : b;
  const Dims& shorter = a.size() >= b.size() ? b : a;
  Dims out = longer;
  size_t lead = longer.size() - shorter.size();
  for (size_t i = 0; i < shorter.size(); ++i) {
    Dim& d = out[lead + i];
    const Dim& s = shorter[i];
    if (d == s || s == Dim(1)) continue;
    if (d == Dim(1)) {
      d = s;
    } else if (d.is_static() && s.is_static()) {
      fail(node, "shapes that broadcast", dims_text(a) + " and " + dims_text(b));
    } else if (s.is_static()) {
      d = s;
    } else if (!d.is_static() && a.size() < b.size()) {
      d = s;  // both symbolic: the first operand's expression
    }
  }
  return out;
}

void check_broadcasts_to(const Node& node, const Dims& from, const Dims& to) {
  bool ok = from.size() <= to.size();
  for (size_t i = 0; ok && i < from.size(); ++i) {
    const Dim& f = from[i];
    const Dim& t = to[to.size() - from.size() + i];
    ok = f == Dim(1) || !(f.is_static() && t.is_static()) || f == t;
  }
  if (!ok) fail(node, "a shape that broadcasts to " + dims_text(to), dims_text(from));
}

size_t axis_of(const Node& node, size_t rank) {
  int64_t axis = node.i_or("axis", static_cast<int64_t>(rank) - 1);
  if (axis < 0 || axis >= static_cast<int64_t>(rank)) {
    fail(node, "0 <= axis < " + std::to_string(rank), std::to_string(axis));
  }
  return static_cast<size_t>(axis);
}

void check_rank(const Node& node, const TensorType& type, size_t rank, const char* what) {
  if (type.rank() != rank) {
    fail(node, std::string(what) + " of rank " + std::to_string(rank), type.str());
  }
}

void check_dtype(const Node& node, const TensorType& type, ir::DType dtype, const char* what) {
  if (type.dtype != dtype) {
    fail(node, std::string(what) + " of type " + std::string(ir::name(dtype)),
         type.str() + "; try a cast");
  }
}

bool is_integer(ir::DType dtype) { return !ir::is_floating(dtype) && dtype != ir::DType::kBool; }

std::string dims_text(const Dims& dims) {
  std::string out = "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    if (i != 0) out += ',';
    out += dims[i].str();
  }
  return out + "]";
}

double traffic_bytes(const Graph& graph, const Node& node) {
  auto size = [&](ir::ValueId v) {
    double bytes = static_cast<double>(ir::size_bytes(graph.type(v).dtype));
    for (const Dim& d : graph.type(v).dims) bytes *= static_cast<double>(d.value());
    return bytes;
  };
  double bytes = 0;
  for (ir::ValueId v : node.operands) {
    if (v != ir::kNoValue) bytes += size(v);
  }
  for (ir::ValueId v : node.results) bytes += size(v);
  return bytes;
}

Cost view_cost(const Graph&, const Node&) { return {}; }

Cost copy_cost(const Graph& graph, const Node& node) { return {0, traffic_bytes(graph, node)}; }

}  // namespace rm::ops
