// The table of conv2d's gradients: dy times the activation's slope where there is one, then dbias,
// dx and dw.
#include "_shim/alias_shim.hpp"
#include "conv2d/common.hpp"

namespace rm::cuda_ops {

ConvWeightProblem conv_weight_problem(const Conv2dBackward& p, const Tensor& dy) {
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

namespace {

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

/// What sums dw beside a row's dx.
enum class WeightBy { gemm, tiles, naive };
WeightBy weight_by(const ConvWeightProblem& w) {
  if (!conv_weight_gemm_why_not(w)) return WeightBy::gemm;
  return conv_tiles_weight_why_not(w) ? WeightBy::naive : WeightBy::tiles;
}
double weight_us(const ConvWeightProblem& w) {
  const WeightBy by = weight_by(w);
  return by == WeightBy::gemm    ? conv_weight_gemm_us(w)
         : by == WeightBy::tiles ? conv_tiles_weight_us(w)
                                 : conv_weight_naive_us(w);
}
std::size_t weight_workspace(const ConvWeightProblem& w) {
  const WeightBy by = weight_by(w);
  return by == WeightBy::gemm    ? conv_weight_gemm_workspace(w)
         : by == WeightBy::tiles ? conv_tiles_weight_workspace(w)
                                 : 0;
}
Status launch_weight(const ConvWeightProblem& w, Workspace room, Stream stream) {
  const WeightBy by = weight_by(w);
  return by == WeightBy::gemm    ? launch_conv_weight_gemm(w, room, stream)
         : by == WeightBy::tiles ? launch_conv_tiles_weight(w, room, stream)
                                 : launch_conv_weight_naive(w, stream);
}
ConvWeightProblem weight_problem(const Conv2dBackward& p, bool warpgroups) {
  ConvWeightProblem w = conv_weight_problem(p, p.dy);
  w.warpgroups = warpgroups;
  return w;
}

double input_naive_us(const ConvProblem& p) {
  return is_depthwise(p.args) ? conv_depthwise_us(p) : conv_naive_us(p);
}

const char* depthwise_why_not(const Conv2dBackward& p) {
  return conv_depthwise_weight_why_not(conv_weight_problem(p, p.dy));
}
Status launch_depthwise(const Conv2dBackward& p, Workspace room, Stream stream) {
  if (p.dx) {
    if (Status s = launch_conv_depthwise(conv_input_problem(p, p.dy), stream); !s) return s;
  }
  return p.dw ? launch_conv_depthwise_weight(conv_weight_problem(p, p.dy), room, stream) : Status{};
}

template <ConvBy kBy>
Status launch_products(const Conv2dBackward& p, Workspace room, Stream stream) {
  if (p.dx) {
    if (Status s = launch_conv_input(p, kBy, room, stream); !s) return s;
  }
  return p.dw ? launch_weight(weight_problem(p, kBy == ConvBy::warpgroups), room, stream)
              : Status{};
}

Status launch_naive(const Conv2dBackward& p, Workspace, Stream stream) {
  if (p.dx) {
    const ConvProblem x = conv_input_problem(p, p.dy);
    const Status s =
        is_depthwise(x.args) ? launch_conv_depthwise(x, stream) : launch_conv_naive(x, stream);
    if (!s) return s;
  }
  return p.dw ? launch_conv_weight_naive(conv_weight_problem(p, p.dy), stream) : Status{};
}

template <ConvBy kBy>
const char* products_why_not(const Conv2dBackward& p) {
  ConvProblem q = conv_input_problem(p, p.dy);
  q.warpgroups = kBy == ConvBy::warpgroups;
  return kBy == ConvBy::tiles ? conv_tiles_why_not(q) : conv_gemm_why_not(q);
}
template <ConvBy kBy>
double products_us(const Conv2dBackward& p) {
  return (p.dx ? conv_input_us(p, kBy) : 0) +
         (p.dw ? weight_us(weight_problem(p, kBy == ConvBy::warpgroups)) : 0);
}

constexpr KernelRow<Conv2dBackward> kRows[] = {
    {"conv2d_warpgroup_sm90a", "16-bit types; float32 with tf32: dx, dw as conv2d_tiles_any",
     products_why_not<ConvBy::warpgroups>, products_us<ConvBy::warpgroups>,
     launch_products<ConvBy::warpgroups>},
    {"conv2d_gemm_sm80", "the same on other devices", products_why_not<ConvBy::mma>,
     products_us<ConvBy::mma>, launch_products<ConvBy::mma>},
    {"conv2d_tiles_any", "float32 by multiply-adds", products_why_not<ConvBy::tiles>,
     products_us<ConvBy::tiles>, launch_products<ConvBy::tiles>},
    {"conv2d_depthwise_any", "one input and one output channel a group, channels last in vectors",
     depthwise_why_not,
     [](const Conv2dBackward& p) {
       return (p.dx ? conv_depthwise_us(conv_input_problem(p, p.dy)) : 0) +
              (p.dw ? conv_depthwise_weight_us(conv_weight_problem(p, p.dy)) : 0);
     },
     launch_depthwise},
    {"conv2d_naive_any", "any problem",
     [](const Conv2dBackward&) -> const char* { return nullptr; },
     [](const Conv2dBackward& p) {
       return (p.dx ? input_naive_us(conv_input_problem(p, p.dy)) : 0) +
              (p.dw ? conv_weight_naive_us(conv_weight_problem(p, p.dy)) : 0);
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
  const ConvWeightProblem w = conv_weight_problem(p, p.dy);
  if (row == &kRows[3]) return p.dw ? conv_depthwise_weight_workspace(w) : 0;
  const ConvBy by = row == &kRows[0]   ? ConvBy::warpgroups
                    : row == &kRows[1] ? ConvBy::mma
                                       : ConvBy::tiles;
  return std::max(p.dx ? conv_input_workspace(p, by) : 0,
                  p.dw ? weight_workspace(weight_problem(p, by == ConvBy::warpgroups)) : 0);
}

}  // namespace

std::span<const KernelRow<Conv2dBackward>> conv2d_backward_rows() { return kRows; }

std::size_t conv2d_backward_workspace(const Conv2dBackward& p, const char* kernel) {
  if (!check(p) || numel(p.dy) == 0) return 0;
  if (numel(p.x) == 0) return dy_bytes(p) + conv_bias_workspace(p);
  Conv2dBackward q = p;
  q.dy = scaled_dy(p, nullptr), q.epilogue = {};
  const KernelRow<Conv2dBackward>* row = nullptr;
  if (!select_row<Conv2dBackward>("conv2d", kRows, q, kernel, &row)) return 0;
  return dy_bytes(p) + conv_bias_workspace(p) + row_bytes(q, row);
}

namespace {

/// `like` as a gradient may be laid out: 0 as it is, 1 channels last, 2 dense, 3 channels last at
/// an odd address.
Tensor laid_out(const Tensor& like, int layout) {
  Tensor t = like;
  if (layout == 0 || t.rank != 4) return t;
  t.data = reinterpret_cast<void*>(layout == 3 ? 2 : 0);      // only its alignment is looked at
  constexpr int kOrder[2][4] = {{1, 3, 2, 0}, {3, 2, 1, 0}};  // the fastest axis first
  std::int64_t dense = 1;
  for (const int d : kOrder[layout == 2]) t.stride[d] = dense, dense *= t.shape[d];
  return t;
}

}  // namespace

std::size_t conv2d_backward_most_workspace(const Conv2dBackward& p, const char* kernel) {
  std::size_t most = 0;
  for (int of_dx = 0; of_dx < (p.dx ? 4 : 1); ++of_dx) {
    for (int of_dw = 0; of_dw < (p.dw ? 4 : 1); ++of_dw) {
      Conv2dBackward q = p;
      const Tensor dx = laid_out(p.x, of_dx), dw = laid_out(p.w, of_dw);
      if (p.dx) q.dx = &dx;
      if (p.dw) q.dw = &dw;
      most = std::max(most, conv2d_backward_workspace(q, kernel));
    }
  }
  return most;
}

Status conv2d_backward(const Conv2dBackward& p, const char* kernel, Workspace workspace,
                       Stream stream) {
  if (Status s = check(p); !s) return s;
  if (Status s = check_memory("conv2d", {{"dx", p.dx}, {"dw", p.dw}, {"dbias", p.dbias}},
                              {{"dy", &p.dy},
                               {"x", &p.x},
                               {"w", &p.w},
                               {"aux", has_slope(p) ? p.epilogue.aux : nullptr}},
                              workspace);
      !s) {
    return s;
  }
  if (numel(p.dy) == 0 || numel(p.x) == 0) {
    for (const Tensor* t : {p.dx, p.dw, p.dbias}) {
      if (Status s = clear(t, stream); !s) return s;
    }
    if (numel(p.dy) == 0 || !p.dbias) return {};
  }
  if (Status s = check_workspace("conv2d", conv2d_backward_workspace(p, kernel), workspace); !s)
    return s;
  std::size_t used = 0;
  Conv2dBackward q = p;
  void* scaled = take(workspace, used, dy_bytes(p));
  q.dy = scaled_dy(p, scaled), q.epilogue = {};
  const KernelRow<Conv2dBackward>* row = nullptr;
  if (Status s = select_row<Conv2dBackward>("conv2d", kRows, q, kernel, &row); !s) return s;
  if (has_slope(p)) {
    if (Status s = launch_scale(p, scaled, stream); !s) return s;
  }
  void* parts = take(workspace, used, conv_bias_workspace(p));
  if (p.dbias) {
    if (Status s = launch_conv_bias(p, q.dy, parts, stream); !s) return s;
  }
  if (numel(p.x) == 0) return {};
  const Workspace rest{static_cast<char*>(workspace.data) + used,
                       workspace.bytes > used ? workspace.bytes - used : 0};
  return row->launch(q, rest, stream);
}

}  // namespace rm::cuda_ops
