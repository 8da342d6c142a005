// A convolution, or the gradient of its input, as one kind of problem, and what runs it.
#pragma once

#include "_shim/dispatch_shim.hpp"
#include "conv2d/api.hpp"
#include "conv2d/kernels/conv2d_args.hpp"

namespace rm::cuda_ops {

struct ConvProblem {
  ConvArgs args;
  DType dtype = DType::f32;
  bool tf32 = false;
  bool warpgroups = false;  // of the tensor-core kernels: conv2d_warpgroup_sm90a's
};

struct ConvWeightProblem {
  ConvWeightArgs args;
  DType dtype = DType::f32;
  bool warpgroups = false;
};

// gemm.cu
const char* conv_gemm_why_not(const ConvProblem& p);
double conv_gemm_us(const ConvProblem& p);
std::size_t conv_gemm_workspace(const ConvProblem& p);
Status launch_conv_gemm(const ConvProblem& p, Workspace workspace, Stream stream);
/// src to [outer * inner, h, wd, groups, padded].
Status launch_conv_pack(const ConvPackArgs& a, DType dtype, Stream stream);
/// Whether a convolution (or dw) that would pad its channels unfolds the columns' taps instead.
bool conv_unfolds(int in, int groups, int kw, int vector, std::int64_t places);
/// src unfolded to [n, h, ow, padded].
Status launch_conv_unfold(ConvUnfoldArgs a, int n, int h, int ow, DType dtype, Stream stream);
/// What is left of a convolution of an unfolded image: one tap across.
inline void conv_unfolded(int ow, int& kw, int& wd, ConvMap& map) {
  kw = 1, wd = ow, map.mul[1] = 1, map.off[1] = 0, map.step[1] = 0, map.div[1] = 1;
}
/// The weights to [groups, out, kh, kw, padded] dense.
Status launch_conv_pack_weights(const ConvArgs& a, int padded, void* dst, DType dtype,
                                Stream stream);
/// y, bias, residual and aux in whole vectors along the channels.
bool conv_stores_in_vectors(const ConvArgs& a, DType t);
/// y's places lie as they are counted.
bool conv_is_flat(const ConvArgs& a);
/// The sum of a product's parts, stored.
Status launch_conv_finish(const ConvGemmArgs& g, DType dtype, Stream stream);

// tiles.cu
const char* conv_tiles_why_not(const ConvProblem& p);
double conv_tiles_us(const ConvProblem& p);
std::size_t conv_tiles_workspace(const ConvProblem& p);
Status launch_conv_tiles(const ConvProblem& p, Workspace workspace, Stream stream);

/// dw of float32, as a convolution of the image with dy.
const char* conv_tiles_weight_why_not(const ConvWeightProblem& p);
double conv_tiles_weight_us(const ConvWeightProblem& p);
std::size_t conv_tiles_weight_workspace(const ConvWeightProblem& p);
Status launch_conv_tiles_weight(const ConvWeightProblem& p, Workspace workspace, Stream stream);

// weight.cu
const char* conv_weight_gemm_why_not(const ConvWeightProblem& p);
double conv_weight_gemm_us(const ConvWeightProblem& p);
std::size_t conv_weight_gemm_workspace(const ConvWeightProblem& p);
Status launch_conv_weight_gemm(const ConvWeightProblem& p, Workspace workspace, Stream stream);

// depthwise.cu
bool is_depthwise(const ConvArgs& a);
double conv_depthwise_us(const ConvProblem& p);
Status launch_conv_depthwise(const ConvProblem& p, Stream stream);
const char* conv_depthwise_weight_why_not(const ConvWeightProblem& p);
double conv_depthwise_weight_us(const ConvWeightProblem& p);
std::size_t conv_depthwise_weight_workspace(const ConvWeightProblem& p);
Status launch_conv_depthwise_weight(const ConvWeightProblem& p, Workspace workspace, Stream stream);

// naive.cu
double conv_naive_us(const ConvProblem& p);
Status launch_conv_naive(const ConvProblem& p, Stream stream);
double conv_weight_naive_us(const ConvWeightProblem& p);
Status launch_conv_weight_naive(const ConvWeightProblem& p, Stream stream);
std::size_t conv_bias_workspace(const Conv2dBackward& p);
Status launch_conv_bias(const Conv2dBackward& p, const Tensor& dy, void* room, Stream stream);

// input.cpp: dx, for any tensor in place of p.dy
enum class ConvBy { tiles, mma, warpgroups };
ConvProblem conv_input_problem(const Conv2dBackward& p, const Tensor& dy);
std::size_t conv_input_workspace(const Conv2dBackward& p, ConvBy by);
double conv_input_us(const Conv2dBackward& p, ConvBy by);
Status launch_conv_input(const Conv2dBackward& p, ConvBy by, Workspace room, Stream stream);

// backward.cpp
ConvWeightProblem conv_weight_problem(const Conv2dBackward& p, const Tensor& dy);

inline std::string conv_text(const Tensor& t) {
  std::string out = "[";
  for (int d = 0; d < t.rank; ++d) out += (d ? ", " : "") + std::to_string(t.shape[d]);
  return out + "] of " + name_of(t.dtype);
}

/// Shapes, dtypes and, if `sizes`, y's height and width.
Status check_conv2d(const Tensor& x, const Tensor& w, const Tensor& y, const ConvShape& s,
                    bool sizes = true);

inline void strides_of(const Tensor& t, std::int64_t (&out)[4]) {
  for (int d = 0; d < 4; ++d) out[d] = t.stride[d];
}

/// The part of a workspace from `used` on, which grows to whole 256-byte pieces.
inline void* take(const Workspace& w, std::size_t& used, std::size_t bytes) {
  void* at = static_cast<char*>(w.data) + used;
  used += (bytes + 255) / 256 * 256;
  return at;
}
inline std::size_t whole(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

inline constexpr const char* kWorkspaceFrom = "workspace() or backward_workspace()";

/// Channels dense, whole vectors, every place on 16 bytes.
inline bool conv_in_vectors(const void* data, const std::int64_t (&stride)[4],
                            std::int64_t channels, DType t) {
  const std::int64_t vector = 16 / size_of(t);
  return channels % vector == 0 && stride[1] == 1 && stride[0] % vector == 0 &&
         stride[2] % vector == 0 && stride[3] % vector == 0 &&
         reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
}

}  // namespace rm::cuda_ops
