// Gradients of conv2d: dy times the activation's slope where there is one, then dbias, dx as a
// convolution of dy with the weights transposed, and dw.
#include "conv2d/common.hpp"
#include "conv2d/kernels/conv2d_naive_any.cuh"

namespace rm::cuda_ops {
namespace {

ConvProblem input_problem(const Conv2dBackward& p, const Tensor& dy) {
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

ConvWeightProblem weight_problem(const Conv2dBackward& p, const Tensor& dy) {
  ConvWeightProblem out{{}, p.x.dtype};
  ConvWeightArgs& a = out.args;
  a.x = p.x.data, a.dy = dy.data;
  strides_of(p.x, a.x_stride), strides_of(dy, a.dy_stride);
  if (p.dw) a.dw = p.dw->data, strides_of(*p.dw, a.dw_stride);
  const ConvShape& s = p.shape;
  a.n = static_cast<int>(p.x.shape[0]), a.groups = s.groups;
  a.in = static_cast<int>(p.w.shape[1]), a.out = static_cast<int>(p.w.shape[0] / s.groups);
  a.h = static_cast<int>(p.x.shape[2]), a.wd = static_cast<int>(p.x.shape[3]);
  a.oh = static_cast<int>(dy.shape[2]), a.ow = static_cast<int>(dy.shape[3]);
  a.kh = static_cast<int>(p.w.shape[2]), a.kw = static_cast<int>(p.w.shape[3]);
  for (int d = 0; d < 2; ++d) {
    a.map.mul[d] = s.stride[d], a.map.off[d] = -s.padding[d], a.map.step[d] = s.dilation[d];
    a.map.div[d] = 1;
  }
  return out;
}

double weight_naive_us(const ConvWeightProblem& p) {
  const ConvWeightArgs& a = p.args;
  return 3 + 2.0 * a.n * a.oh * a.ow * a.groups * a.out * a.in * a.kh * a.kw / 1e6;
}

Status launch_weight_naive(const ConvWeightProblem& p, Stream stream) {
  const ConvWeightArgs& a = p.args;
  const std::int64_t weights = static_cast<std::int64_t>(a.groups) * a.out * a.in * a.kh * a.kw;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(weights, 1 << 20));
  dispatch_float(p.dtype, [&](auto type) {
    conv2d_weight_naive<typename decltype(type)::type><<<blocks, 256, 0, stream>>>(a);
  });
  return launch_status("conv2d");
}

/// dy, or its product with the activation's slope, dense and channels last, in the workspace.
bool has_slope(const Conv2dBackward& p) { return p.epilogue.activation != Activation::none; }

Tensor scaled_dy(const Conv2dBackward& p, void* data) {
  Tensor t = p.dy;
  if (!has_slope(p)) return t;
  t.data = data, t.stride[1] = 1, t.stride[3] = t.shape[1];
  t.stride[2] = t.stride[3] * t.shape[3], t.stride[0] = t.stride[2] * t.shape[2];
  return t;
}
std::size_t dy_bytes(const Conv2dBackward& p) {
  return has_slope(p) ? whole(static_cast<std::size_t>(numel(p.dy)) * size_of(p.dy.dtype)) : 0;
}

Status launch_scale(const Conv2dBackward& p, void* data, Stream stream) {
  ConvPackArgs k{};
  k.src = p.dy.data, k.aux = p.epilogue.aux->data, k.dst = data;
  strides_of(p.dy, k.stride);
  k.outer = static_cast<int>(p.dy.shape[0]), k.inner = 1, k.outer_stride = k.stride[0];
  k.h = static_cast<int>(p.dy.shape[2]), k.wd = static_cast<int>(p.dy.shape[3]);
  k.groups = 1, k.in = k.padded = static_cast<int>(p.dy.shape[1]);
  k.activation = static_cast<int>(p.epilogue.activation), k.slope = p.epilogue.slope;
  return launch_conv_pack(k, p.dy.dtype, stream);
}

/// dy's places follow each other, channels last in vectors.
bool bias_in_vectors(const Tensor& dy) {
  const std::int64_t channels = dy.shape[1];
  std::int64_t stride[4];
  strides_of(dy, stride);
  return conv_in_vectors(dy.data, stride, channels, dy.dtype) && dy.stride[3] == channels &&
         dy.stride[2] == channels * dy.shape[3] &&
         (dy.shape[0] == 1 || dy.stride[0] == dy.stride[2] * dy.shape[2]);
}
int bias_splits(const Conv2dBackward& p) {
  const std::int64_t places = p.dy.shape[0] * p.dy.shape[2] * p.dy.shape[3];
  const std::int64_t columns = ceil_div(p.dy.shape[1], 256);
  return static_cast<int>(std::clamp<std::int64_t>(
      std::min(ceil_div(places, 64), ceil_div(4 * std::max(1, multiprocessors()), columns)), 1,
      1024));
}
std::size_t bias_bytes(const Conv2dBackward& p) {
  return p.dbias ? whole(static_cast<std::size_t>(bias_splits(p)) * p.dy.shape[1] * 4) : 0;
}

Status launch_bias(const Conv2dBackward& p, const Tensor& dy, void* room, Stream stream) {
  const ConvWeightProblem w = weight_problem(p, dy);
  const int channels = static_cast<int>(dy.shape[1]), splits = bias_splits(p);
  float* parts = static_cast<float*>(room);
  dispatch_float(dy.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto columns = [&](int width) {
      return static_cast<unsigned>(ceil_div(channels, width));
    };
    if (bias_in_vectors(dy)) {
      constexpr int V = 16 / static_cast<int>(sizeof(T));
      const dim3 grid(columns(32 * V), static_cast<unsigned>(splits));
      conv2d_bias_vectors<T><<<grid, dim3(32, 8), 0, stream>>>(
          static_cast<const T*>(dy.data), dy.shape[0] * dy.shape[2] * dy.shape[3], channels, parts);
    } else {
      const dim3 grid(columns(32), static_cast<unsigned>(splits));
      conv2d_bias_parts<T><<<grid, dim3(32, 8), 0, stream>>>(w.args, parts);
    }
    conv2d_bias_finish<T><<<columns(32), dim3(32, 32), 0, stream>>>(parts, splits, channels,
                                                                    static_cast<T*>(p.dbias->data));
  });
  return launch_status("conv2d");
}

double input_naive_us(const ConvProblem& p) {
  return is_depthwise(p.args) ? conv_depthwise_us(p) : conv_naive_us(p);
}

/// fn of the products that make dx. A stride without dilation leaves every s-th place to every s-th
/// tap: each remainder is a convolution of its own with fewer taps (none: kh or kw is 0), which
/// spares products with zeros.
template <class Fn>
void for_each_product(const Conv2dBackward& p, bool warpgroups, Fn&& fn) {
  ConvProblem whole = input_problem(p, p.dy);
  whole.warpgroups = warpgroups;
  const ConvShape& s = p.shape;
  int classes[2];
  for (int d = 0; d < 2; ++d) classes[d] = s.dilation[d] == 1 ? s.stride[d] : 1;
  if (classes[0] > 8 || classes[1] > 8) classes[0] = classes[1] = 1;  // too many launches
  for (int rh = 0; rh < classes[0]; ++rh) {
    for (int rw = 0; rw < classes[1]; ++rw) {
      ConvProblem part = whole;
      ConvArgs& a = part.args;
      const int rest[2] = {rh, rw};
      std::int64_t y_offset = 0, w_offset = 0;
      for (int d = 0; d < 2; ++d) {
        if (classes[d] == 1) continue;
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

/// What runs the products of dx.
enum class By { tiles, mma, warpgroups };

std::size_t input_workspace(const Conv2dBackward& p, By by) {
  std::size_t bytes = 0;
  for_each_product(p, by == By::warpgroups, [&](const ConvProblem& q) {
    if (!has_taps(q)) return;
    bytes = std::max(bytes, by == By::tiles ? conv_tiles_workspace(q) : conv_gemm_workspace(q));
  });
  return bytes;
}
double input_us(const Conv2dBackward& p, By by) {
  double us = 0;
  for_each_product(p, by == By::warpgroups, [&](const ConvProblem& q) {
    us += !has_taps(q) ? conv_naive_us(q) : by == By::tiles ? conv_tiles_us(q) : conv_gemm_us(q);
  });
  return us;
}
Status launch_input(const Conv2dBackward& p, By by, Workspace room, Stream stream) {
  Status s;
  for_each_product(p, by == By::warpgroups, [&](const ConvProblem& q) {
    if (!s) return;
    s = !has_taps(q)      ? launch_conv_naive(q, stream)
        : by == By::tiles ? launch_conv_tiles(q, room, stream)
                          : launch_conv_gemm(q, room, stream);
  });
  return s;
}

const char* depthwise_why_not(const Conv2dBackward& p) {
  return conv_depthwise_weight_why_not(weight_problem(p, p.dy));
}
Status launch_depthwise(const Conv2dBackward& p, Workspace room, Stream stream) {
  if (p.dx) {
    if (Status s = launch_conv_depthwise(input_problem(p, p.dy), stream); !s) return s;
  }
  return p.dw ? launch_conv_depthwise_weight(weight_problem(p, p.dy), room, stream) : Status{};
}

template <By kBy>
Status launch_products(const Conv2dBackward& p, Workspace room, Stream stream) {
  if (p.dx) {
    if (Status s = launch_input(p, kBy, room, stream); !s) return s;
  }
  if (!p.dw) return {};
  ConvWeightProblem w = weight_problem(p, p.dy);
  w.warpgroups = kBy == By::warpgroups;
  return conv_weight_gemm_why_not(w) ? launch_weight_naive(w, stream)
                                     : launch_conv_weight_gemm(w, room, stream);
}

Status launch_naive(const Conv2dBackward& p, Workspace, Stream stream) {
  if (p.dx) {
    const ConvProblem x = input_problem(p, p.dy);
    const Status s =
        is_depthwise(x.args) ? launch_conv_depthwise(x, stream) : launch_conv_naive(x, stream);
    if (!s) return s;
  }
  return p.dw ? launch_weight_naive(weight_problem(p, p.dy), stream) : Status{};
}

double weights_us(const Conv2dBackward& p, bool gemm, bool warpgroups = false) {
  ConvWeightProblem w = weight_problem(p, p.dy);
  w.warpgroups = warpgroups;
  return gemm && !conv_weight_gemm_why_not(w) ? conv_weight_gemm_us(w) : weight_naive_us(w);
}

template <By kBy>
const char* products_why_not(const Conv2dBackward& p) {
  ConvProblem q = input_problem(p, p.dy);
  q.warpgroups = kBy == By::warpgroups;
  return kBy == By::tiles ? conv_tiles_why_not(q) : conv_gemm_why_not(q);
}
template <By kBy>
double products_us(const Conv2dBackward& p) {
  return (p.dx ? input_us(p, kBy) : 0) + (p.dw ? weights_us(p, true, kBy == By::warpgroups) : 0);
}

constexpr KernelRow<Conv2dBackward> kRows[] = {
    {"conv2d_warpgroup_sm90", "16-bit types; float32 with tf32: dx alone, dw as conv2d_naive_any",
     products_why_not<By::warpgroups>, products_us<By::warpgroups>,
     launch_products<By::warpgroups>},
    {"conv2d_gemm_sm80", "the same on other devices", products_why_not<By::mma>,
     products_us<By::mma>, launch_products<By::mma>},
    {"conv2d_tiles_any", "float32: dx by multiply-adds, dw as conv2d_naive_any",
     products_why_not<By::tiles>, products_us<By::tiles>, launch_products<By::tiles>},
    {"conv2d_depthwise_any", "one input and one output channel a group, channels last in vectors",
     depthwise_why_not,
     [](const Conv2dBackward& p) {
       return (p.dx ? conv_depthwise_us(input_problem(p, p.dy)) : 0) +
              (p.dw ? conv_depthwise_weight_us(weight_problem(p, p.dy)) : 0);
     },
     launch_depthwise},
    {"conv2d_naive_any", "any problem",
     [](const Conv2dBackward&) -> const char* { return nullptr; },
     [](const Conv2dBackward& p) {
       return (p.dx ? input_naive_us(input_problem(p, p.dy)) : 0) +
              (p.dw ? weights_us(p, false) : 0);
     },
     launch_naive},
};

Status check(const Conv2dBackward& p) {
  if (Status s = check_conv2d(p.x, p.w, p.dy, p.shape); !s) return s;
  const auto like = [](const Tensor* t, const Tensor& of) {
    return t == nullptr || (t->dtype == of.dtype && same_shape(*t, of));
  };
  if (!like(p.dx, p.x) || !like(p.dw, p.w)) {
    return invalid("[conv2d] expected dx and dw of the shapes and dtypes of x and w, got " +
                   conv_text(like(p.dx, p.x) ? *p.dw : *p.dx));
  }
  if (p.dbias && (p.dbias->dtype != p.x.dtype || numel(*p.dbias) != p.w.shape[0] ||
                  !is_contiguous(*p.dbias))) {
    return invalid("[conv2d] expected dbias dense [O] of x's dtype, got " + conv_text(*p.dbias));
  }
  if (!has_slope(p)) return {};
  const Tensor* aux = p.epilogue.aux;
  bool same = aux != nullptr && like(aux, p.dy);
  for (int d = 0; same && d < 4; ++d) same = aux->shape[d] <= 1 || aux->stride[d] == p.dy.stride[d];
  return same
             ? Status{}
             : invalid("[conv2d] expected aux of dy's shape, strides and dtype with an activation");
}

/// dx and dw of problems without places are zeros.
Status clear(const Tensor* t, Stream stream) {
  if (t == nullptr || numel(*t) == 0) return {};
  if (!is_contiguous(*t)) {  // any dense order of the axes
    std::int64_t last = 0;
    for (int d = 0; d < t->rank; ++d) last += (t->shape[d] - 1) * t->stride[d];
    if (last + 1 != numel(*t))
      return unsupported("[conv2d] expected dense gradients of an empty problem");
  }
  return cuda_status(
      "conv2d",
      cudaMemsetAsync(t->data, 0, static_cast<std::size_t>(numel(*t)) * size_of(t->dtype), stream),
      "a fill without errors");
}

std::size_t row_bytes(const Conv2dBackward& p, const KernelRow<Conv2dBackward>* row) {
  if (row > &kRows[3]) return 0;
  ConvWeightProblem w = weight_problem(p, p.dy);
  if (row == &kRows[3]) return p.dw ? conv_depthwise_weight_workspace(w) : 0;
  const By by = row == &kRows[0] ? By::warpgroups : row == &kRows[1] ? By::mma : By::tiles;
  w.warpgroups = by == By::warpgroups;
  const std::size_t x = p.dx ? input_workspace(p, by) : 0;
  return std::max(x, p.dw && !conv_weight_gemm_why_not(w) ? conv_weight_gemm_workspace(w) : 0);
}

}  // namespace

std::span<const KernelRow<Conv2dBackward>> conv2d_backward_rows() { return kRows; }

std::size_t conv2d_backward_workspace(const Conv2dBackward& p, const char* kernel) {
  if (!check(p) || numel(p.dy) == 0 || numel(p.x) == 0) return 0;
  Conv2dBackward q = p;
  q.dy = scaled_dy(p, nullptr), q.epilogue = {};
  const KernelRow<Conv2dBackward>* row = nullptr;
  if (!select_row<Conv2dBackward>("conv2d", kRows, q, kernel, &row)) return 0;
  return dy_bytes(p) + bias_bytes(p) + row_bytes(q, row);
}

Status conv2d_backward(const Conv2dBackward& p, const char* kernel, Workspace workspace,
                       Stream stream) {
  if (Status s = check(p); !s) return s;
  if (numel(p.dy) == 0 || numel(p.x) == 0) {
    for (const Tensor* t : {p.dx, p.dw, p.dbias}) {
      if (Status s = clear(t, stream); !s) return s;
    }
    if (numel(p.dy) == 0 || !p.dbias) return {};
  }
  if (Status s = check_workspace(conv2d_backward_workspace(p, kernel), workspace); !s) return s;
  std::size_t used = 0;
  Conv2dBackward q = p;
  void* scaled = take(workspace, used, dy_bytes(p));
  q.dy = scaled_dy(p, scaled), q.epilogue = {};
  const KernelRow<Conv2dBackward>* row = nullptr;
  if (Status s = select_row<Conv2dBackward>("conv2d", kRows, q, kernel, &row); !s) return s;
  if (has_slope(p)) {
    if (Status s = launch_scale(p, scaled, stream); !s) return s;
  }
  void* parts = take(workspace, used, bias_bytes(p));
  if (p.dbias) {
    if (Status s = launch_bias(p, q.dy, parts, stream); !s) return s;
  }
  if (numel(p.x) == 0) return {};
  const Workspace rest{static_cast<char*>(workspace.data) + used,
                       workspace.bytes > used ? workspace.bytes - used : 0};
  return row->launch(q, rest, stream);
}

}  // namespace rm::cuda_ops
