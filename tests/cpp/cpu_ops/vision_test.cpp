// conv, pool, resize and group_norm against the operators' references, in every layout.
#include <doctest/doctest.h>
#include <omp.h>

#include <cmath>
#include <limits>

#include "harness.hpp"
#include "ir/graph.hpp"
#include "ops/registry.hpp"

using namespace rm::test;
namespace ops = rm::ops;
namespace ir = rm::ir;

namespace {

ir::DType ir_type(Type t) {
  return t == Type::f32    ? ir::DType::kF32
         : t == Type::f64  ? ir::DType::kF64
         : t == Type::bf16 ? ir::DType::kBF16
                           : ir::DType::kF16;
}

ops::HostTensor host_tensor(const Tensor& t) {
  std::vector<double> values;
  for (int64_t i = 0; i < t.numel(); ++i) values.push_back(t[i]);
  ir::Dims dims(t.shape().begin(), t.shape().end());
  return ops::from_doubles({ir_type(t.type()), dims}, values);
}

ir::Attr ir_attr(const Attr& a) {
  if (a.kind == RM_ATTR_INT) return a.i;
  if (a.kind == RM_ATTR_FLOAT) return a.f;
  if (a.kind == RM_ATTR_STRING) return a.s;
  if (a.kind == RM_ATTR_INTS) return a.ints;
  return a.floats;
}

/// The reference in f64, so that it rounds nothing.
std::vector<double> reference(const Call& call, const Dims& result) {
  ir::Node node;
  node.op = call.op;
  for (const Attr& a : call.attrs) node.attrs[a.name] = ir_attr(a);
  std::vector<ops::HostTensor> held;
  for (const Tensor* t : call.inputs) {
    if (t != nullptr) held.push_back(host_tensor(*t));
  }
  ops::HostOperands operands;
  size_t at = 0;
  for (const Tensor* t : call.inputs) operands.push_back(t != nullptr ? &held[at++] : nullptr);
  const ir::TensorType type{ir::DType::kF64, ir::Dims(result.begin(), result.end())};
  return ops::to_doubles(ops::get(call.op).reference(node, operands, {type})[0]);
}

/// Channels last, row-major or scrambled.
Tensor image(Type t, const Dims& shape, int layout, std::mt19937& rng) {
  if (layout == 2) return Tensor::scrambled(t, shape, rng);
  if (layout == 1) return Tensor(t, shape);
  std::vector<int> order{0};
  for (int i = 2; i < static_cast<int>(shape.size()); ++i) order.push_back(i);
  order.push_back(1);
  return Tensor::strided(t, shape, order);
}

void check_rows(const Call& call, double slack, uint64_t constants = 0) {
  Tensor& y = *call.outputs[0];
  const std::vector<double> want = reference(call, y.shape());
  on_every_row(call, [&](const std::string& row) {
    CAPTURE(row);
    int bad = 0;
    for (int64_t i = 0; i < y.numel(); ++i) {
      const double w = want[static_cast<size_t>(i)];
      if (!close(y[i], w, 2 * epsilon(y.type()) + slack, slack) && bad++ == 0) {
        CAPTURE(i);
        CAPTURE(y[i]);
        CHECK(y[i] == doctest::Approx(w));
      }
    }
    CHECK(bad == 0);
  }, constants);
}

struct Conv {
  Dims x, k;  // [N, C, *], kernel
  int64_t to, groups;
  std::vector<int64_t> stride, padding, dilation;
  bool transposed = false;
  std::vector<int64_t> output_padding = {};
};

const std::vector<Conv> kConvs = {
    {{2, 3, 9, 7}, {3, 3}, 8, 1, {1, 1}, {1, 1, 1, 1}, {1, 1}},
    {{1, 16, 5, 6}, {1, 1}, 32, 1, {1, 1}, {0, 0, 0, 0}, {1, 1}},
    {{1, 17, 8, 5}, {1, 1}, 19, 1, {2, 2}, {0, 0, 0, 0}, {1, 1}},
    {{1, 33, 7, 7}, {5, 5}, 33, 33, {2, 1}, {2, 2, 2, 2}, {1, 1}},     // depthwise
    {{1, 8, 6, 6}, {3, 3}, 16, 8, {1, 1}, {1, 1, 1, 1}, {1, 1}},       // two results a channel
    {{2, 12, 9, 9}, {3, 3}, 18, 3, {2, 2}, {0, 1, 2, 1}, {2, 2}},      // groups, uneven padding
    {{1, 1, 4, 4}, {4, 4}, 1, 1, {1, 1}, {0, 0, 0, 0}, {1, 1}},        // one place
    {{3, 4, 11}, {3}, 6, 2, {1}, {4, 0}, {4}},                         // causal, one axis
    {{1, 5, 4, 5, 6}, {2, 3, 1}, 7, 1, {1, 2, 1}, {1, 1, 0, 0, 1, 0}, {1, 1, 1}},
    {{2, 6, 4, 5}, {3, 3}, 4, 2, {2, 2}, {1, 1, 1, 1}, {1, 1}, true, {1, 0}},
    {{1, 4, 3, 3}, {2, 2}, 5, 1, {2, 2}, {0, 0, 0, 0}, {1, 1}, true, {0, 0}},
    {{1, 3, 5}, {4}, 2, 1, {3}, {1, 1}, {2}, true, {0}},
};

int64_t places(const Conv& c, size_t axis) {
  const size_t axes = c.k.size();
  const int64_t size = c.x[2 + axis], reach = c.dilation[axis] * (c.k[axis] - 1) + 1;
  const int64_t padding = c.padding[axis] + c.padding[axes + axis];
  if (!c.transposed) return (size + padding - reach) / c.stride[axis] + 1;
  return (size - 1) * c.stride[axis] + reach - padding + c.output_padding[axis];
}

void check_conv(const Conv& c, Type t, int layout, int options, const char* activation,
                std::mt19937& rng, uint64_t constants = 0) {
  Dims w{c.transposed ? c.x[1] : c.to, c.transposed ? c.to / c.groups : c.x[1] / c.groups};
  w.insert(w.end(), c.k.begin(), c.k.end());
  Dims result{c.x[0], c.to};
  for (size_t a = 0; a < c.k.size(); ++a) result.push_back(places(c, a));
  Tensor x = image(t, c.x, layout, rng), weight = layout == 2 ? image(t, w, 2, rng) : Tensor(t, w);
  Tensor bias(t, {c.to}), residual = image(t, result, layout, rng), y = image(t, result, layout, rng);
  x.normal(rng), weight.normal(rng, 0.3), bias.normal(rng), residual.normal(rng);
  Call call{"conv",
            {&x, &weight, options & 1 ? &bias : nullptr, options & 2 ? &residual : nullptr},
            {&y},
            {integers("stride", c.stride), integers("padding", c.padding),
             integers("dilation", c.dilation), integer("groups", c.groups),
             text("activation", activation)}};
  if (c.transposed) {
    call.attrs.push_back(integer("transposed", 1));
    call.attrs.push_back(integers("output_padding", c.output_padding));
  }
  check_rows(call, t == Type::f64 ? 1e-11 : 1e-4, constants);
}

/// Around the edges of packed convolutions: tiles (14, 6 and 4 rows), panels (32, 16 and 8
/// channels), blocks of channels (192, 256 and 384), lines that tiles do and do not fill.
const std::vector<Conv> kProducts = {
    {{1, 200, 5, 15}, {3, 3}, 33, 1, {1, 1}, {1, 1, 1, 1}, {1, 1}},     // two blocks of channels with AVX2
    {{2, 24, 9, 31}, {3, 3}, 70, 1, {2, 2}, {1, 1, 1, 1}, {1, 1}},      // half of the taps at an edge
    {{1, 40, 3, 2}, {5, 5}, 31, 1, {1, 1}, {2, 2, 2, 2}, {1, 1}},       // taps that no place meets
    {{1, 16, 4, 29}, {1, 3}, 32, 1, {1, 1}, {0, 2, 0, 2}, {1, 2}},      // dilated
    {{2, 16, 7, 13}, {3, 3}, 16, 1, {1, 1}, {-1, -1, 0, 1}, {1, 1}},    // cut, and padded at one end
    {{3, 33, 5, 7}, {1, 1}, 65, 1, {1, 1}, {0, 0, 0, 0}, {1, 1}},       // all lines as one
    {{2, 17, 9, 29}, {1, 1}, 96, 1, {2, 2}, {0, 0, 0, 0}, {1, 1}},      // lines apart
    {{1, 20, 5, 6}, {1, 1}, 40, 1, {2, 1}, {1, 0, 1, 3}, {1, 1}},       // places that meet padding only
    {{2, 1024, 1, 29}, {1, 1}, 40, 1, {1, 1}, {0, 0, 0, 0}, {1, 1}},    // 4 KiB apart
    {{1, 2048, 3, 5}, {1, 1}, 33, 1, {1, 1}, {0, 0, 0, 0}, {1, 1}},     // long panels
    {{1, 64, 1, 300}, {1, 1}, 1400, 1, {1, 1}, {0, 0, 0, 0}, {1, 1}},   // weights that do not stay near
    {{1, 48, 1, 290}, {1, 3}, 16, 1, {1, 1}, {0, 1, 0, 1}, {1, 1}},     // blocks of rows
    {{1, 776, 2, 15}, {3, 3}, 33, 1, {1, 1}, {1, 1, 1, 1}, {1, 1}},     // two blocks with AVX-512
    {{2, 20, 2, 3, 9}, {2, 3, 3}, 24, 1, {1, 1, 1}, {1, 1, 1, 0, 1, 1}, {1, 1, 1}},
};

}  // namespace

