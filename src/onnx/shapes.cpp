// Operators that move, choose or describe elements without computing with them.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "onnx/importer.hpp"
#include "ops/infer.hpp"

namespace rm::onnx {
namespace {

void convert_shape(Importer& m) {
  Dims dims = m.dims(m.in(0));
  const auto n = static_cast<int64_t>(dims.size());
  int64_t start = m.i("start", 0), end = m.i("end", n);
  start = std::clamp(start < 0 ? start + n : start, int64_t{0}, n);
  end = std::clamp(end < 0 ? end + n : end, start, n);
  m.out_sizes(Dims(dims.begin() + start, dims.begin() + end), false);
}

void convert_constant(Importer& m) {
  if (const Attribute* a = m.attribute("value")) return m.out(m.literal(a->tensor));
  if (m.attribute("value_int")) return m.out_sizes({Dim(m.i("value_int", 0))}, true);
  if (auto values = m.ints("value_ints"))
    return m.out_sizes(Dims(values->begin(), values->end()), false);
  Tensor t;
  t.dtype = 1;
  if (m.attribute("value_float")) {
    t.reals = {m.f("value_float", 0)};
  } else if (const Attribute* a = m.attribute("value_floats")) {
    t.reals = a->reals;
    t.dims = {static_cast<int64_t>(a->reals.size())};
  } else {
    m.refuse("a tensor or numbers", "another kind of constant");
  }
  m.out(m.literal(t));
}

void convert_reshape(Importer& m) {
  ValueId x = m.in(0);
  const Dims from = m.dims(x), wanted = m.known(1, "a shape");
  Dims shape;
  size_t open = wanted.size();
  for (size_t k = 0; k < wanted.size(); ++k) {
    Dim d = wanted[k];
    if (d == Dim(0) && m.i("allowzero", 0) == 0) {
      if (k >= from.size()) m.refuse("sizes to keep", "more than the operand has");
      d = from[k];
    }
    if (d == Dim(-1)) {
      if (open != wanted.size()) m.refuse("one size -1", "two");
      open = k;
      shape.emplace_back(1);
      continue;
    }
    shape.push_back(d);
  }
  if (open != wanted.size()) {
    Dims rest = shape, over = from;  // what cancels needs no division
    rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(open));
    for (auto it = rest.begin(); it != rest.end();) {
      auto same = std::find(over.begin(), over.end(), *it);
      if (same == over.end()) {
        ++it;
        continue;
      }
      over.erase(same);
      it = rest.erase(it);
    }
    const Dim divisor = ir::product(rest);
    if (divisor == Dim(0)) m.refuse("sizes that leave one for -1", "a size 0");
    shape[open] = divisor == Dim(1) ? ir::product(over) : Dim::floordiv(ir::product(over), divisor);
  }
  if (m.sizes(0) && shape.size() <= 1) return m.out_sizes(*m.sizes(0), shape.empty());
  m.out(m.reshape(x, shape));
}

void convert_flatten(Importer& m) {
  ValueId x = m.in(0);
  const Dims d = m.dims(x);
  const auto n = static_cast<int64_t>(d.size());
  const int64_t given = m.i("axis", 1), axis = given < 0 ? given + n : given;
  if (axis < 0 || axis > n) m.refuse("an axis of the operand", std::to_string(given));
  m.out(m.reshape(x, {ir::product(Dims(d.begin(), d.begin() + axis)),
                      ir::product(Dims(d.begin() + axis, d.end()))}));
}

void convert_unsqueeze(Importer& m) {
  std::optional<Ints> raw = m.ints("axes");
  if (!raw) raw = m.integers(1, "axes");
  if (m.sizes(0) && m.is_scalar(0) && raw->size() == 1) return m.out_sizes(*m.sizes(0), false);
  ValueId x = m.in(0);
  const size_t n = m.rank(x) + raw->size();
  std::vector<char> is_new(n, 0);
  for (int64_t a : *raw) {
    if (is_new[static_cast<size_t>(m.axis(a, n))]++ != 0) m.refuse("different axes", "one twice");
  }
  Dims shape, from = m.dims(x);
  auto next = from.begin();
  for (size_t k = 0; k < n; ++k) shape.push_back(is_new[k] ? Dim(1) : *next++);
  m.out(m.reshape(x, shape));
}

void convert_squeeze(Importer& m) {
  if (m.sizes(0) && m.sizes(0)->size() == 1) return m.out_sizes(*m.sizes(0), true);
  ValueId x = m.in(0);
  std::optional<Ints> axes = m.axes(1, m.rank(x));
  Dims shape, from = m.dims(x);
  for (size_t k = 0; k < from.size(); ++k) {
    const bool is_named =
        axes && std::find(axes->begin(), axes->end(), static_cast<int64_t>(k)) != axes->end();
    if (is_named && from[k].value_or(1) != 1) m.refuse("a size 1", from[k].str());
    if (axes ? !is_named : Dim(m.fixed(from[k])) != Dim(1)) shape.push_back(from[k]);
  }
  m.out(m.reshape(x, shape));
}

void convert_transpose(Importer& m) {
  ValueId x = m.in(0);
  Ints axes = m.ints("perm").value_or(Ints{});
  if (!m.attribute("perm")) {
    for (size_t k = m.rank(x); k-- > 0;) axes.push_back(static_cast<int64_t>(k));
  }
  m.out(m.permute(x, axes));
}

void convert_concat(Importer& m) {
  Dims joined;
  bool is_sizes = true;
  for (size_t k = 0; k < m.node().inputs.size() && is_sizes; ++k) {
    std::optional<Dims> part = m.sizes(k);
    is_sizes = part && !m.is_scalar(k);
    if (is_sizes) joined.insert(joined.end(), part->begin(), part->end());
  }
  if (is_sizes) return m.out_sizes(joined, false);
  std::vector<ValueId> parts;
  for (size_t k = 0; k < m.node().inputs.size(); ++k) parts.push_back(m.in(k));
  if (parts.empty()) m.refuse("operands", "none");
  if (parts.size() == 1) return m.out(parts[0]);
  m.out(m.op("concat", parts, {{"axis", m.axis(m.i("axis", 0), m.rank(parts[0]))}}));
}

// A bound of Slice on a size, as ONNX clamps it.
Dim bound(const Dim& given, const Dim& size) {
  if (!given.is_static()) return size.is_static() || given == size ? Dim::min(given, size) : given;
  const int64_t v = given.value();
  if (size.is_static()) {
    const int64_t s = size.value();
    return Dim(std::clamp(v < 0 ? (v < -s ? 0 : v + s) : v, int64_t{0}, s));
  }
  if (v == 0) return Dim(0);
  if (v >= INT32_MAX) return size;
  return v < 0 ? Dim::max(size + Dim(v), Dim(0)) : Dim::min(Dim(v), size);
}

// The elements that a step below zero meets.
ValueId backwards(Importer& m, int64_t start, int64_t stop, int64_t step, int64_t size) {
  if (step == 0 || step < -(int64_t{1} << 40)) m.refuse("a step", std::to_string(step));
  start = std::clamp(start < 0 ? std::max(start, -size - 1) + size : start, int64_t{-1}, size - 1);
  stop = std::clamp(stop < 0 ? std::max(stop, -size - 1) + size : stop, int64_t{-1}, size - 1);
  const int64_t n = std::max<int64_t>((start - stop - step - 1) / -step, 0);
  return m.count(Dim(n), Dim(std::max<int64_t>(start, 0)), step);
}

void convert_slice(Importer& m) {
  Dims starts, stops;
  Ints steps;
  std::optional<Ints> axes = m.ints("axes");
  if (m.opset() < 10) {
    const Ints from = m.ints("starts").value_or(Ints{}), to = m.ints("ends").value_or(Ints{});
    starts.assign(from.begin(), from.end());
    stops.assign(to.begin(), to.end());
  } else {
    starts = m.known(1, "starts");
    stops = m.known(2, "ends");
    if (m.has(3)) axes = m.integers(3, "axes");
    if (m.has(4)) steps = m.integers(4, "steps");
  }
  if (steps.empty()) steps.assign(starts.size(), 1);
  if (!axes) {
    axes = Ints{};
    for (size_t k = 0; k < starts.size(); ++k) axes->push_back(static_cast<int64_t>(k));
  }
  if (stops.size() != starts.size() || axes->size() != starts.size() ||
      steps.size() != starts.size()) {
    m.refuse("as many starts as ends, axes and steps", "other numbers");
  }
  std::optional<Dims> sizes = m.sizes(0);
  if (sizes && starts.size() == 1 && steps[0] == 1 && !m.is_scalar(0)) {
    const Dim n(static_cast<int64_t>(sizes->size()));
    const Dim a = bound(starts[0], n), b = bound(stops[0], n);
    if (a.is_static() && b.is_static()) {
      const int64_t last = std::max(a.value(), b.value());
      return m.out_sizes(Dims(sizes->begin() + a.value(), sizes->begin() + last), false);
    }
  }
  ValueId y = m.in(0);
  for (size_t k = 0; k < starts.size(); ++k) {
    const int64_t axis = m.axis((*axes)[k], m.rank(y));
    const Dim size = m.dims(y)[static_cast<size_t>(axis)];
    if (steps[k] < 1) {
      y = m.take(y, axis,
                 backwards(m, m.fixed(starts[k]), m.fixed(stops[k]), steps[k], m.fixed(size)));
      continue;
    }
    Dim a = bound(starts[k], size), b = bound(stops[k], size);
    if (a.is_static() && b.is_static() && b.value() < a.value()) b = a;
    if (a == Dim(0) && b == size && steps[k] == 1) continue;
    y = m.slice(y, axis, a, b, steps[k]);
  }
  m.out(y);
}

void convert_gather(Importer& m) {
  std::optional<Dims> sizes = m.sizes(0), index = m.sizes(1);
  if (sizes && index && !m.is_scalar(0)) {
    const auto n = static_cast<int64_t>(sizes->size());
    Dims made;
    for (const Dim& d : *index) {
      const int64_t at = d.value_or(n);
      if (at < -n || at >= n) break;
      made.push_back((*sizes)[static_cast<size_t>(at < 0 ? at + n : at)]);
    }
    if (made.size() == index->size()) return m.out_sizes(made, m.is_scalar(1));
  }
  ValueId x = m.in(0);
  m.out(m.op("index", {x, m.in(1)}, {{"axes", Ints{m.axis(m.i("axis", 0), m.rank(x))}}}));
}

void convert_gather_nd(Importer& m) {
  ValueId x = m.in(0), index = m.in(1);
  Dims shape = m.dims(index);
  if (shape.empty() || !shape.back().is_static()) m.refuse("a number of axes", "another index");
  const int64_t batch = m.i("batch_dims", 0), last = static_cast<int64_t>(shape.size()) - 1;
  const auto count = static_cast<size_t>(shape.back().value());
  if (batch < 0 || batch > last || count < 1 || count + static_cast<size_t>(batch) > m.rank(x)) {
    m.refuse("axes of the operand", std::to_string(count));
  }
  shape.pop_back();
  std::vector<ValueId> operands{x};
  Ints axes;
  for (int64_t a = 0; a < batch; ++a) {
    Dims along(shape.size(), Dim(1));
    along[static_cast<size_t>(a)] = shape[static_cast<size_t>(a)];
    operands.push_back(m.reshape(m.count(shape[static_cast<size_t>(a)]), along));
    axes.push_back(a);
  }
  for (size_t k = 0; k < count; ++k) {
    const auto at = static_cast<int64_t>(k);
    operands.push_back(m.reshape(m.slice(index, last, Dim(at), Dim(at + 1), 1), shape));
    axes.push_back(batch + at);
  }
  m.out(m.op("index", operands, {{"axes", axes}}));
}

void convert_expand(Importer& m) {
  ValueId x = m.in(0);
  const Dims wanted = m.known(1, "a shape");
  // Of two named sizes the wanted one is the result's: the other is the same, or 1.
  m.out(
      m.op("expand", {x}, {{"shape", ops::broadcast({"expand", {}, {}, {}}, wanted, m.dims(x))}}));
}

void convert_constant_of_shape(Importer& m) {
  const Dims shape = m.known(0, "a shape");
  ir::TensorType type{ir::DType::kF32, shape};
  double value = 0;
  if (const Attribute* a = m.attribute("value")) {
    std::string storage;
    type.dtype = dtype_of(a->tensor.dtype, "'" + m.node().name + "'");
    const std::string bytes(tensor_bytes(a->tensor, &storage));
    const ValueId v = m.graph().add_literal({type.dtype, {Dim(1)}}, bytes);
    if (bytes.size() != ir::size_bytes(type.dtype)) m.refuse("one value", "several");
    value = ir::literal_element(m.graph(), v);
  }
  for (const Dim& d : shape) {
    if (d.value_or(0) < 0) m.refuse("sizes of at least 0", d.str());
  }
  if (type.dtype == ir::DType::kI64 && shape.size() == 1 && shape[0].is_static() &&
      shape[0].value() <= 64) {
    return m.out_sizes(
        Dims(static_cast<size_t>(shape[0].value()), Dim(static_cast<int64_t>(value))), false);
  }
  ir::Attr attr = value;
  if (!ir::is_floating(type.dtype)) attr = static_cast<int64_t>(value);
  m.out(m.typed("full", {}, {{"value", attr}}, type));
}

void convert_range(Importer& m) {
  if (ir::is_floating(m.dtype(m.in(0))) || m.dtype(m.in(0)) == ir::DType::kI16) {
    const auto a = m.reals(0, "a start"), b = m.reals(1, "a limit"), step = m.reals(2, "a step");
    if (a.size() != 1 || b.size() != 1 || step.size() != 1) m.refuse("numbers", "tensors");
    const double n = std::max(std::ceil((b[0] - a[0]) / step[0]), 0.0);
    if (!(n < 1 << 22)) m.refuse("a range that ends", "another");
    std::vector<double> values;
    for (int64_t k = 0; k < static_cast<int64_t>(n); ++k) {
      values.push_back(a[0] + static_cast<double>(k) * step[0]);
    }
    return m.out(m.floats(values, {Dim(static_cast<int64_t>(n))}, m.dtype(m.in(0))));
  }
  const ir::DType dtype = m.dtype(m.in(0));
  const Dims a = m.known(0, "a start"), b = m.known(1, "a limit");
  const Ints step = m.integers(2, "a step");
  if (a.size() != 1 || b.size() != 1 || step.size() != 1 || step[0] == 0 ||
      std::abs(step[0]) > (int64_t{1} << 40)) {
    m.refuse("integers that go up or down", "another range");
  }
  const int64_t each = std::abs(step[0]);
  const Dim length = step[0] > 0 ? b[0] - a[0] : a[0] - b[0];
  const Dim n = Dim::floordiv(length + Dim(each - 1), Dim(each));
  m.out(
      m.cast(m.count(Dim(n.is_static() ? Dim(std::max<int64_t>(n.value(), 0)) : n), a[0], step[0]),
             dtype));
}

void convert_split(Importer& m) {
  ValueId x = m.in(0);
  const int64_t axis = m.axis(m.i("axis", 0), m.rank(x));
  const Dim size = m.dims(x)[static_cast<size_t>(axis)];
  const auto count = static_cast<int64_t>(m.node().outputs.size());
  std::optional<Ints> given = m.ints("split");
  if (!given && m.has(1)) given = m.integers(1, "the sizes of parts");
  if (given && static_cast<int64_t>(given->size()) != count)
    m.refuse("a size for each part", "others");
  const int64_t parts = std::max<int64_t>(count, 1);
  if (!given) m.fixed(size);
  Dim start(0);
  for (int64_t k = 0; k < count; ++k) {
    const int64_t each = given ? 0 : (size.value() + parts - 1) / parts;
    const Dim stop = given ? start + Dim((*given)[static_cast<size_t>(k)])
                           : Dim(std::min(size.value(), (k + 1) * each));
    m.out(m.slice(x, axis, start, stop, 1), static_cast<size_t>(k));
    start = stop;
  }
}

// The axis moved by `by` places, ones or zeros in front.
ValueId shifted(Importer& m, ValueId x, int64_t axis, int64_t by, double fill) {
  const Dim n = m.dims(x)[static_cast<size_t>(axis)];
  Dims front = m.dims(x);
  front[static_cast<size_t>(axis)] = Dim(by);
  return m.concat({m.expand(m.number(x, fill), front), m.slice(x, axis, Dim(0), n - Dim(by), 1)},
                  axis);
}

// Products double their reach each step; sums have an operator.
Converter cumulative(bool is_sum) {
  return [is_sum](Importer& m) {
    ValueId x = m.in(0);
    const int64_t axis = m.axis(m.integer(1, "an axis"), m.rank(x));
    const int64_t n =
        is_sum && m.i("exclusive", 0) == 0 ? 1 : m.fixed(m.dims(x)[static_cast<size_t>(axis)]);
    const bool is_reverse = m.i("reverse", 0) != 0;
    ValueId y = is_reverse ? m.reversed(x, axis) : x;
    if (m.i("exclusive", 0) != 0 && n > 0) y = shifted(m, y, axis, 1, is_sum ? 0 : 1);
    if (is_sum) {
      y = m.cast(m.op("cumsum", {y}, {{"axis", axis}}), m.dtype(x));
    } else {
      for (int64_t reach = 1; reach < n; reach *= 2) {
        y = m.op("mul", {y, shifted(m, y, axis, reach, 1)});
      }
    }
    m.out(is_reverse ? m.reversed(y, axis) : y);
  };
}

void convert_one_hot(Importer& m) {
  ValueId index = m.in(0), values = m.in(2);
  const std::vector<double> given = m.reals(1, "a depth");
  if (given.size() != 1 || !(given[0] >= 0 && given[0] < 1 << 30)) m.refuse("a depth", "another");
  const Dim depth(static_cast<int64_t>(given[0]));
  Dims shape = m.dims(index);
  const int64_t axis = m.axis(m.i("axis", -1), shape.size() + 1);
  shape.insert(shape.begin() + axis, Dim(1));
  ValueId at = m.reshape(m.cast(index, ir::DType::kI64), shape);
  at = m.op("where",
            {m.op("lt", {at, m.number(at, 0)}), m.op("add", {at, m.number(at, given[0])}), at});
  Dims along(shape.size(), Dim(1));
  along[static_cast<size_t>(axis)] = depth;
  ValueId is_hot = m.op("eq", {at, m.reshape(m.count(depth), along)});
  auto value = [&](int64_t k) { return m.reshape(m.slice(values, 0, Dim(k), Dim(k + 1), 1), {}); };
  m.out(m.op("where", {is_hot, value(1), value(0)}));
}

void convert_top_k(Importer& m) {
  ValueId x = m.in(0);
  const int64_t axis = m.axis(m.i("axis", -1), m.rank(x));
  const int64_t k = m.opset() < 10 ? m.i("k", 1) : m.integer(1, "k");
  const Importer::Sorted best = m.sorted(x, axis, m.i("largest", 1) != 0, k);
  m.out(best.values);
  m.out(best.indices, 1);
}

void convert_reverse_sequence(Importer& m) {
  ValueId x = m.in(0), lengths = m.cast(m.in(1), ir::DType::kI64);
  const int64_t time = m.i("time_axis", 0), batch = m.i("batch_axis", 1);
  if (m.rank(x) < 2 || time + batch != 1 || time * batch != 0) m.refuse("axes 0 and 1", "others");
  const Dims d = m.dims(x);
  Dims by_time(d.size(), Dim(1)), by_batch(d.size(), Dim(1));
  by_time[static_cast<size_t>(time)] = d[static_cast<size_t>(time)];
  by_batch[static_cast<size_t>(batch)] = d[static_cast<size_t>(batch)];
  ValueId step = m.reshape(m.count(d[static_cast<size_t>(time)]), by_time);
  ValueId length = m.reshape(lengths, by_batch);
  ValueId back = m.op("sub", {m.op("sub", {length, step}), m.number(length, 1)});
  ValueId at = m.op("where", {m.op("lt", {step, length}), back, step});
  m.out(m.op("gather", {x, m.expand(at, d)}, {{"axis", time}}));
}

void convert_eye(Importer& m) {
  ValueId x = m.in(0);
  if (m.rank(x) != 2) m.refuse("a matrix", m.type(x).str());
  const Dims d = m.dims(x);
  const ir::DType dtype = m.attribute("dtype") ? dtype_of(m.i("dtype", 1), "EyeLike") : m.dtype(x);
  ValueId off = m.op("sub", {m.count(d[1]), m.reshape(m.count(d[0]), {d[0], Dim(1)})});
  m.out(m.cast(m.op("eq", {off, m.number(off, static_cast<double>(m.i("k", 0)))}), dtype));
}

}  // namespace

