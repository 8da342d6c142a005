// Quantised operators. Integer products are computed in floats that hold every sum exactly.
#include <cmath>

#include "onnx/windows.hpp"

namespace rm::onnx {
namespace {

using ir::DType;

struct Range {
  double low, high;
};

Range range_of(const Importer& m, DType dtype) {
  if (dtype == DType::kU8) return {0, 255};
  if (dtype == DType::kI8) return {-128, 127};
  if (dtype == DType::kI16) return {-32768, 32767};
  m.refuse("int8, uint8 or int16", std::string(ir::name(dtype)));
}

// A scale or zero point shaped to broadcast with x: one, one an element of `axis`, or one a block.
ValueId spread(Importer& m, ValueId v, const Dims& x, int64_t axis) {
  Dims d = m.dims(v);
  if (m.type(v).is_static() && m.type(v).num_elements() == 1) return m.reshape(v, {});
  if (d.size() == 1) {
    Dims shape(x.size(), Dim(1));
    shape[static_cast<size_t>(m.axis(axis, x.size()))] = d[0];
    return m.reshape(v, shape);
  }
  const int64_t block = m.i("block_size", 0);
  if (d.size() != x.size() || block < 1)
    m.refuse("a scale for all, an axis or blocks", m.type(v).str());
  const auto a = static_cast<size_t>(m.axis(axis, x.size()));
  Dims split = d, wide = d;
  split.insert(split.begin() + static_cast<std::ptrdiff_t>(a) + 1, Dim(1));
  wide.insert(wide.begin() + static_cast<std::ptrdiff_t>(a) + 1, Dim(block));
  d[a] = d[a] * Dim(block);
  ValueId y = m.reshape(m.expand(m.reshape(v, split), wide), d);
  if (d[a] != x[a]) y = m.slice(y, static_cast<int64_t>(a), Dim(0), x[a], 1);
  return y;
}

// round(x / scale) + zero, held within the type.
ValueId quantised(Importer& m, ValueId x, ValueId scale, ValueId zero, DType to,
                  bool divides = true) {
  const Range r = range_of(m, to);
  ValueId y = m.op("round", {divides ? m.op("div", {x, scale}) : x});
  if (zero != ir::kNoValue) y = m.op("add", {y, m.cast(zero, m.dtype(y))});
  y = m.op("minimum", {m.op("maximum", {y, m.number(y, r.low)}), m.number(y, r.high)});
  return m.cast(y, to);
}

DType asked(const Importer& m, DType otherwise) {
  const int64_t to = m.i("output_dtype", 0);
  return to == 0 ? otherwise : dtype_of(to, m.node().op);
}

void convert_quantize(Importer& m) {
  ValueId x = m.cast(m.in(0), DType::kF32);
  const int64_t axis = m.i("axis", 1);
  ValueId scale = spread(m, m.cast(m.in(1), DType::kF32), m.dims(x), axis), zero = ir::kNoValue;
  DType to = asked(m, DType::kU8);
  if (m.has(2)) {
    to = m.dtype(m.in(2));
    zero = spread(m, m.in(2), m.dims(x), axis);
  }
  m.out(quantised(m, x, scale, zero, to));
}

void convert_dequantize(Importer& m) {
  ValueId x = m.in(0), given = m.in(1);
  const int64_t axis = m.i("axis", 1);
  ValueId y = m.cast(x, DType::kF32);
  if (m.has(2)) y = m.op("sub", {y, m.cast(spread(m, m.in(2), m.dims(x), axis), DType::kF32)});
  y = m.op("mul", {y, spread(m, m.cast(given, DType::kF32), m.dims(x), axis)});
  m.out(m.cast(y, asked(m, m.dtype(given))));
}

void convert_dynamic_quantize(Importer& m) {
  ValueId x = m.in(0), zero = m.number(x, 0);
  Ints axes;
  for (size_t k = 0; k < m.rank(x); ++k) axes.push_back(static_cast<int64_t>(k));
  ValueId high = m.op("maximum", {m.reduce("max", x, axes, false), zero});
  ValueId low = m.op("minimum", {m.reduce("min", x, axes, false), zero});
  ValueId scale = m.op("div", {m.op("sub", {high, low}), m.number(x, 255)});
  scale = m.op("where", {m.op("eq", {scale, zero}), m.number(x, 1), scale});
  ValueId point = quantised(m, m.op("neg", {low}), scale, ir::kNoValue, DType::kU8);
  m.out(quantised(m, x, scale, point, DType::kU8));
  m.out(scale, 1);
  m.out(point, 2);
}

// Integers less their zero point, in floats that sum `terms` products of 8 bits without rounding.
DType exact(const Importer& m, const Dim& terms) {
  return m.fixed(terms) <= 256 ? DType::kF32 : DType::kF64;
}

ValueId centred(Importer& m, size_t input, size_t zero, DType in, int64_t axis) {
  ValueId x = m.in(input), y = m.cast(x, in);
  const DType dtype = m.dtype(x);
  if (dtype != DType::kU8 && dtype != DType::kI8) m.refuse("int8 or uint8", m.type(x).str());
  if (!m.has(zero)) return y;
  return m.op("sub", {y, m.cast(spread(m, m.in(zero), m.dims(x), axis), in)});
}

void convert_integer_product(Importer& m) {
  const Dims d = m.dims(m.in(0));
  if (d.empty()) m.refuse("vectors or matrices", "a scalar");
  const DType in = exact(m, d.back());
  m.out(m.cast(product(m, centred(m, 0, 2, in, -2), centred(m, 1, 3, in, -1)), DType::kI32));
}

Dim terms_of(Importer& m, size_t w) {
  const Dims d = m.dims(m.in(w));
  return d.size() < 3 ? Dim(0) : ir::product(Dims(d.begin() + 1, d.end()));
}

void convert_integer_convolution(Importer& m) {
  const DType in = exact(m, terms_of(m, 1));
  ValueId y = convolution(m, centred(m, 0, 2, in, 1), centred(m, 1, 3, in, 0), ir::kNoValue);
  m.out(m.cast(y, DType::kI32));
}

// Products of integers, times the scales of both, in the scale of the result.
ValueId requantised(Importer& m, ValueId sums, ValueId scale, size_t out_scale) {
  ValueId factor = m.op("div", {scale, m.reshape(m.cast(m.in(out_scale), DType::kF32), {})});
  ValueId y = m.op("mul", {sums, m.cast(factor, m.dtype(sums))});
  const DType to = m.has(out_scale + 1) ? m.dtype(m.in(out_scale + 1)) : DType::kU8;
  ValueId zero = m.has(out_scale + 1) ? m.reshape(m.in(out_scale + 1), {}) : ir::kNoValue;
  return quantised(m, y, ir::kNoValue, zero, to, false);
}

void convert_quantised_product(Importer& m) {
  const Dims d = m.dims(m.in(0)), db = m.dims(m.in(3));
  if (d.size() < 2 || db.size() < 2) m.refuse("matrices", "vectors");
  const DType in = exact(m, d.back());
  ValueId sums = product(m, centred(m, 0, 2, in, -2), centred(m, 3, 5, in, -1));
  ValueId a = spread(m, m.cast(m.in(1), DType::kF32), m.dims(sums), -2);
  ValueId b = spread(m, m.cast(m.in(4), DType::kF32), m.dims(sums), -1);
  m.out(requantised(m, sums, m.op("mul", {a, b}), 6));
}

void convert_quantised_convolution(Importer& m) {
  const DType in = exact(m, terms_of(m, 3));
  ValueId bias = m.has(8) ? m.cast(m.in(8), in) : ir::kNoValue;
  ValueId sums = convolution(m, centred(m, 0, 2, in, 1), centred(m, 3, 5, in, 0), bias);
  ValueId x = m.reshape(m.cast(m.in(1), DType::kF32), {});
  ValueId w = spread(m, m.cast(m.in(4), DType::kF32), m.dims(sums), 1);
  m.out(requantised(m, sums, m.op("mul", {x, w}), 6));
}

}  // namespace

void add_quantised(Table* table) {
  Table& t = *table;
  t["QuantizeLinear"] = convert_quantize;
  t["DequantizeLinear"] = convert_dequantize;
  t["DynamicQuantizeLinear"] = convert_dynamic_quantize;
  t["MatMulInteger"] = convert_integer_product;
  t["ConvInteger"] = convert_integer_convolution;
  t["QLinearMatMul"] = convert_quantised_product;
  t["QLinearConv"] = convert_quantised_convolution;
}

}  // namespace rm::onnx
