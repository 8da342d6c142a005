// The gradient of a convolution's input: a convolution of dy with the weights transposed, in one
// product a remainder of the stride.
#include "conv2d/common.hpp"

namespace rm::cuda_ops {

ConvProblem conv_input_problem(const Conv2dBackward& p, const Tensor& dy) {
  ConvProblem out{{}, p.x.dtype, p.shape.tf32};
  ConvArgs& a = out.args;
  const Tensor& dx = p.dx ? *p.dx : p.x;
  a.x = dy.data, a.w = p.w.data, a.y = dx.data;
  strides_of(dy, a.x_stride), strides_of(dx, a.y_stride);
  a.w_stride[0] = p.w.stride[1], a.w_stride[1] = p.w.stride[0];
  a.w_stride[2] = p.w.stride[2], a.w_stride[3] = p.w.stride[3];
  const ConvShape& s = p.shape;
  a.n = static_cast<int>(p.x.shape[0]), a.groups = s.groups;
  a.in = static_cast<int>(p.w.shape[0] / s.groups), a.out = static_cast<int>(p.w.shape[1]);
  a.w_group = a.in * p.w.stride[0];
  a.h = static_cast<int>(dy.shape[2]), a.wd = static_cast<int>(dy.shape[3]);
  a.oh = static_cast<int>(p.x.shape[2]), a.ow = static_cast<int>(p.x.shape[3]);
  a.kh = static_cast<int>(p.w.shape[2]), a.kw = static_cast<int>(p.w.shape[3]);
  for (int d = 0; d < 2; ++d) {
    a.map.mul[d] = 1, a.map.off[d] = s.padding[d], a.map.step[d] = -s.dilation[d];
    a.map.div[d] = s.stride[d];
  }
  a.channels_last = dx.stride[1] == 1;
  return out;
}

namespace {

struct Products {
  ConvProblem whole;  // its weights packed once, if `packed`
  bool packed = false;
  std::size_t packed_bytes = 0;
  int classes[2] = {1, 1};
};

/// A stride without dilation leaves every s-th place to every s-th tap: each remainder is a
/// convolution of its own with fewer taps, which spares products with zeros.
Products products_of(const Conv2dBackward& p, ConvBy by, void* room) {
  Products out;
  out.whole = conv_input_problem(p, p.dy);
  out.whole.warpgroups = by == ConvBy::warpgroups;
  const ConvShape& s = p.shape;
  for (int d = 0; d < 2; ++d) out.classes[d] = s.dilation[d] == 1 ? s.stride[d] : 1;
  if (out.classes[0] > 8 || out.classes[1] > 8) out.classes[0] = out.classes[1] = 1;
  ConvArgs& a = out.whole.args;
  if (by == ConvBy::tiles || out.classes[0] * out.classes[1] == 1 ||
      a.in % (16 / size_of(p.x.dtype)) != 0)
    return out;
  // every product reads the transposed weights: packed once
  out.packed = true;
  const std::int64_t taps = static_cast<std::int64_t>(a.kh) * a.kw;
  out.packed_bytes =
      whole(static_cast<std::size_t>(a.groups * a.out * taps * a.in) * size_of(p.x.dtype));
  a.w = room, a.w_group = a.out * taps * a.in;
  a.w_stride[0] = taps * a.in, a.w_stride[1] = 1;
  a.w_stride[2] = static_cast<std::int64_t>(a.kw) * a.in, a.w_stride[3] = a.in;
  return out;
}

/// fn of the products that make dx (without taps: kh or kw is 0).
template <class Fn>
void for_each_product(const Conv2dBackward& p, const Products& all, Fn&& fn) {
  const ConvShape& s = p.shape;
  for (int rh = 0; rh < all.classes[0]; ++rh) {
    for (int rw = 0; rw < all.classes[1]; ++rw) {
      ConvProblem part = all.whole;
      ConvArgs& a = part.args;
      const int rest[2] = {rh, rw};
      std::int64_t y_offset = 0, w_offset = 0;
      for (int d = 0; d < 2; ++d) {
        if (all.classes[d] == 1) continue;
        int &places = d == 0 ? a.oh : a.ow, &taps = d == 0 ? a.kh : a.kw;
        const int first = (rest[d] + s.padding[d]) % s.stride[d];
        places = places > rest[d] ? (places - rest[d] + s.stride[d] - 1) / s.stride[d] : 0;
        taps = taps > first ? (taps - first + s.stride[d] - 1) / s.stride[d] : 0;
        a.map.off[d] = (rest[d] + s.padding[d] - first) / s.stride[d];
        a.map.step[d] = -1, a.map.div[d] = 1;
        y_offset += rest[d] * a.y_stride[2 + d], w_offset += first * a.w_stride[2 + d];
        a.y_stride[2 + d] *= s.stride[d], a.w_stride[2 + d] *= s.stride[d];
      }
      const int bytes = size_of(part.dtype);
      a.y = static_cast<char*>(a.y) + y_offset * bytes;
      if (a.kh > 0 && a.kw > 0) a.w = static_cast<const char*>(a.w) + w_offset * bytes;
      if (a.oh > 0 && a.ow > 0) fn(part);
    }
  }
}
bool has_taps(const ConvProblem& p) { return p.args.kh > 0 && p.args.kw > 0; }

}  // namespace

std::size_t conv_input_workspace(const Conv2dBackward& p, ConvBy by) {
  const Products all = products_of(p, by, nullptr);
  std::size_t bytes = 0;
  for_each_product(p, all, [&](const ConvProblem& q) {
    if (!has_taps(q)) return;
    bytes = std::max(bytes, by == ConvBy::tiles ? conv_tiles_workspace(q) : conv_gemm_workspace(q));
  });
  return all.packed_bytes + bytes;
}

double conv_input_us(const Conv2dBackward& p, ConvBy by) {
  const Products all = products_of(p, by, nullptr);
  double us = all.packed ? move_us(2.0 * static_cast<double>(all.packed_bytes)) : 0;
  for_each_product(p, all, [&](const ConvProblem& q) {
    us += !has_taps(q)          ? conv_naive_us(q)
          : by == ConvBy::tiles ? conv_tiles_us(q)
                                : conv_gemm_us(q);
  });
  return us;
}

Status launch_conv_input(const Conv2dBackward& p, ConvBy by, Workspace room, Stream stream) {
  std::size_t used = 0;
  const Products all = products_of(p, by, room.data);
  Status s = check_workspace("conv2d", all.packed_bytes, room, kWorkspaceFrom);
  if (s && all.packed) {
    const ConvArgs a = conv_input_problem(p, p.dy).args;
    s = launch_conv_pack_weights(a, a.in, take(room, used, all.packed_bytes), p.x.dtype, stream);
  }
  if (!s) return s;
  const Workspace rest{static_cast<char*>(room.data) + used, room.bytes - used};
  for_each_product(p, all, [&](const ConvProblem& q) {
    if (!s) return;
    s = !has_taps(q)          ? launch_conv_naive(q, stream)
        : by == ConvBy::tiles ? launch_conv_tiles(q, rest, stream)
                              : launch_conv_gemm(q, rest, stream);
  });
  return s;
}

}  // namespace rm::cuda_ops