TEST_CASE("conv as products matches its reference at the edges of tiles, panels and blocks") {
  std::mt19937 rng(17);
  const char* const activations[] = {"relu", "none", "gelu"};
  for (size_t i = 0; i < kProducts.size(); ++i) {
    for (int options = 0; options < 4; ++options) {
      CAPTURE(i);
      CAPTURE(options);
      const uint64_t constants = options % 2 == 0 ? 0 : 2;  // the weight
      check_conv(kProducts[i], Type::f32, 0, options, activations[(i + static_cast<size_t>(options)) % 3],
                 rng, constants);
    }
  }
}

TEST_CASE("conv of our own gives the same bits on any number of threads") {
  std::mt19937 rng(18);
  for (const Conv& c : {kProducts[0], kProducts[5], kProducts[9], kProducts[10], kProducts[12]}) {
    Tensor x = image(Type::f32, c.x, 0, rng), w(Type::f32, {c.to, c.x[1], c.k[0], c.k[1]});
    Tensor y = image(Type::f32, {c.x[0], c.to, places(c, 0), places(c, 1)}, 0, rng);
    x.normal(rng), w.normal(rng);
    const Call call{"conv", {&x, &w}, {&y}, {integers("stride", c.stride), integers("padding", c.padding)}};
    for (const rm_kernel* row : rows("conv")) {
      const std::string name(row->name.data, row->name.size);
      if (name.find("packed") == std::string::npos || !supports(*row, call)) continue;
      CAPTURE(name);
      const int threads = omp_get_max_threads();
      std::vector<double> first;
      for (int count : {1, 2, 3, 6}) {
        omp_set_num_threads(count);
        REQUIRE(run(*row, call).code == RM_OK);
        std::vector<double> got;
        for (int64_t i = 0; i < y.numel(); ++i) got.push_back(y[i]);
        if (first.empty()) first = got;
        CHECK(got == first);
      }
      omp_set_num_threads(threads);
    }
  }
}

