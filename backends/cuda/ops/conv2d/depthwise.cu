// Depthwise convolutions: one input and one output channel a group. Choice and launches.
#include "conv2d/common.hpp"
#include "conv2d/kernels/conv2d_depthwise_any.cuh"

namespace rm::cuda_ops {
namespace {

/// Taps lie side by side and results without gaps.
bool has_windows(const ConvMap& m) {
  bool ok = true;
  for (int d = 0; d < 2; ++d) {
    ok = ok && m.mul[d] == 1 && m.div[d] == 1 && (m.step[d] == 1 || m.step[d] == -1);
  }
  return ok;
}

/// `channels` in vectors of `per`: a unit has up to `length` places, a block up to 32 lanes.
ConvUnits units_of(int n, int oh, int ow, int channels, int per, int length) {
  ConvUnits u{};
  const auto segments = static_cast<int>(ceil_div(ow, length));
  u.length = length;
  u.units = n * oh * segments, u.lanes = 1;
  while (u.lanes < 32 && u.lanes * per < channels) u.lanes *= 2;
  u.by_segments = FastDivisor(static_cast<std::uint32_t>(segments));
  u.by_oh = FastDivisor(static_cast<std::uint32_t>(oh));
  return u;
}
bool countable(int n, int oh, int ow) {
  return static_cast<std::int64_t>(n) * oh * ow < 0x7fff0000;
}

/// Output elements in the order of memory, with 8- or 4-element vectors where everything allows it.
bool in_vectors(const ConvProblem& p) {
  const ConvArgs& a = p.args;
  bool aligned = conv_in_vectors(a.x, a.x_stride, a.groups, p.dtype) &&
                 conv_in_vectors(a.y, a.y_stride, a.groups, p.dtype);
  for (const void* q : {a.bias, a.residual, static_cast<const void*>(a.aux)}) {
    aligned = aligned && reinterpret_cast<std::uintptr_t>(q) % 16 == 0;
  }
  return aligned && a.kh * a.kw <= kDepthwiseMaxTaps && countable(a.n, a.oh, a.ow);
}
double outputs_of(const ConvArgs& a) { return static_cast<double>(a.n) * a.groups * a.oh * a.ow; }

struct WeightPlan {
  ConvUnits units;
  int channel_blocks, tap_blocks, splits;
  std::size_t bytes;
};
WeightPlan plan_of(const ConvWeightProblem& p) {
  const ConvWeightArgs& a = p.args;
  WeightPlan out{};
  out.units = units_of(a.n, a.oh, a.ow, a.groups, kDepthwiseChannels, 8);
  out.channel_blocks = static_cast<int>(ceil_div(a.groups, out.units.lanes * kDepthwiseChannels));
  out.tap_blocks = static_cast<int>(ceil_div(a.kh * a.kw, kDepthwiseTaps));
  const std::int64_t wanted =
      ceil_div(2 * std::max(1, multiprocessors()),
               static_cast<std::int64_t>(out.channel_blocks) * out.tap_blocks);
  const std::int64_t most = ceil_div(out.units.units, 256 / out.units.lanes);
  out.splits = static_cast<int>(std::clamp<std::int64_t>(wanted, 1, most));
  out.bytes = whole(static_cast<std::size_t>(out.splits) * a.kh * a.kw * a.groups * 4);
  return out;
}

}  // namespace

bool is_depthwise(const ConvArgs& a) { return a.in == 1 && a.out == 1; }

double conv_depthwise_us(const ConvProblem& p) {
  const double taps = static_cast<double>(p.args.kh) * p.args.kw;
  return move_us(outputs_of(p.args) * size_of(p.dtype) *
                 (2 + (in_vectors(p) ? taps / 16 : taps / 2)));
}

Status launch_conv_depthwise(const ConvProblem& p, Stream stream) {
  const ConvArgs& a = p.args;
  if (!in_vectors(p)) {
    const auto total = static_cast<std::int64_t>(outputs_of(a));
    return dispatch_float(p.dtype, [&](auto type) {
      return launch_overlapped("conv2d", conv2d_depthwise<typename decltype(type)::type>,
                               static_cast<unsigned>(ceil_div(total, 256)), 256, 0, stream, a);
    });
  }
  const int per = 16 / size_of(p.dtype);
  const ConvUnits u = units_of(a.n, a.oh, a.ow, a.groups, per, kDepthwisePlaces);
  const dim3 grid(static_cast<unsigned>(ceil_div(u.units, 256 / u.lanes)),
                  static_cast<unsigned>(ceil_div(a.groups, u.lanes * per)));
  const int shared = a.kh * a.kw * u.lanes * 16;
  return dispatch_float(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool windows = has_windows(a.map) && a.kh == a.kw;
    auto* kernel = !windows    ? conv2d_depthwise_vectors<T>
                   : a.kw == 3 ? conv2d_depthwise_window<T, 3>
                   : a.kw == 5 ? conv2d_depthwise_window<T, 5>
                   : a.kw == 7 ? conv2d_depthwise_window<T, 7>
                               : conv2d_depthwise_vectors<T>;
    return launch_overlapped("conv2d", kernel, grid, 256, static_cast<std::size_t>(shared), stream, a,
                             u);
  });
}

