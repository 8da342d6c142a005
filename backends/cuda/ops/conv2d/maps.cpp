// Tensor maps of a convolution's operands: the image in im2col form, the weights in boxes.
#include "conv2d/maps.hpp"

#include <cuda.h>

#include "_shim/tensor_map_shim.hpp"
#include "conv2d/kernels/conv2d_maps_args.hpp"

namespace rm::cuda_ops {
namespace {

struct Corners {
  int lower[2], upper[2];  // of H, W: the first and last place that tap 0 reads, from the borders
};

Corners corners_of(const ConvArgs& a) {
  Corners out{};
  const int taps[2] = {a.kh, a.kw}, places[2] = {a.oh, a.ow}, sizes[2] = {a.h, a.wd};
  for (int d = 0; d < 2; ++d) {
    const int step = a.map.step[d];
    out.lower[d] = a.map.off[d] + (step < 0 ? (taps[d] - 1) * step : 0);
    out.upper[d] = (places[d] - 1) * a.map.mul[d] + out.lower[d] - (sizes[d] - 1);
  }
  return out;
}

/// Bytes from one index of an axis to the next; an axis of one element may have any stride.
cuuint64_t stride_of(std::int64_t elements, std::int64_t size, DType t) {
  return static_cast<cuuint64_t>(size == 1 ? 16 : elements * size_of(t));
}

}  // namespace

const char* conv_maps_why_not(const ConvGemmArgs& g, DType dtype) {
  const ConvArgs& a = g.conv;
  if (size_of(dtype) != 2) return "not of 16 bits";
  if (g.padded % 64 != 0) return "channels are not whole 128 bytes";
  const Corners corners = corners_of(a);
  const int taps[2] = {a.kh, a.kw}, sizes[3] = {a.n, a.h, a.wd};
  for (int d = 0; d < 2; ++d) {
    if (a.map.div[d] != 1 || a.map.mul[d] > 8) return "a stride beyond the map's";
    for (const int corner : {corners.lower[d], corners.upper[d]}) {
      if (corner < -128 || corner > 127) return "a border beyond the map's";
    }
    if ((taps[d] - 1) * std::abs(a.map.step[d]) > 255) return "a tap beyond the map's";
  }
  for (int d = 0; d < 3; ++d) {
    if (sizes[d] > 1 && g.x_stride[d] <= 0) return "an axis of x without a stride of its own";
  }
  const int weights[3] = {a.groups * a.out, a.kh, a.kw};
  for (int d = 0; d < 3; ++d) {
    if (weights[d] > 1 && g.w_stride[d] <= 0) return "an axis of w without a stride of its own";
  }
  return nullptr;
}

Status encode_conv_maps(const ConvGemmArgs& g, DType dtype, int m, int n, ConvMapsArgs* out) {
  const ConvArgs& a = g.conv;
  const auto tiled = tensor_map_encoder();
  const auto places = im2col_map_encoder();
  if (tiled == nullptr || places == nullptr)
    return unsupported("[conv2d] expected cuTensorMapEncodeIm2col in the driver, got none");
  const Corners corners = corners_of(a);
  for (int d = 0; d < 2; ++d) out->lower[d] = corners.lower[d], out->step[d] = a.map.step[d];
  out->g = g;
  const auto type =
      dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto size = [](std::int64_t v) { return static_cast<cuuint64_t>(v); };
  const cuuint64_t shape[4] = {size(static_cast<std::int64_t>(a.groups) * g.padded), size(a.wd),
                               size(a.h), size(a.n)};
  const cuuint64_t stride[3] = {stride_of(g.x_stride[2], a.wd, dtype),
                                stride_of(g.x_stride[1], a.h, dtype),
                                stride_of(g.x_stride[0], a.n, dtype)};
  const int lower[2] = {corners.lower[1], corners.lower[0]};
  const int upper[2] = {corners.upper[1], corners.upper[0]};
  const cuuint32_t walk[4] = {1, static_cast<cuuint32_t>(a.map.mul[1]),
                              static_cast<cuuint32_t>(a.map.mul[0]), 1};
  CUresult result = places(&out->x, type, 4, const_cast<void*>(g.x), shape, stride, lower, upper,
                           64, static_cast<cuuint32_t>(m), walk, CU_TENSOR_MAP_INTERLEAVE_NONE,
                           CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) {
    const cuuint64_t taps[4] = {size(g.padded), size(a.kw), size(a.kh),
                                size(static_cast<std::int64_t>(a.groups) * a.out)};
    const cuuint64_t steps[3] = {stride_of(g.w_stride[2], a.kw, dtype),
                                 stride_of(g.w_stride[1], a.kh, dtype),
                                 stride_of(g.w_stride[0], a.groups * a.out, dtype)};
    const cuuint32_t box[4] = {64, 1, 1, static_cast<cuuint32_t>(n)}, one[4] = {1, 1, 1, 1};
    result = tiled(&out->w, type, 4, const_cast<void*>(g.w), taps, steps, box, one,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  }
  if (result == CUDA_SUCCESS) return {};
  return {Code::device_error, "[conv2d] expected tensor maps, got driver error " +
                                  std::to_string(static_cast<int>(result))};
}

}  // namespace rm::cuda_ops