TEST_CASE("conv matches its reference in every geometry, layout and type") {
  std::mt19937 rng(11);
  const char* const activations[] = {"none", "relu",    "silu", "hardswish",
                                     "gelu", "sigmoid", "tanh", "gelu_tanh"};
  int number = 0;
  for (size_t i = 0; i < kConvs.size(); ++i) {
    for (Type t : kFloats) {
      for (int layout = 0; layout < 3; ++layout) {
        CAPTURE(i);
        CAPTURE(name(t));
        CAPTURE(layout);
        check_conv(kConvs[i], t, layout, number % 4, activations[number % 8], rng);
        ++number;
      }
    }
  }
}

TEST_CASE("conv keeps NaN behind an activation and writes nothing of an empty image") {
  for (const char* activation : {"relu", "hardswish", "silu", "gelu", "tanh", "none"}) {
    CAPTURE(std::string(activation));
    Tensor x = Tensor::strided(Type::f32, {1, 16, 1, 4}, {0, 2, 3, 1}), w(Type::f32, {16, 16, 1, 1});
    Tensor y = Tensor::strided(Type::f32, {1, 16, 1, 4}, {0, 2, 3, 1});
    x.fill([](int64_t i) { return i == 5 ? std::numeric_limits<double>::quiet_NaN() : -1.0; });
    w.fill([](int64_t i) { return i % 17 == 0 ? 1.0 : 0.0; });  // the identity
    const Call call{"conv", {&x, &w}, {&y}, {text("activation", activation)}};
    on_every_row(call, [&](const std::string& row) {
      CAPTURE(row);
      CHECK(std::isnan(y[5]));   // channel 1, place 1
      CHECK(!std::isnan(y[4]));  // channel 1, place 0
    });
  }
  Tensor x(Type::f32, {0, 3, 4, 4}), w(Type::f32, {5, 3, 3, 3}), y(Type::f32, {0, 5, 2, 2});
  const Call call{"conv", {&x, &w}, {&y}, {}};
  on_every_row(call, [&](const std::string&) { CHECK(y.numel() == 0); });
}

