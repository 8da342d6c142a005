// Normalisations.
#include "onnx/importer.hpp"

namespace rm::onnx {
namespace {

// One value a channel, shaped to broadcast over [N,C,*].
ValueId by_channel(Importer& m, ValueId v, size_t rank) {
  Dims shape(rank - 1, Dim(1));
  shape[0] = m.dims(v).at(0);
  return m.reshape(v, shape);
}

void convert_batch_norm(Importer& m) {
  ValueId x = m.in(0);
  if (m.rank(x) < 2) m.refuse("channels", "a vector");
  for (size_t k = 1; k < 5; ++k) {
    if (m.rank(m.in(k)) != 1) m.refuse("one value a channel", "another rank");
  }
  ValueId mean = m.in(3), var = m.in(4);
  if (m.i("training_mode", 0) != 0 || m.i("is_test", 1) == 0) {
    Ints axes;
    for (size_t k = 0; k < m.rank(x); ++k) {
      if (k != 1) axes.push_back(static_cast<int64_t>(k));
    }
    const double momentum = m.f("momentum", 0.9);
    auto running = [&](ValueId old, ValueId now) {
      ValueId kept = m.op("mul", {old, m.number(old, momentum)});
      return m.op("add",
                  {kept, m.op("mul", {m.cast(now, m.dtype(old)), m.number(old, 1 - momentum)})});
    };
    ValueId seen = m.reduce("mean", x, axes, false);
    ValueId off = m.op("sub", {x, by_channel(m, seen, m.rank(x))});
    ValueId spread = m.reduce("mean", m.op("mul", {off, off}), axes, false);
    m.out(running(mean, seen), 1);
    m.out(running(var, spread), 2);
    mean = seen;
    var = spread;
  }
  ValueId root = m.op("rsqrt", {m.op("add", {var, m.number(var, m.f("epsilon", 1e-5))})});
  ValueId scale = m.op("mul", {root, m.in(1)});
  ValueId shift = m.op("sub", {m.in(2), m.op("mul", {mean, scale})});
  ValueId y = m.op("mul", {x, by_channel(m, m.cast(scale, m.dtype(x)), m.rank(x))});
  m.out(m.op("add", {y, by_channel(m, m.cast(shift, m.dtype(x)), m.rank(x))}));
}

Ints trailing(int64_t axis, size_t rank) {
  Ints axes;
  for (auto k = axis; k < static_cast<int64_t>(rank); ++k) axes.push_back(k);
  return axes;
}

void convert_layer_norm(Importer& m) {
  ValueId x = m.in(0);
  const int64_t axis = m.axis(m.i("axis", -1), m.rank(x));
  const double eps = m.f("epsilon", 1e-5);
  const Dims d = m.dims(x), over(d.begin() + axis, d.end());
  ir::Attrs attrs{{"eps", eps}, {"num_axes", static_cast<int64_t>(over.size())}};
  bool is_plain = m.dims(m.in(1)) == over && (!m.has(2) || m.dims(m.in(2)) == over);
  if (is_plain) {
    std::vector<ValueId> operands{x, m.in(1)};
    if (m.has(2)) operands.push_back(m.in(2));
    m.out(m.op("layer_norm", operands, attrs));
  } else {  // a weight that broadcasts
    ValueId y = m.op("mul", {m.op("layer_norm", {x}, attrs), m.in(1)});
    m.out(m.has(2) ? m.op("add", {y, m.in(2)}) : y);
  }
  if (!m.wants(1) && !m.wants(2)) return;
  const Ints axes = trailing(axis, d.size());
  ValueId wide = m.cast(x, ir::DType::kF32), mean = m.reduce("mean", wide, axes, true);
  ValueId off = m.op("sub", {wide, mean});
  ValueId var = m.reduce("mean", m.op("mul", {off, off}), axes, true);
  m.out(mean, 1);
  m.out(m.op("rsqrt", {m.op("add", {var, m.number(var, eps)})}), 2);
}

void convert_rms_norm(Importer& m) {
  ValueId x = m.in(0), weight = m.in(1);
  const Dims d = m.dims(x);
  const int64_t axis = m.axis(m.i("axis", -1), d.size());
  const ir::Attrs attrs{{"eps", m.f("epsilon", 1e-5)}, {"weight_offset", 0.0}};
  const Dims over(d.begin() + axis, d.end());
  if (over.size() == 1 && m.dims(weight) == over)
    return m.out(m.op("rms_norm", {x, weight}, attrs));
  ValueId flat = m.reshape(x, {ir::product(Dims(d.begin(), d.begin() + axis)), ir::product(over)});
  ValueId y = m.reshape(m.op("rms_norm", {flat}, attrs), d);
  m.out(m.op("mul", {y, weight}));
}

void convert_instance_norm(Importer& m) {
  ValueId x = m.in(0);
  if (m.rank(x) < 3) m.refuse("spatial axes", "none");
  m.out(m.op("group_norm", {x, m.in(1), m.in(2)},
             {{"groups", m.fixed(m.dims(x)[1])}, {"eps", m.f("epsilon", 1e-5)}}));
}

void convert_group_norm(Importer& m) {
  ValueId x = m.in(0), weight = m.in(1), bias = m.in(2);
  if (m.rank(x) < 2) m.refuse("channels", "none");
  const int64_t groups = m.i("num_groups", 1), channels = m.fixed(m.dims(x)[1]);
  if (groups < 1 || channels % groups != 0)
    m.refuse("groups that divide the channels", std::to_string(groups));
  auto each = [&](ValueId v) {  // before opset 21: one value a group
    if (m.dims(v) == Dims{Dim(channels)}) return v;
    ValueId wide =
        m.expand(m.reshape(v, {Dim(groups), Dim(1)}), {Dim(groups), Dim(channels / groups)});
    return m.reshape(wide, {Dim(channels)});
  };
  m.out(m.op("group_norm", {x, each(weight), each(bias)},
             {{"groups", groups}, {"eps", m.f("epsilon", 1e-5)}}));
}

void convert_mean_variance(Importer& m) {
  ValueId x = m.in(0);
  Ints axes = m.ints("axes").value_or(Ints{0, 2, 3});
  for (int64_t& a : axes) a = m.axis(a, m.rank(x));
  ValueId off = m.op("sub", {x, m.reduce("mean", x, axes, true)});
  ValueId var = m.reduce("mean", m.op("mul", {off, off}), axes, true);
  m.out(m.op("div", {off, m.op("add", {m.op("sqrt", {var}), m.number(x, 1e-9)})}));
}

// Squares summed over `size` channels around each.
void convert_local_response(Importer& m) {
  ValueId x = m.in(0);
  const Dims d = m.dims(x);
  const int64_t size = m.i("size", 1);
  if (d.size() < 3 || size < 1) m.refuse("channels and places", m.type(x).str());
  ValueId rows = m.reshape(m.op("mul", {x, x}),
                           {d[0], Dim(1), d[1], ir::product(Dims(d.begin() + 2, d.end()))});
  ValueId sum = m.op("pool", {rows},
                     {{"kind", std::string("mean")},
                      {"kernel", Ints{size, 1}},
                      {"padding", Ints{(size - 1) / 2, 0, size / 2, 0}},
                      {"divisor", int64_t{1}}});
  ValueId base =
      m.op("mul", {m.reshape(sum, d), m.number(x, m.f("alpha", 1e-4) / static_cast<double>(size))});
  base = m.op("add", {base, m.number(x, m.f("bias", 1))});
  m.out(m.op("div", {x, m.op("pow", {base, m.number(x, m.f("beta", 0.75))})}));
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

void add_norms(Table* table) {
  Table& t = *table;
  t["BatchNormalization"] = convert_batch_norm;
  t["LayerNormalization"] = convert_layer_norm;
  t["RMSNormalization"] = convert_rms_norm;
  t["InstanceNormalization"] = convert_instance_norm;
  t["GroupNormalization"] = convert_group_norm;
  t["MeanVarianceNormalization"] = convert_mean_variance;
  t["LRN"] = convert_local_response;
  t["Softmax"] = t["LogSoftmax"] = convert_softmax;
}

}  // namespace rm::onnx
