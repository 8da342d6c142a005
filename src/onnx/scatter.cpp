// Operators that write elements at places given by indices.
#include "onnx/importer.hpp"

namespace rm::onnx {
namespace {

// Negative indices count from the end.
ValueId from_start(Importer& m, ValueId index, const Dim& size) {
  index = m.cast(index, ir::DType::kI64);
  ValueId behind = m.op("add", {index, m.number(index, static_cast<double>(m.fixed(size)))});
  return m.op("where", {m.op("lt", {index, m.number(index, 0)}), behind, index});
}

std::string combined(const Importer& m) {
  const std::string kind = m.s("reduction", "none");
  if (kind == "none") return "set";
  if (kind == "add" || kind == "mul" || kind == "max" || kind == "min") return kind;
  m.refuse("none, add, mul, max or min", kind);
}

ValueId scattered(Importer& m, ValueId x, ValueId index, ValueId src, int64_t axis,
                  const std::string& kind) {
  return m.op("scatter", {x, index, src}, {{"axis", axis}, {"kind", kind}});
}

void convert_scatter_elements(Importer& m) {
  ValueId x = m.in(0);
  const int64_t axis = m.axis(m.i("axis", 0), m.rank(x));
  ValueId index = from_start(m, m.in(1), m.dims(x)[static_cast<size_t>(axis)]);
  m.out(scattered(m, x, index, m.in(2), axis, combined(m)));
}

// The leading axes that an index names become one, and so does what follows them.
void convert_scatter_nd(Importer& m) {
  ValueId x = m.in(0), index = m.in(1);
  const Dims d = m.dims(x), di = m.dims(index);
  if (di.empty()) m.refuse("indices", "a scalar");
  const auto named = m.fixed(di.back());
  if (named < 1 || named > static_cast<int64_t>(d.size()))
    m.refuse("axes of the operand", std::to_string(named));
  const Dim n = ir::product(Dims(di.begin(), di.end() - 1));
  const Dim rest = ir::product(Dims(d.begin() + named, d.end()));
  index = m.reshape(index, {n, Dim(named)});
  ValueId at = ir::kNoValue;
  for (int64_t k = 0; k < named; ++k) {
    const Dim size = d[static_cast<size_t>(k)];
    ValueId part = from_start(m, m.slice(index, 1, Dim(k), Dim(k + 1), 1), size);
    if (at != ir::kNoValue) {
      part =
          m.op("add", {part, m.op("mul", {at, m.number(at, static_cast<double>(m.fixed(size)))})});
    }
    at = part;
  }
  ValueId flat = m.reshape(x, {ir::product(Dims(d.begin(), d.begin() + named)), rest});
  ValueId src = m.reshape(m.in(2), {n, rest});
  m.out(m.reshape(scattered(m, flat, m.expand(at, {n, rest}), src, 0, combined(m)), d));
}

// A cache [B,*,S,*] whose rows from write_indices[b] on are replaced.
void convert_tensor_scatter(Importer& m) {
  ValueId cache = m.in(0), update = m.in(1);
  const Dims d = m.dims(cache), du = m.dims(update);
  const int64_t axis = m.axis(m.i("axis", -2), d.size());
  if (axis == 0 || du.size() != d.size())
    m.refuse("an axis behind the batch", std::to_string(axis));
  const auto a = static_cast<size_t>(axis);
  Dims along(d.size(), Dim(1)), batch(d.size(), Dim(1));
  along[a] = du[a];
  batch[0] = d[0];
  ValueId at = m.reshape(m.count(du[a]), along);
  if (m.has(2)) at = m.op("add", {at, m.reshape(m.cast(m.in(2), ir::DType::kI64), batch)});
  if (m.s("mode", "linear") == "circular") {
    at = m.op("remainder", {at, m.number(at, static_cast<double>(m.fixed(d[a])))});
  }
  m.out(m.op("scatter", {cache, m.expand(at, du), update},
             {{"axis", axis}, {"kind", std::string("set")}}));
}

}  // namespace

void add_scatter(Table* table) {
  Table& t = *table;
  t["ScatterElements"] = t["Scatter"] = convert_scatter_elements;
  t["ScatterND"] = convert_scatter_nd;
  t["TensorScatter"] = convert_tensor_scatter;
}

}  // namespace rm::onnx
