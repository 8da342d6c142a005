// What the kernels of conv2d get. Forward and dx are one computation: output element (n, o, h, w)
// is a sum over input channels and taps, the input read at h * mul + off + tap * step, where that
// is a multiple of div and, divided by it, inside. Forward: mul = stride, off = -padding, step =
// dilation, div = 1; dx: mul = 1, off = padding, step = -dilation, div = stride.
#pragma once

#include <cstdint>

#include "_shim/divide_shim.hpp"

namespace rm::cuda_ops {

struct ConvMap {
  int mul[2], off[2], step[2], div[2];
};

struct ConvArgs {
  const void *x, *w, *bias, *residual;
  void *y, *aux;
  std::int64_t x_stride[4], y_stride[4];  // N, C, H, W
  /// of a weight: output channel of a group, input channel, KH, KW; and from group to group
  std::int64_t w_stride[4], w_group;
  int n, groups, in, out;  // batch; channels of a group
  int h, wd, oh, ow, kh, kw;
  ConvMap map;
  int activation;  // of Activation, or kConvHardswish
  float slope;
  bool channels_last;   // y's channels are dense
  bool residual_first;  // the residual is added before the activation
};
inline constexpr int kConvHardswish = 100;

/// dw[o, c, kh, kw] = sum over n, oh, ow of dy * x at the place that forward read.
struct ConvWeightArgs {
  const void *x, *dy;
  void* dw;
  std::int64_t x_stride[4], dy_stride[4], dw_stride[4];
  int n, groups, in, out;
  int h, wd, oh, ow, kh, kw;
  ConvMap map;
};

/// From parts to dw, `unfolded`: of an unfolded image, so of kh taps.
struct ConvWeightFinishArgs {
  ConvWeightArgs conv;
  const float* parts;
  int splits, all;  // all: of a part
  FastDivisor by_padded, by_taps, by_kw, by_in;
  bool unfolded, vectors;  // vectors: dw's channels in fours
};

/// ConvArgs as a product: rows are output places, columns output channels of a group, depth is taps
/// by `padded` channels. x and w have dense channels, x's groups are `padded` apart.
struct ConvGemmArgs {
  ConvArgs conv;
  const void *x, *w;
  std::int64_t x_stride[3], w_stride[3];  // of N, H, W; of an output channel, KH, KW
  float* parts;                           // [splits][rows][G * out] where splits > 1
  int rows, padded, tiles_m, tiles_n, splits, steps, steps_per_split;
  FastDivisor by_ow, by_oh;
  bool vectors;  // y, bias, residual, aux in 16-byte vectors along channels
  bool flat;     // y's places lie as they are counted, y_stride[3] apart
};

/// dw as a product: rows are output channels of a group, columns taps by `padded` channels, depth
/// is output places. dy and x have dense channels, groups `out_padded` and `padded` apart.
struct ConvWeightGemmArgs {
  const void *x, *dy;
  std::int64_t x_stride[3], dy_stride[3];
  float* parts;  // [splits][G][out][kh * kw][padded]
  int places, groups, out, out_padded, padded, h, wd, kh, kw;
  int tiles_m, tiles_n, splits, steps, steps_per_split;
  ConvMap map;
  FastDivisor by_ow, by_oh;
};

/// dst [N, H, OW, padded] dense: at channel kw * in + c of output column ow what src [N, in, H, W]
/// has at the column that tap kw of ow reads, zeros outside and beyond: a convolution of few
/// channels becomes one of kw times as many and of one tap across.
struct ConvUnfoldArgs {
  const void* src;
  void* dst;
  std::int64_t stride[4];
  int in, wd, kw, padded, vectors;  // vectors: of all of dst
  ConvMap map;                      // its second axis
  FastDivisor by_vectors, by_ow, by_h, by_in;
};

/// dst [N, H, W, G, padded] dense = src at (n, g * in + c, h, w), zeros beyond the `in` channels of
/// a group; with aux: times the activation's slope there.
struct ConvPackArgs {
  const void *src, *aux;
  void* dst;
  /// n counts outer * inner: outer by outer_stride, inner by stride[0]
  std::int64_t stride[4], outer_stride, group_stride;
  int outer, inner, h, wd, groups, in, padded;
  int activation;
  float slope;
};

}  // namespace rm::cuda_ops