const char* conv_depthwise_weight_why_not(const ConvWeightProblem& p) {
  const ConvWeightArgs& a = p.args;
  if (a.in != 1 || a.out != 1) return "a group has more than one channel";
  if (!conv_in_vectors(a.x, a.x_stride, a.groups, p.dtype) ||
      !conv_in_vectors(a.dy, a.dy_stride, a.groups, p.dtype))
    return "x or dy is not channels last in vectors";
  if (!countable(a.n, a.oh, a.ow) ||
      static_cast<std::int64_t>(a.groups) * a.kh * a.kw > 0x7fff0000 ||
      ceil_div(a.kh * a.kw, kDepthwiseTaps) > 65535 || a.groups > 1 << 20)
    return "too large";
  return nullptr;
}

double conv_depthwise_weight_us(const ConvWeightProblem& p) {
  const ConvWeightArgs& a = p.args;
  return 4 + move_us(static_cast<double>(a.n) * a.oh * a.ow * a.groups * size_of(p.dtype) * 3 *
                     static_cast<double>(ceil_div(a.kh * a.kw, kDepthwiseTaps)));
}

std::size_t conv_depthwise_weight_workspace(const ConvWeightProblem& p) { return plan_of(p).bytes; }

Status launch_conv_depthwise_weight(const ConvWeightProblem& p, Workspace workspace,
                                    Stream stream) {
  const WeightPlan plan = plan_of(p);
  if (Status s = check_workspace("conv2d", plan.bytes, workspace, kWorkspaceFrom); !s) return s;
  auto* parts = static_cast<float*>(workspace.data);
  const dim3 grid(static_cast<unsigned>(plan.splits), static_cast<unsigned>(plan.channel_blocks),
                  static_cast<unsigned>(plan.tap_blocks));
  const std::int64_t all = static_cast<std::int64_t>(p.args.kh) * p.args.kw * p.args.groups;
  dispatch_float(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool windows = p.args.kh == 3 && p.args.kw == 3 && has_windows(p.args.map);
    auto* kernel = windows ? conv2d_depthwise_weight<T, true> : conv2d_depthwise_weight<T, false>;
    kernel<<<grid, 256, 0, stream>>>(p.args, plan.units, parts);
    conv2d_depthwise_finish<T>
        <<<static_cast<unsigned>(ceil_div(all, 32)), dim3(32, 8), 0, stream>>>(p.args, parts,
                                                                               plan.splits);
  });
  return launch_status("conv2d");
}

}  // namespace rm::cuda_ops
