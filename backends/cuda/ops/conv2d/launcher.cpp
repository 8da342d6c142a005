// The forward table of conv2d: checks and choice.
#include "_shim/alias_shim.hpp"
#include "conv2d/common.hpp"

namespace rm::cuda_ops {
namespace {

ConvProblem problem_of(const Conv2d& p) {
  ConvProblem out{{}, p.x.dtype, p.shape.tf32};
  ConvArgs& a = out.args;
  a.x = p.x.data, a.w = p.w.data, a.y = p.y.data;
  if (p.epilogue.bias) a.bias = p.epilogue.bias->data;
  if (p.epilogue.residual) a.residual = p.epilogue.residual->data;
  if (p.epilogue.aux) a.aux = p.epilogue.aux->data;
  strides_of(p.x, a.x_stride), strides_of(p.y, a.y_stride), strides_of(p.w, a.w_stride);
  const ConvShape& s = p.shape;
  a.n = static_cast<int>(p.x.shape[0]), a.groups = s.groups;
  a.in = static_cast<int>(p.w.shape[1]), a.out = static_cast<int>(p.w.shape[0] / s.groups);
  a.w_group = a.out * p.w.stride[0];
  if (p.transposed) {
    a.in = static_cast<int>(p.w.shape[0] / s.groups), a.out = static_cast<int>(p.w.shape[1]);
    a.w_group = a.in * p.w.stride[0];
    std::swap(a.w_stride[0], a.w_stride[1]);
  }
  a.h = static_cast<int>(p.x.shape[2]), a.wd = static_cast<int>(p.x.shape[3]);
  a.oh = static_cast<int>(p.y.shape[2]), a.ow = static_cast<int>(p.y.shape[3]);
  a.kh = static_cast<int>(p.w.shape[2]), a.kw = static_cast<int>(p.w.shape[3]);
  for (int d = 0; d < 2; ++d) {
    a.map.mul[d] = s.stride[d], a.map.off[d] = -s.padding[d], a.map.step[d] = s.dilation[d];
    a.map.div[d] = 1;
    if (p.transposed) {
      a.map.mul[d] = 1, a.map.off[d] = s.padding[d], a.map.step[d] = -s.dilation[d];
      a.map.div[d] = s.stride[d];
    }
  }
  a.activation = static_cast<int>(p.epilogue.activation), a.slope = p.epilogue.slope;
  if (p.hardswish) a.activation = kConvHardswish;
  a.channels_last = p.y.stride[1] == 1, a.residual_first = p.residual_first;
  return out;
}

ConvProblem with_warpgroups(ConvProblem p) {
  p.warpgroups = true;
  return p;
}

constexpr KernelRow<Conv2d> kRows[] = {
    {"conv2d_warpgroup_sm90a",
     "16-bit types, float32 with tf32; packs what is not channels last in vectors",
     [](const Conv2d& p) { return conv_gemm_why_not(with_warpgroups(problem_of(p))); },
     [](const Conv2d& p) { return conv_gemm_us(with_warpgroups(problem_of(p))); },
     [](const Conv2d& p, Workspace w, Stream s) {
       return launch_conv_gemm(with_warpgroups(problem_of(p)), w, s);
     }},
    {"conv2d_gemm_sm80", "the same on other devices",
     [](const Conv2d& p) { return conv_gemm_why_not(problem_of(p)); },
     [](const Conv2d& p) { return conv_gemm_us(problem_of(p)); },
     [](const Conv2d& p, Workspace w, Stream s) { return launch_conv_gemm(problem_of(p), w, s); }},
    {"conv2d_tiles_any", "float32 by multiply-adds",
     [](const Conv2d& p) { return conv_tiles_why_not(problem_of(p)); },
     [](const Conv2d& p) { return conv_tiles_us(problem_of(p)); },
     [](const Conv2d& p, Workspace w, Stream s) { return launch_conv_tiles(problem_of(p), w, s); }},
    {"conv2d_depthwise_any", "one input and one output channel a group",
     [](const Conv2d& p) -> const char* {
       return is_depthwise(problem_of(p).args) ? nullptr : "a group has more than one channel";
     },
     [](const Conv2d& p) { return conv_depthwise_us(problem_of(p)); },
     [](const Conv2d& p, Workspace, Stream s) { return launch_conv_depthwise(problem_of(p), s); }},
    {"conv2d_naive_any", "any problem", [](const Conv2d&) -> const char* { return nullptr; },
     [](const Conv2d& p) { return conv_naive_us(problem_of(p)); },
     [](const Conv2d& p, Workspace, Stream s) { return launch_conv_naive(problem_of(p), s); }},
};

Status check_transposed(const Conv2d& p) {
  // The shapes of the convolution that would read y: w is its weight, x its result but for the size.
  Conv2d back = p;
  std::swap(back.x, back.y);
  const bool fits = p.x.rank == 4 && p.w.rank == 4 && p.y.rank == 4 &&
                    p.x.shape[0] == p.y.shape[0] && p.x.shape[1] == p.w.shape[0];
  if (!fits) {
    return invalid("[conv2d] expected x [N, C, H, W], w [C, O / groups, KH, KW] and y [N, O, OH, OW],"
                   " got " + conv_text(p.x) + ", " + conv_text(p.w) + " and " + conv_text(p.y));
  }
  return check_conv2d(back.x, back.w, back.y, back.shape, false);
}

Status check(const Conv2d& p) {
  Status shapes = p.transposed ? check_transposed(p) : check_conv2d(p.x, p.w, p.y, p.shape);
  if (!shapes) return shapes;
  const Epilogue& e = p.epilogue;
  if (e.bias &&
      (e.bias->dtype != p.x.dtype || numel(*e.bias) != p.y.shape[1] || !is_contiguous(*e.bias))) {
    return invalid("[conv2d] expected bias dense [" + std::to_string(p.y.shape[1]) + "] of " +
                   name_of(p.x.dtype) + ", got " + conv_text(*e.bias));
  }
  for (const Tensor* t : {e.residual, e.aux}) {
    bool same = t == nullptr || (t->dtype == p.y.dtype && same_shape(*t, p.y));
    for (int d = 0; t && same && d < 4; ++d) {
      same = t->shape[d] <= 1 || t->stride[d] == p.y.stride[d];
    }
    if (!same) {
      return invalid("[conv2d] expected residual and aux of y's shape, strides and dtype, got " +
                     conv_text(*t) + "; try empty_like(y)");
    }
  }
  return check_memory("conv2d", {{"y", &p.y, true}, {"aux", e.aux}},
                      {{"x", &p.x}, {"w", &p.w}, {"bias", e.bias}, {"residual", e.residual, true}});
}

/// The workspace shares no byte with a tensor of the call.
Status check_room(const Conv2d& p, const Workspace& w) {
  if (Status s = check_workspace("conv2d", 0, w, "workspace()"); !s) return s;
  const Epilogue& e = p.epilogue;
  return check_memory("conv2d", {},
                      {{"x", &p.x},
                       {"w", &p.w},
                       {"y", &p.y},
                       {"bias", e.bias},
                       {"residual", e.residual},
                       {"aux", e.aux}},
                      w);
}

}  // namespace

Status legal(const Conv2d& p) { return check(p); }

Status check_conv2d(const Tensor& x, const Tensor& w, const Tensor& y, const ConvShape& s,
                    bool sizes) {
  for (const Tensor* t : {&x, &w, &y}) {
    bool fits = t->rank == 4 && is_float(t->dtype) && t->dtype == x.dtype;
    for (int d = 0; fits && d < 4; ++d) fits = t->shape[d] < 1 << 26;
    if (!fits || numel(*t) > 0xffffffffffll) {
      return invalid(
          "[conv2d] expected x [N, C, H, W], w [O, C / groups, KH, KW] and y [N, O, OH, OW] of one "
          "dtype (float32, bfloat16 or float16), got " +
          conv_text(*t));
    }
  }
  bool legal = s.groups >= 1;
  for (int d = 0; d < 2; ++d) {
    legal = legal && s.stride[d] >= 1 && s.dilation[d] >= 1 && s.padding[d] >= 0 &&
            s.stride[d] < 1 << 20 && s.dilation[d] < 1 << 20 && s.padding[d] < 1 << 20 &&
            s.padding_end[d] < 1 << 20;
  }
  if (!legal) return invalid("[conv2d] expected groups, stride, dilation >= 1 and padding >= 0");
  if (w.shape[0] % s.groups != 0 || x.shape[1] != w.shape[1] * s.groups || w.shape[2] < 1 ||
      w.shape[3] < 1) {
    return invalid("[conv2d] expected w [O, C / groups, KH, KW] with groups " +
                   std::to_string(s.groups) + " of " + conv_text(x) + ", got " + conv_text(w));
  }
  std::int64_t expected[4] = {x.shape[0], w.shape[0], 0, 0};
  for (int d = 0; d < 2; ++d) {
    expected[2 + d] = y.shape[2 + d];
    if (!sizes) continue;
    const int end = s.padding_end[d] < 0 ? s.padding[d] : s.padding_end[d];
    const std::int64_t reach = s.dilation[d] * (w.shape[2 + d] - 1) + 1;
    const std::int64_t room = x.shape[2 + d] + s.padding[d] + end - reach;
    if (room < 0) {
      return invalid("[conv2d] expected a kernel of at most the padded image, got a reach of " +
                     std::to_string(reach) + " on " + conv_text(x) + "; try more padding");
    }
    expected[2 + d] = room / s.stride[d] + 1;
  }
  for (int d = 0; d < 4; ++d) {
    if (y.shape[d] != expected[d]) {
      return invalid("[conv2d] expected y of [" + std::to_string(expected[0]) + ", " +
                     std::to_string(expected[1]) + ", " + std::to_string(expected[2]) + ", " +
                     std::to_string(expected[3]) + "], got " + conv_text(y));
    }
  }
  return {};
}

std::span<const KernelRow<Conv2d>> conv2d_rows() { return kRows; }

std::size_t conv2d_workspace(const Conv2d& p, const char* kernel) {
  const KernelRow<Conv2d>* row = nullptr;
  if (!check(p) || numel(p.y) == 0) return 0;
  if (!select_row<Conv2d>("conv2d", kRows, p, kernel, &row) || row > &kRows[2]) return 0;
  const ConvProblem q = problem_of(p);
  if (row == &kRows[2]) return conv_tiles_workspace(q);
  return conv_gemm_workspace(row == &kRows[0] ? with_warpgroups(q) : q);
}

Status conv2d(const Conv2d& p, const char* kernel, Workspace workspace, Stream stream) {
  if (Status s = check(p); !s) return s;
  if (Status s = check_room(p, workspace); !s) return s;
  if (numel(p.y) == 0) return {};
  const KernelRow<Conv2d>* row = nullptr;
  if (Status s = select_row<Conv2d>("conv2d", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, workspace, stream);
}

}  // namespace rm::cuda_ops