TEST_CASE("conv without channels or kernels of its schema is refused") {
  Tensor x(Type::f32, {1, 3, 4, 4}), w(Type::f32, {5, 2, 3, 3}), y(Type::f32, {1, 5, 2, 2});
  for (const rm_kernel* row : rows("conv")) CHECK(!supports(*row, {"conv", {&x, &w}, {&y}, {}}));
}

TEST_CASE("pool matches its reference: kinds, padding, dilation, layouts") {
  std::mt19937 rng(12);
  struct Case {
    Dims x, y;
    std::vector<int64_t> kernel, stride, padding, dilation;
  };
  const std::vector<Case> cases = {
      {{2, 5, 8, 9}, {2, 5, 4, 5}, {3, 3}, {2, 2}, {1, 1, 1, 1}, {1, 1}},
      {{1, 600, 3, 2}, {1, 600, 2, 1}, {2, 2}, {1, 1}, {0, 0, 0, 0}, {1, 1}},
      {{1, 17, 7}, {1, 17, 3}, {3}, {2}, {0, 1}, {1}},
      {{1, 4, 9, 9}, {1, 4, 5, 5}, {3, 3}, {1, 1}, {0, 0, 0, 0}, {2, 2}},
      {{1, 3, 4, 5, 6}, {1, 3, 2, 2, 3}, {2, 2, 2}, {2, 2, 2}, {0, 0, 0, 0, 0, 0}, {1, 1, 1}},
  };
  for (const Case& c : cases) {
    for (Type t : {Type::f32, Type::bf16, Type::f16}) {
      for (int layout = 0; layout < 3; ++layout) {
        for (int options = 0; options < 4; ++options) {
          Tensor x = image(t, c.x, layout, rng), y = image(t, c.y, layout, rng);
          x.normal(rng);
          Call call{"pool",
                    {&x},
                    {&y},
                    {integers("kernel", c.kernel), integers("stride", c.stride),
                     integers("padding", c.padding), integers("dilation", c.dilation),
                     text("kind", options == 0 ? "max" : "mean"),
                     integer("count_include_pad", options == 1), integer("divisor", options == 3 ? 3 : 0)}};
          check_rows(call, 1e-6);
        }
      }
    }
  }
}

