// What takes any convolution: an output element or a weight's gradient at a time; and dbias.
#include "conv2d/common.hpp"
#include "conv2d/kernels/conv2d_naive_any.cuh"

namespace rm::cuda_ops {
namespace {

double outputs_of(const ConvArgs& a) {
  return static_cast<double>(a.n) * a.groups * a.out * a.oh * a.ow;
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

}  // namespace

double conv_naive_us(const ConvProblem& p) {
  return 3 + outputs_of(p.args) * p.args.in * p.args.kh * p.args.kw * 2 / compute_rate(2e6);
}

Status launch_conv_naive(const ConvProblem& p, Stream stream) {
  const auto blocks =
      static_cast<unsigned>(ceil_div(static_cast<std::int64_t>(outputs_of(p.args)), 256));
  return dispatch_float(p.dtype, [&](auto type) {
    return launch_overlapped("conv2d", conv2d_naive<typename decltype(type)::type>, blocks, 256, 0,
                             stream, p.args);
  });
}

double conv_weight_naive_us(const ConvWeightProblem& p) {
  const ConvWeightArgs& a = p.args;
  return 3 + 2.0 * a.n * a.oh * a.ow * a.groups * a.out * a.in * a.kh * a.kw / compute_rate(1e6);
}

Status launch_conv_weight_naive(const ConvWeightProblem& p, Stream stream) {
  const ConvWeightArgs& a = p.args;
  const std::int64_t weights = static_cast<std::int64_t>(a.groups) * a.out * a.in * a.kh * a.kw;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(weights, 1 << 20));
  dispatch_float(p.dtype, [&](auto type) {
    conv2d_weight_naive<typename decltype(type)::type><<<blocks, 256, 0, stream>>>(a);
  });
  return launch_status("conv2d");
}

std::size_t conv_bias_workspace(const Conv2dBackward& p) {
  return p.dbias ? whole(static_cast<std::size_t>(bias_splits(p)) * p.dy.shape[1] * 4) : 0;
}

Status launch_conv_bias(const Conv2dBackward& p, const Tensor& dy, void* room, Stream stream) {
  const ConvWeightProblem w = conv_weight_problem(p, dy);
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

}  // namespace rm::cuda_ops
