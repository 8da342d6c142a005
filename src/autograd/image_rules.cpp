// Convolutions of 1 to 3 spatial axes. Both gradients are convolutions again.
#include "autograd/rules.hpp"

namespace rm::autograd {
namespace {

using ir::Dim;
using ir::Dims;

struct Geometry {
  size_t axes;
  Ints stride, dilation, padding;  // padding: all begins, then all ends
  int64_t groups;
};

Geometry geometry_of(Adjoint& a) {
  const size_t axes = a.b.rank(a.x()) - 2;
  const auto ints = [&](const char* name, size_t count, int64_t otherwise) {
    return a.node.has(name) ? a.node.ints(name) : Ints(count, otherwise);
  };
  return {axes, ints("stride", axes, 1), ints("dilation", axes, 1), ints("padding", 2 * axes, 0),
          a.node.i_or("groups", 1)};
}

// The transposed convolution of dy; behind it as many rows as the strides did not reach.
ValueId by_image(Adjoint& a, const Geometry& g) {
  Builder& b = a.b;
  Ints behind;
  for (size_t i = 0; i < g.axes; ++i) {
    const int64_t made = (b.size(a.dy(), i + 2) - 1) * g.stride[i] - g.padding[i] -
                         g.padding[i + g.axes] + g.dilation[i] * (b.size(a.x(1), i + 2) - 1) + 1;
    behind.push_back(b.size(a.x(), i + 2) - made);
  }
  return b.op("conv", {a.dy(), a.x(1)},
              {{"stride", g.stride},
               {"dilation", g.dilation},
               {"padding", g.padding},
               {"groups", g.groups},
               {"transposed", int64_t{1}},
               {"output_padding", behind}});
}

// The image under the gradient as its filter, samples and channels exchanged, stride and dilation
// exchanged. A transposed convolution slides over its result: image and gradient change places.
ValueId by_filter(Adjoint& a, const Geometry& g, ValueId image, ValueId slid) {
  Builder& b = a.b;
  Ints swapped = all_axes(g.axes + 2);
  std::swap(swapped[0], swapped[1]);
  const int64_t channels = b.size(image, 1) / g.groups, filters = b.size(slid, 1) / g.groups;
  std::vector<ValueId> parts;
  for (int64_t i = 0; i < g.groups; ++i) {
    ValueId x = b.permute(b.slice(image, 1, i * channels, (i + 1) * channels), swapped);
    ValueId dy = b.permute(b.slice(slid, 1, i * filters, (i + 1) * filters), swapped);
    ValueId part = b.op("conv", {x, dy},
                        {{"stride", g.dilation},
                         {"dilation", g.stride},
                         {"padding", g.padding},
                         {"groups", int64_t{1}}});
    for (size_t k = 2; k < g.axes + 2; ++k) part = b.slice(part, k, 0, b.size(a.x(1), k));
    parts.push_back(b.permute(part, swapped));
  }
  return parts.size() == 1 ? parts[0] : b.op("concat", std::move(parts), {{"axis", int64_t{0}}});
}

// The operand of a transposed convolution: dy under the same filter; rows of the output padding are
// in no window.
ValueId by_transposed_image(Adjoint& a, const Geometry& g) {
  ValueId dx = a.b.op("conv", {a.dy(), a.x(1)},
                      {{"stride", g.stride},
                       {"dilation", g.dilation},
                       {"padding", g.padding},
                       {"groups", g.groups}});
  for (size_t k = 2; k < g.axes + 2; ++k) dx = a.b.slice(dx, k, 0, a.b.size(a.x(), k));
  return dx;
}

void conv(Adjoint& a) {
  const Geometry g = geometry_of(a);
  const bool transposed = a.node.i_or("transposed", 0) != 0;
  if (a.wants(0)) a.din[0] = transposed ? by_transposed_image(a, g) : by_image(a, g);
  if (a.wants(1)) {
    a.din[1] = transposed ? by_filter(a, g, a.dy(), a.x()) : by_filter(a, g, a.x(), a.dy());
  }
  if (a.wants(2)) {
    Ints axes = all_axes(g.axes + 2);
    axes.erase(axes.begin() + 1);
    a.din[2] = a.b.reduce("sum", a.dy(), std::move(axes), false);
  }
}

}  // namespace

std::vector<NamedRule> image_rules() { return {{"conv", conv}}; }

}  // namespace rm::autograd