TEST_CASE("the largest of a window with NaN is NaN, of a window in the padding -Inf") {
  Tensor x = Tensor::strided(Type::f32, {1, 20, 1, 4}, {0, 2, 3, 1});
  Tensor y = Tensor::strided(Type::f32, {1, 20, 1, 4}, {0, 2, 3, 1});
  x.fill([](int64_t i) { return i % 4 == 1 ? std::numeric_limits<double>::quiet_NaN() : 1.0; });
  const Call call{"pool",
                  {&x},
                  {&y},
                  {integers("kernel", {1, 2}), integers("stride", {1, 2}),
                   integers("padding", {0, 0, 0, 4}), text("kind", "max")}};
  on_every_row(call, [&](const std::string& row) {
    CAPTURE(row);
    for (int64_t c = 0; c < 20; ++c) {
      CHECK(std::isnan(y[c * 4]));
      CHECK(y[c * 4 + 1] == 1);
      CHECK(y[c * 4 + 2] == -std::numeric_limits<double>::infinity());
    }
  });
}

TEST_CASE("resize matches its reference up and down, nearest and linear") {
  std::mt19937 rng(13);
  const std::vector<std::pair<Dims, Dims>> shapes = {{{2, 5, 4, 6}, {2, 5, 8, 9}},
                                                     {{1, 40, 7, 5}, {1, 40, 3, 5}},
                                                     {{1, 3, 1}, {1, 3, 6}},
                                                     {{1, 6, 2, 3, 4}, {1, 6, 5, 3, 2}}};
  for (const auto& [from, to] : shapes) {
    for (Type t : {Type::f32, Type::bf16, Type::f16}) {
      for (int options = 0; options < 9; ++options) {
        const bool corners = options % 3 == 2;
        Tensor x = image(t, from, options / 3, rng), y = image(t, to, options / 3, rng);
        x.normal(rng);
        std::vector<double> ratio;
        for (size_t a = 2; a < from.size(); ++a) {
          const auto size = static_cast<double>(from[a]), count = static_cast<double>(to[a]);
          ratio.push_back(!corners ? size / count : count > 1 ? (size - 1) / (count - 1) : 0);
        }
        check_rows({"resize",
                    {&x},
                    {&y},
                    {text("mode", options % 3 == 0 ? "nearest" : "linear"), reals("ratio", ratio),
                     integers("size", Dims(to.begin() + 2, to.end())),
                     integer("align_corners", corners)}},
                   2e-6);
      }
    }
  }
}

TEST_CASE("group_norm matches its reference, also far from zero and with silu") {
  std::mt19937 rng(14);
  const std::vector<std::pair<Dims, int64_t>> shapes = {
      {{2, 12, 5, 7}, 4}, {{1, 32, 20, 20}, 32}, {{2, 6, 300}, 1}, {{3, 8}, 2}, {{1, 700, 2, 3}, 7},
      {{1, 4, 2, 3, 4}, 2}};
  for (const auto& [shape, groups] : shapes) {
    for (Type t : {Type::f32, Type::bf16, Type::f16}) {
      for (int options = 0; options < 6; ++options) {
        if (shape.size() < 3 && options % 3 == 0) continue;  // no spatial axis to put in front
        CAPTURE(shape);
        Tensor x = image(t, shape, options % 3, rng), y = image(t, shape, options % 3, rng);
        Tensor weight(t, {shape[1]}), bias(t, {shape[1]});
        x.normal(rng), weight.normal(rng), bias.normal(rng);
        const bool far = t == Type::f32 && options == 1;
        if (far) {
          for (int64_t i = 0; i < x.numel(); ++i) x.set(i, x[i] + 1000);
        }
        check_rows({"group_norm",
                    {&x, options & 1 ? &weight : nullptr, options & 1 ? &bias : nullptr},
                    {&y},
                    {integer("groups", groups), real("eps", 1e-5),
                     text("activation", options >= 3 ? "silu" : "none")}},
                   far ? 4e-3 : 2e-5);
      }
    }
  }
}
