// Products and convolutions.
#include <algorithm>

#include "onnx/windows.hpp"

namespace rm::onnx {

ValueId product(Importer& m, ValueId a, ValueId b) {
  const Dims da = m.dims(a), db = m.dims(b);
  if (da.empty() || db.empty()) m.refuse("vectors or matrices", "a scalar");
  if (da.size() == 1) a = m.reshape(a, {Dim(1), da[0]});
  if (db.size() == 1) b = m.reshape(b, {db[0], Dim(1)});
  ValueId y = m.op("matmul", {a, b});
  Dims shape = m.dims(y);
  if (db.size() == 1) shape.pop_back();
  if (da.size() == 1) shape.erase(shape.end() - (db.size() == 1 ? 1 : 2));
  return m.reshape(y, shape);
}

namespace {

void convert_gemm(Importer& m) {
  ValueId a = m.in(0), b = m.in(1);
  if (m.rank(a) != 2 || m.rank(b) != 2) m.refuse("matrices", "another rank");
  if (m.i("transA", 0) != 0) a = m.permute(a, {1, 0});
  if (m.i("transB", 0) == 0) b = m.permute(b, {1, 0});
  const double alpha = m.f("alpha", 1), beta = m.f("beta", 1);
  ValueId c = m.in_or_none(2);
  if (c != ir::kNoValue && beta != 1) c = m.op("mul", {c, m.number(c, beta)});
  if (alpha == 1 && c != ir::kNoValue && m.rank(c) == 1 && m.dims(c)[0] == m.dims(b)[0]) {
    return m.out(m.op("linear", {a, b, c}));
  }
  ValueId y = m.op("linear", {a, b});
  if (alpha != 1) y = m.op("mul", {y, m.number(y, alpha)});
  m.out(c == ir::kNoValue ? y : m.op("add", {y, c}));
}

// Pads of a transposed convolution that gives the asked sizes, or as many places as steps.
void pads_for_sizes(const Importer& m, const Dims& x, const Ints& kernel, ir::Attrs* attrs) {
  const size_t n = kernel.size();
  const std::string mode = m.s("auto_pad", "NOTSET");
  Ints wanted = m.ints("output_shape").value_or(Ints{});
  const Ints stride = std::get<Ints>(attrs->at("stride")),
             dilation = std::get<Ints>(attrs->at("dilation"));
  Ints extra = std::get<Ints>(attrs->at("output_padding"));
  if (wanted.empty() && (mode == "NOTSET" || mode == "VALID")) return;
  if (wanted.size() > n)
    wanted.erase(wanted.begin(), wanted.end() - static_cast<std::ptrdiff_t>(n));
  if (wanted.empty()) {
    for (size_t k = 0; k < n; ++k) wanted.push_back(m.fixed(x[k + 2]) * stride[k]);
  }
  if (wanted.size() != n || extra.size() != n) m.refuse("a size for each spatial axis", "others");
  Ints pads(2 * n, 0);
  for (size_t k = 0; k < n; ++k) {
    const int64_t off = (m.fixed(x[k + 2]) - 1) * stride[k] + extra[k] +
                        (kernel[k] - 1) * dilation[k] + 1 - wanted[k];
    const int64_t total = std::max<int64_t>(off, 0);
    extra[k] += total - off;  // larger than the windows reach: zeros at the end
    pads[k] = mode == "SAME_UPPER" ? total / 2 : total - total / 2;
    pads[k + n] = total - pads[k];
  }
  (*attrs)["padding"] = pads;
  (*attrs)["output_padding"] = extra;
}

}  // namespace

ValueId convolution(Importer& m, ValueId x, ValueId w, ValueId bias) {
  const bool is_transposed = m.node().op == "ConvTranspose";
  const Dims dx = m.dims(x), dw = m.dims(w);
  if (dw.size() < 3 || dx.size() != dw.size())
    m.refuse("x and w of one rank of at least 3", "others");
  Ints kernel;
  for (size_t k = 2; k < dw.size(); ++k) kernel.push_back(m.fixed(dw[k]));
  ir::Attrs attrs = windows(m, dx, kernel, !is_transposed);
  attrs["groups"] = m.i("group", 1);
  attrs["transposed"] = static_cast<int64_t>(is_transposed);
  if (is_transposed) {
    attrs["output_padding"] = m.ints("output_padding").value_or(Ints(kernel.size(), 0));
    pads_for_sizes(m, dx, kernel, &attrs);
  }
  std::vector<ValueId> operands{x, w};
  if (bias != ir::kNoValue) operands.push_back(bias);
  return m.op("conv", operands, attrs);
}

void add_layers(Table* table) {
  Table& t = *table;
  t["MatMul"] = [](Importer& m) { m.out(product(m, m.in(0), m.in(1))); };
  t["Gemm"] = convert_gemm;
  t["Conv"] = t["ConvTranspose"] = [](Importer& m) {
    m.out(convolution(m, m.in(0), m.in(1), m.in_or_none(2)));
  };
}

}  // namespace rm::onnx
