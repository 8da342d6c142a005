// Products, convolutions, pools, norms and softmax.
#include <algorithm>

#include "onnx/importer.hpp"

namespace rm::onnx {
namespace {

void convert_matmul(Importer& m) {
  ValueId a = m.in(0), b = m.in(1);
  const Dims da = m.dims(a), db = m.dims(b);
  if (da.empty() || db.empty()) m.refuse("vectors or matrices", "a scalar");
  if (da.size() == 1) a = m.reshape(a, {Dim(1), da[0]});
  if (db.size() == 1) b = m.reshape(b, {db[0], Dim(1)});
  ValueId y = m.op("matmul", {a, b});
  Dims shape = m.dims(y);
  if (db.size() == 1) shape.pop_back();
  if (da.size() == 1) shape.erase(shape.end() - (db.size() == 1 ? 1 : 2));
  m.out(m.reshape(y, shape));
}

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

int64_t fixed(const Importer& m, const Dim& d) {
  if (!d.is_static()) m.refuse("spatial sizes that are numbers", d.str());
  return d.value();
}

// stride, dilation and padding; `auto_pad` needs the sizes of x.
ir::Attrs windows(const Importer& m, const Dims& x, const Ints& kernel) {
  const size_t n = kernel.size();
  if (x.size() != n + 2) m.refuse(std::to_string(n) + " spatial axes", std::to_string(x.size() - 2));
  Ints strides = m.ints("strides").value_or(Ints(n, 1));
  Ints dilations = m.ints("dilations").value_or(Ints(n, 1));
  Ints pads = m.ints("pads").value_or(Ints(2 * n, 0));
  const std::string mode = m.s("auto_pad", "NOTSET");
  if (strides.size() != n || dilations.size() != n || pads.size() != 2 * n) {
    m.refuse("strides, dilations and pads for each spatial axis", "another number of them");
  }
  for (const Ints& list : {kernel, strides, dilations}) {
    for (int64_t v : list) {
      if (v < 1 || v > (int64_t{1} << 30)) m.refuse("windows of at least 1", std::to_string(v));
    }
  }
  if (mode == "SAME_UPPER" || mode == "SAME_LOWER") {
    for (size_t k = 0; k < n; ++k) {
      const int64_t size = fixed(m, x[k + 2]), stride = strides[k];
      const int64_t steps = (size + stride - 1) / stride;
      const int64_t reach = (kernel[k] - 1) * dilations[k] + 1;
      const int64_t total = std::max<int64_t>((steps - 1) * stride + reach - size, 0);
      pads[k] = mode == "SAME_UPPER" ? total / 2 : total - total / 2;
      pads[k + n] = total - pads[k];
    }
  } else if (mode == "VALID") {
    pads.assign(2 * n, 0);
  }
  return {{"stride", strides}, {"dilation", dilations}, {"padding", pads}};
}

void convert_conv(Importer& m) {
  ValueId x = m.in(0), w = m.in(1);
  const bool is_transposed = m.node().op == "ConvTranspose";
  const Dims dx = m.dims(x), dw = m.dims(w);
  if (dw.size() < 3 || dx.size() != dw.size()) m.refuse("x and w of one rank of at least 3", "others");
  Ints kernel;
  for (size_t k = 2; k < dw.size(); ++k) kernel.push_back(fixed(m, dw[k]));
  if (is_transposed && (m.s("auto_pad", "NOTSET") != "NOTSET" || m.attribute("output_shape"))) {
    m.refuse("padding that is written out", "auto_pad or output_shape");
  }
  ir::Attrs attrs = windows(m, dx, kernel);
  attrs["groups"] = m.i("group", 1);
  attrs["transposed"] = static_cast<int64_t>(is_transposed);
  if (is_transposed) {
    attrs["output_padding"] = m.ints("output_padding").value_or(Ints(kernel.size(), 0));
  }
  std::vector<ValueId> operands{x, w};
  if (m.has(2)) operands.push_back(m.in(2));
  m.out(m.op("conv", operands, attrs));
}

Converter pool(std::string kind) {
  return [kind](Importer& m) {
    ValueId x = m.in(0);
    if (!ir::is_floating(m.type(x).dtype)) m.refuse("floats", m.type(x).str());
    const Ints kernel = m.ints("kernel_shape").value_or(Ints{});
    if (kernel.empty() || m.i("storage_order", 0) != 0) m.refuse("a kernel in row order", "another");
    if (m.i("ceil_mode", 0) != 0) m.refuse("windows that lie inside", "ceil_mode=1");
    ir::Attrs attrs = windows(m, m.dims(x), kernel);
    attrs["kernel"] = kernel;
    attrs["kind"] = kind;
    if (kind == "mean") attrs["count_include_pad"] = m.i("count_include_pad", 0);
    m.out(m.op("pool", {x}, attrs));
  };
}

Converter global_pool(std::string kind) {
  return [kind](Importer& m) {
    ValueId x = m.in(0);
    Ints axes;
    for (size_t k = 2; k < m.rank(x); ++k) axes.push_back(static_cast<int64_t>(k));
    m.out(m.reduce(kind, x, axes, true));
  };
}

// One value a channel, shaped to broadcast over [N,C,*].
ValueId by_channel(Importer& m, ValueId v, size_t rank) {
  Dims shape(rank - 1, Dim(1));
  shape[0] = m.dims(v).at(0);
  return m.reshape(v, shape);
}

void convert_batch_norm(Importer& m) {
  if (m.i("training_mode", 0) != 0 || m.i("is_test", 1) == 0) m.refuse("inference", "training");
  ValueId x = m.in(0);
  if (m.rank(x) < 2) m.refuse("channels", "a vector");
  for (size_t k = 1; k < 5; ++k) {
    if (m.rank(m.in(k)) != 1) m.refuse("one value a channel", "another rank");
  }
  ValueId var = m.in(4);
  ValueId root = m.op("rsqrt", {m.op("add", {var, m.number(var, m.f("epsilon", 1e-5))})});
  ValueId scale = m.op("mul", {root, m.in(1)});
  ValueId shift = m.op("sub", {m.in(2), m.op("mul", {m.in(3), scale})});
  ValueId y = m.op("mul", {x, by_channel(m, scale, m.rank(x))});
  m.out(m.op("add", {y, by_channel(m, shift, m.rank(x))}));
}

void convert_layer_norm(Importer& m) {
  ValueId x = m.in(0);
  const int64_t axis = m.axis(m.i("axis", -1), m.rank(x));
  if (m.node().outputs.size() > 1) m.refuse("one result", "mean or deviation as well");
  std::vector<ValueId> operands{x, m.in(1)};
  if (m.has(2)) operands.push_back(m.in(2));
  m.out(m.op("layer_norm", operands,
             {{"eps", m.f("epsilon", 1e-5)},
              {"num_axes", static_cast<int64_t>(m.rank(x)) - axis}}));
}

void convert_rms_norm(Importer& m) {
  ValueId x = m.in(0);
  const size_t n = m.rank(x);
  if (m.axis(m.i("axis", -1), n) != static_cast<int64_t>(n) - 1 || m.rank(m.in(1)) != 1) {
    m.refuse("the last axis", "others");
  }
  m.out(m.op("rms_norm", {x, m.in(1)}, {{"eps", m.f("epsilon", 1e-5)}, {"weight_offset", 0.0}}));
}

void convert_instance_norm(Importer& m) {
  ValueId x = m.in(0);
  if (m.rank(x) < 3) m.refuse("spatial axes", "none");
  m.out(m.op("group_norm", {x, m.in(1), m.in(2)},
             {{"groups", fixed(m, m.dims(x)[1])}, {"eps", m.f("epsilon", 1e-5)}}));
}

void convert_softmax(Importer& m) {
  ValueId x = m.in(0);
  const Dims shape = m.dims(x);
  const int64_t log = m.node().op == "LogSoftmax" ? 1 : 0;
  const int64_t axis = m.axis(m.i("axis", m.opset() < 13 ? 1 : -1), shape.size());
  if (m.opset() >= 13) return m.out(m.op("softmax", {x}, {{"axis", axis}, {"log", log}}));
  ValueId flat = m.reshape(x, {ir::product(Dims(shape.begin(), shape.begin() + axis)),
                               ir::product(Dims(shape.begin() + axis, shape.end()))});
  m.out(m.reshape(m.op("softmax", {flat}, {{"axis", int64_t{1}}, {"log", log}}), shape));
}

}  // namespace

void add_layers(Table* table) {
  Table& t = *table;
  t["MatMul"] = convert_matmul;
  t["Gemm"] = convert_gemm;
  t["Conv"] = t["ConvTranspose"] = convert_conv;
  t["MaxPool"] = pool("max");
  t["AveragePool"] = pool("mean");
  t["GlobalAveragePool"] = global_pool("mean");
  t["GlobalMaxPool"] = global_pool("max");
  t["BatchNormalization"] = convert_batch_norm;
  t["LayerNormalization"] = convert_layer_norm;
  t["RMSNormalization"] = convert_rms_norm;
  t["InstanceNormalization"] = convert_instance_norm;
  t["Softmax"] = t["LogSoftmax"] = convert_softmax;
}

}  // namespace rm::onnx