void add_shapes(Table* table) {
  Table& t = *table;
  t["Shape"] = convert_shape;
  t["Size"] = [](Importer& m) { m.out_sizes({ir::product(m.dims(m.in(0)))}, true); };
  t["Constant"] = convert_constant;
  t["ConstantOfShape"] = convert_constant_of_shape;
  t["Reshape"] = convert_reshape;
  t["Flatten"] = convert_flatten;
  t["Unsqueeze"] = convert_unsqueeze;
  t["Squeeze"] = convert_squeeze;
  t["Transpose"] = convert_transpose;
  t["Concat"] = convert_concat;
  t["Slice"] = convert_slice;
  t["Gather"] = convert_gather;
  t["GatherElements"] = [](Importer& m) {
    ValueId x = m.in(0), index = m.in(1);
    const int64_t axis = m.axis(m.i("axis", 0), m.rank(x));
    const Dim size = m.dims(x)[static_cast<size_t>(axis)];
    m.fixed(size);
    ValueId behind = m.op("add", {index, m.number(index, static_cast<double>(size.value()))});
    ValueId at = m.op("where", {m.op("lt", {index, m.number(index, 0)}), behind, index});
    m.out(m.op("gather", {x, at}, {{"axis", axis}}));
  };
  t["GatherND"] = convert_gather_nd;
  t["Expand"] = convert_expand;
  t["Range"] = convert_range;
  t["Split"] = convert_split;
  t["CumSum"] = cumulative(true);
  t["CumProd"] = cumulative(false);
  t["OneHot"] = convert_one_hot;
  t["TopK"] = convert_top_k;
  t["ReverseSequence"] = convert_reverse_sequence;
  t["EyeLike"] = convert_eye;
  t["Identity"] = [](Importer& m) {
    if (m.sizes(0)) return m.out_sizes(*m.sizes(0), m.is_scalar(0));
    m.out(m.in(0));
  };
  t["Dropout"] = [](Importer& m) {
    ValueId x = m.in(0);
    if (m.has(2) && m.condition(m.entry(2)) && !(m.has(1) && m.reals(1, "a ratio").at(0) == 0)) {
      m.refuse("inference", "training");
    }
    m.out(x);
    if (m.wants(1))
      m.out(m.typed("full", {}, {{"value", int64_t{1}}}, {ir::DType::kBool, m.dims(x)}), 1);
  };
}

}  // namespace rm::onnx
