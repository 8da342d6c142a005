// Reductions, the places of extremes, and norms along one axis.
#include "onnx/importer.hpp"

namespace rm::onnx {
namespace {

Converter reduction(std::string kind) {
  return [kind](Importer& m) {
    const std::string& name = m.node().op;
    ValueId x = m.in(0);
    const ir::DType dtype = m.type(x).dtype;
    Ints axes = m.axes(1, m.rank(x)).value_or(Ints{});
    // Without axes every element is a sum of its own: its magnitude, square, logarithm, ... .
    const bool reduces = !axes.empty() || m.i("noop_with_empty_axes", 0) == 0;
    if (axes.empty() && reduces) {
      for (size_t k = 0; k < m.rank(x); ++k) axes.push_back(static_cast<int64_t>(k));
    }
    if (kind == "mean" && !ir::is_floating(dtype)) m.refuse("floats", m.type(x).str());
    if (dtype == ir::DType::kBool && reduces)
      return m.out(m.reduce(name == "ReduceMax" ? "any" : "all", x, axes, m.i("keepdims", 1) != 0));
    if (name == "ReduceL1") x = m.op("abs", {x});
    if (name == "ReduceL2" || name == "ReduceSumSquare") x = m.op("mul", {x, x});
    if (name == "ReduceLogSumExp" && !reduces) return m.out(x);
    if (name == "ReduceLogSumExp") x = m.op("exp", {x});
    ValueId y = reduces ? m.cast(m.reduce(kind, x, axes, m.i("keepdims", 1) != 0), dtype) : x;
    if (name == "ReduceL2") y = m.op("sqrt", {y});
    if (name == "ReduceLogSum" || name == "ReduceLogSumExp") y = m.op("log", {y});
    m.out(y);
  };
}

Converter arg_reduction(std::string kind) {
  return [kind](Importer& m) {
    ValueId x = m.in(0);
    const int64_t axis = m.axis(m.i("axis", 0), m.rank(x));
    const bool keepdims = m.i("keepdims", 1) != 0;
    if (m.i("select_last_index", 0) == 0) return m.out(m.reduce(kind, x, {axis}, keepdims));
    ValueId behind = m.reduce(kind, m.reversed(x, axis), {axis}, keepdims);  // counted from the end
    m.out(m.op(
        "sub",
        {m.number(behind, static_cast<double>(m.fixed(m.dims(x)[static_cast<size_t>(axis)]) - 1)),
         behind}));
  };
}

void convert_hardmax(Importer& m) {
  ValueId x = m.in(0);
  const Dims shape = m.dims(x);
  int64_t axis = m.axis(m.i("axis", m.opset() < 13 ? 1 : -1), shape.size());
  ValueId flat = x;
  if (m.opset() < 13) {
    flat = m.reshape(x, {ir::product(Dims(shape.begin(), shape.begin() + axis)),
                         ir::product(Dims(shape.begin() + axis, shape.end()))});
    axis = 1;
  }
  const Dims d = m.dims(flat);
  Dims along(d.size(), Dim(1));
  along[static_cast<size_t>(axis)] = d[static_cast<size_t>(axis)];
  ValueId best = m.reduce("argmax", flat, {axis}, true);
  ValueId y = m.op("eq", {best, m.reshape(m.count(d[static_cast<size_t>(axis)]), along)});
  m.out(m.reshape(m.cast(y, m.dtype(x)), shape));
}

void convert_lp_norm(Importer& m) {
  ValueId x = m.in(0);
  const Ints axes{m.axis(m.i("axis", -1), m.rank(x))};
  const int64_t p = m.i("p", 2);
  if (p != 1 && p != 2) m.refuse("p of 1 or 2", std::to_string(p));
  ValueId size = m.reduce("sum", p == 1 ? m.op("abs", {x}) : m.op("mul", {x, x}), axes, true);
  if (p == 2) size = m.op("sqrt", {size});
  ValueId y = m.op("div", {x, size});
  m.out(m.op("where", {m.op("eq", {size, m.number(size, 0)}), m.number(x, 0), y}));
}

// The determinant by elimination without exchanges would divide by zero; small ones are expanded
// along their first row.
ValueId determinant(Importer& m, ValueId x, int64_t n) {
  const auto rows = static_cast<int64_t>(m.rank(x)) - 2;
  Dims lead = m.dims(x);
  lead.resize(lead.size() - 2);
  if (n == 1) return m.reshape(x, lead);
  ValueId below = m.slice(x, rows, Dim(1), Dim(n), 1), sum = ir::kNoValue;
  for (int64_t c = 0; c < n; ++c) {
    std::vector<ValueId> kept;
    if (c > 0) kept.push_back(m.slice(below, rows + 1, Dim(0), Dim(c), 1));
    if (c + 1 < n) kept.push_back(m.slice(below, rows + 1, Dim(c + 1), Dim(n), 1));
    ValueId head = m.reshape(
        m.slice(m.slice(x, rows, Dim(0), Dim(1), 1), rows + 1, Dim(c), Dim(c + 1), 1), lead);
    ValueId term = m.op("mul", {head, determinant(m, m.concat(kept, rows + 1), n - 1)});
    if (sum == ir::kNoValue)
      sum = term;
    else
      sum = m.op(c % 2 == 0 ? "add" : "sub", {sum, term});
  }
  return sum;
}

void convert_det(Importer& m) {
  ValueId x = m.in(0);
  if (m.rank(x) < 2) m.refuse("matrices", m.type(x).str());
  const int64_t n = m.fixed(m.dims(x).back());
  if (n < 1 || n > 4 || n != m.fixed(m.dims(x)[m.rank(x) - 2]))
    m.refuse("matrices up to 4 by 4", m.type(x).str());
  m.out(determinant(m, x, n));
}

}  // namespace

void add_reductions(Table* table) {
  Table& t = *table;
  for (const char* name : {"ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum",
                           "ReduceLogSumExp"}) {
    t[name] = reduction("sum");
  }
  t["ReduceMean"] = reduction("mean");
  t["ReduceMax"] = reduction("max");
  t["ReduceMin"] = reduction("min");
  t["ReduceProd"] = reduction("prod");
  t["ArgMax"] = arg_reduction("argmax");
  t["ArgMin"] = arg_reduction("argmin");
  t["Hardmax"] = convert_hardmax;
  t["LpNormalization"] = convert_lp_norm;
  t["Det"] = convert_det;
}

}  // namespace rm::onnx
