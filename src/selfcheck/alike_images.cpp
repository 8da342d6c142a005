// Small problems for operators over images: what a window sees at both ends stays as it is, because
// the input loses as many strides as the result loses windows.
#include <algorithm>
#include <cmath>

#include "selfcheck/alike.hpp"

namespace rm::selfcheck {
namespace {

using ir::Ints;

constexpr int64_t kSamples = 2;
constexpr int64_t kChannels = 16, kGroupChannels = 8;  // vectors along the channels
constexpr int64_t kLastAxis = 8, kOtherAxis = 4;       // windows of a tile

/// Channels in groups; depthwise ones are vectors of groups.
struct Channels {
  int64_t groups, from, to;  // the latter two of a group
};

/// `edges`: of the channels of x.
Channels reduced(const Channels& c, std::vector<int64_t> edges) {
  edges.push_back(kChannels);
  if (c.groups == 1) return {1, alike_size(c.from, edges), alike_size(c.to, {kChannels})};
  if (c.from == 1 && c.to == 1) return {alike_size(c.groups, {kChannels}), 1, 1};
  return {std::min<int64_t>(c.groups, 2), alike_size(c.from, {kGroupChannels}),
          alike_size(c.to, {kGroupChannels})};
}

/// Sizes along the spatial axes of the operand that has fewer elements (`small`: the windows) and of
/// the one they slide over.
void slide(const Ints& stride, Ints& small, Ints& large) {
  for (size_t a = 0; a < small.size(); ++a) {
    const int64_t edge = a + 1 == small.size() ? kLastAxis : kOtherAxis;
    const int64_t fewer = small[a] - alike_size(small[a], {edge});
    if (large[a] - stride[a] * fewer < 1) continue;  // the padding alone fills the windows
    small[a] -= fewer;
    large[a] -= stride[a] * fewer;
  }
}

Ints tail(const Ints& dims) { return {dims.begin() + 2, dims.end()}; }

Ints joined(int64_t n, int64_t c, const Ints& spatial) {
  Ints out{n, c};
  out.insert(out.end(), spatial.begin(), spatial.end());
  return out;
}

void lay_out(select::Operand& operand, const Ints& dims) {
  if (operand.present) operand.layout = laid_out(operand.layout, dims);
}

/// Sizes that the row names for the channels of x (letter C).
std::vector<int64_t> channel_edges(const rm_kernel& row) {
  std::vector<int64_t> out;
  const size_t end = row.struct_size >= sizeof(rm_kernel) ? row.num_edges : 0;
  for (size_t i = 0; i < end; ++i) {
    if (row.edges[i].axis == 'C' && row.edges[i].size > 1) out.push_back(row.edges[i].size);
  }
  return out;
}

void reduce_conv(Shape& s, const rm_kernel& row) {
  const bool turned = attr_or<int64_t>(s, "transposed", 0) != 0;
  const Ints w = s.inputs[1].layout.dims;
  Ints x = tail(s.inputs[0].layout.dims), y = tail(s.outputs[0].layout.dims);
  const int64_t groups = std::max<int64_t>(attr_or<int64_t>(s, "groups", 1), 1);
  const Channels c = reduced({groups, turned ? w[0] / groups : w[1], turned ? w[1] : w[0] / groups},
                             channel_edges(row));
  const Ints stride = attr_or<Ints>(s, "stride", Ints(x.size(), 1));
  turned ? slide(stride, x, y) : slide(stride, y, x);
  const int64_t n = std::min(s.inputs[0].layout.dims[0], kSamples);
  lay_out(s.inputs[0], joined(n, c.groups * c.from, x));
  lay_out(s.inputs[1], turned ? joined(c.groups * c.from, c.to, tail(w))
                              : joined(c.groups * c.to, c.from, tail(w)));
  if (s.inputs.size() > 2) lay_out(s.inputs[2], {c.groups * c.to});
  if (s.inputs.size() > 3) lay_out(s.inputs[3], joined(n, c.groups * c.to, y));
  lay_out(s.outputs[0], joined(n, c.groups * c.to, y));
  s.attrs["groups"] = c.groups;
}

void reduce_pool(Shape& s) {
  Ints x = tail(s.inputs[0].layout.dims), y = tail(s.outputs[0].layout.dims);
  slide(attr_or<Ints>(s, "stride", Ints(x.size(), 1)), y, x);
  const int64_t n = std::min(s.inputs[0].layout.dims[0], kSamples);
  const int64_t c = alike_size(s.inputs[0].layout.dims[1], {kChannels});
  lay_out(s.inputs[0], joined(n, c, x));
  lay_out(s.outputs[0], joined(n, c, y));
}

void reduce_resize(Shape& s) {
  Ints x = tail(s.inputs[0].layout.dims), y = tail(s.outputs[0].layout.dims);
  const auto ratio = attr_or<std::vector<double>>(s, "ratio", std::vector<double>(x.size(), 1.0));
  for (size_t a = 0; a < x.size(); ++a) {
    y[a] = alike_size(y[a], {kLastAxis});
    x[a] = std::min(x[a], static_cast<int64_t>(std::ceil(ratio[a] * static_cast<double>(y[a]))) + 1);
  }
  const int64_t n = std::min(s.inputs[0].layout.dims[0], kSamples);
  const int64_t c = alike_size(s.inputs[0].layout.dims[1], {kChannels});
  lay_out(s.inputs[0], joined(n, c, x));
  lay_out(s.outputs[0], joined(n, c, y));
  if (s.attrs.count("size") != 0) s.attrs["size"] = y;
}

void reduce_group_norm(Shape& s) {
  const Ints x = s.inputs[0].layout.dims;
  const int64_t groups = std::max<int64_t>(attr_or<int64_t>(s, "groups", 1), 1);
  const Channels c = reduced({groups, x[1] / groups, 1}, {});
  Ints spatial = tail(x);
  for (size_t a = 0; a < spatial.size(); ++a) {
    spatial[a] = alike_size(spatial[a], {a + 1 == spatial.size() ? int64_t{32} : int64_t{8}});
  }
  const Ints dims = joined(std::min(x[0], kSamples), c.groups * c.from, spatial);
  lay_out(s.inputs[0], dims);
  for (size_t i = 1; i < s.inputs.size(); ++i) lay_out(s.inputs[i], {dims[1]});
  lay_out(s.outputs[0], dims);
  s.attrs["groups"] = c.groups;
}

}  // namespace

bool reduce_images(Shape& s, const rm_kernel& row) {
  if (s.op == "conv") {
    reduce_conv(s, row);
  } else if (s.op == "pool") {
    reduce_pool(s);
  } else if (s.op == "resize") {
    reduce_resize(s);
  } else if (s.op == "group_norm") {
    reduce_group_norm(s);
  } else {
    return false;
  }
  return true;
}

}  // namespace rm::selfcheck
