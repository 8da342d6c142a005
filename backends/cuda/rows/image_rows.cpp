// Operators over images: conv, pool, resize, group_norm.
#include <algorithm>
#include <string>

#include "_shim/images_shim.hpp"
#include "conv2d/api.hpp"
#include "group_norm/api.hpp"
#include "pool/api.hpp"
#include "resize/api.hpp"
#include "rows/row.hpp"

namespace rm::cuda {
namespace {

using cuda_ops::Tensor;

/// An attribute of an int an axis, as an int an axis of the module: missing ones stand in front.
template <size_t kAxes>
void spread(const std::vector<int64_t>& given, size_t first, size_t axes, int (&out)[kAxes]) {
  if (given.empty()) return;
  if (given.size() < first + axes || axes > kAxes) throw NotForModule("an attribute lacks axes");
  for (size_t a = 0; a < axes; ++a) {
    const int64_t value = given[first + a];
    if (value < -(1 << 20) || value > 1 << 20) throw NotForModule("an attribute is out of range");
    out[kAxes - axes + a] = static_cast<int>(value);
  }
}

/// Convolutions of one axis are such of two, the first of size 1.
struct ConvOp {
  using Problem = cuda_ops::Conv2d;
  static constexpr const char* kOp = "conv";
  static constexpr rm_edge kEdges[] = {{'C', 0, 64}};  // channels that a tensor map holds
  static auto rows() { return cuda_ops::conv2d_rows(); }

  std::vector<Placed> tensors;  // x, w, y, then bias and residual where given
  size_t axes = 2;
  int bias = -1, residual = -1;
  bool constant_weight = false;
  cuda_ops::Conv2d given;  // without tensors

  explicit ConvOp(const rm_problem& raw) {
    const Operands p(raw);
    const int rank = p.input(0).rank;
    if (rank != 3 && rank != 4) throw NotForModule("the module has one or two spatial axes");
    axes = static_cast<size_t>(rank) - 2;
    const auto add = [&](const Tensor& t, size_t index, bool result) {
      tensors.push_back({t, index, result});
      return static_cast<int>(tensors.size()) - 1;
    };
    add(lifted(p.input(0)), 0, false);
    add(lifted(p.input(1)), 1, false);
    add(lifted(p.output(0)), 0, true);
    if (p.has_input(2)) bias = add(p.input(2), 2, false);
    if (p.has_input(3)) residual = add(lifted(p.input(3)), 3, false);
    constant_weight = p.is_constant(1);
    cuda_ops::ConvShape& s = given.shape;
    spread(p.attr_ints("stride"), 0, axes, s.stride);
    spread(p.attr_ints("dilation"), 0, axes, s.dilation);
    spread(p.attr_ints("padding"), 0, axes, s.padding);
    if (!p.attr_ints("padding").empty()) {
      s.padding_end[0] = 0;
      spread(p.attr_ints("padding"), axes, axes, s.padding_end);
      if (s.padding_end[0] < 0 || s.padding_end[1] < 0) throw NotForModule("negative padding");
    }
    s.groups = static_cast<int>(p.attr_int("groups", 1));
    s.tf32 = p.attr_int("tf32", 0) != 0 && p.input(0).dtype == cuda_ops::DType::f32;
    given.transposed = p.attr_int("transposed", 0) != 0;
    const std::string_view activation = p.attr_string("activation", "none");
    given.hardswish = activation == "hardswish";
    if (!given.hardswish) given.epilogue.activation = activation_of(activation);
    given.residual_first = true;
    if (bias >= 0) given.epilogue.bias_kind = cuda_ops::BiasKind::column;
  }

  Tensor lifted(Tensor t) const {
    if (t.rank != 3) return t;
    t.rank = 4, t.shape[3] = t.shape[2], t.stride[3] = t.stride[2];
    t.shape[2] = 1, t.stride[2] = t.shape[3] * t.stride[3];
    return t;
  }

  /// The weight with input channels last in memory, in whole vectors. Few channels are packed with
  /// the image, launch by launch.
  std::optional<Packed> packed() const {
    Tensor w = tensors[1].tensor;
    if (!constant_weight || w.rank != 4 || !cuda_ops::is_float(w.dtype)) return {};
    for (int d = 0; d < 4; ++d) {
      if (w.shape[d] == 0 || (w.shape[d] > 1 && w.stride[d] == 0)) return {};
    }
    if (given.transposed && given.shape.groups != 1) return {};  // channels lie in two axes
    const int in = given.transposed ? 0 : 1, out = 1 - in;
    if (w.shape[in] % (16 / cuda_ops::size_of(w.dtype)) != 0) return {};
    const Tensor before = w;
    w.stride[in] = 1, w.stride[3] = w.shape[in], w.stride[2] = w.stride[3] * w.shape[3];
    w.stride[out] = w.stride[2] * w.shape[2];
    if (same_strides(before, w)) return {};
    return Packed{1, w, given.transposed ? "output, taps, input" : "channels last"};
  }

  Problem problem(const Tensor* t) const {
    Problem p = given;
    p.x = t[0], p.w = t[1], p.y = t[2];
    if (bias >= 0) p.epilogue.bias = &t[bias];
    if (residual >= 0) p.epilogue.residual = &t[residual];
    return p;
  }
  /// Bytes with which any row may run whose operands lie on vectors.
  static std::size_t workspace(const Problem& p) {
    std::size_t bytes = 0;
    for (const auto& row : rows()) {
      if (row.why_not(p) == nullptr) bytes = std::max(bytes, cuda_ops::conv2d_workspace(p, row.name));
    }
    return bytes;
  }
  /// Operands on odd addresses (a script's view) would be copied first; there is no room for that.
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace space,
                              cudaStream_t stream) {
    const bool fits = cuda_ops::conv2d_workspace(p, kernel) <= space.bytes;
    return cuda_ops::conv2d(p, fits ? kernel : "conv2d_naive_any", space, stream);
  }
};

struct PoolOp {
  using Problem = cuda_ops::Pool;
  static constexpr const char* kOp = "pool";
  static auto rows() { return cuda_ops::pool_rows(); }

  std::vector<Placed> tensors;
  cuda_ops::Pool given;  // without tensors

  explicit PoolOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {p.output(0), 0, true}};
    const size_t axes = p.attr_ints("kernel").size();
    spread(p.attr_ints("kernel"), 0, axes, given.kernel);
    spread(p.attr_ints("stride"), 0, axes, given.stride);
    spread(p.attr_ints("dilation"), 0, axes, given.dilation);
    spread(p.attr_ints("padding"), 0, axes, given.begin);  // where windows end is said by y
    given.mean = p.attr_string("kind", "") == "mean";
    given.count_padding = p.attr_int("count_include_pad", 1) != 0;
    given.divisor = static_cast<int>(p.attr_int("divisor", 0));
  }
  Problem problem(const Tensor* t) const {
    Problem p = given;
    p.x = t[0], p.y = t[1];
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::pool(p, kernel, stream);
  }
};

struct ResizeOp {
  using Problem = cuda_ops::Resize;
  static constexpr const char* kOp = "resize";
  static auto rows() { return cuda_ops::resize_rows(); }

  std::vector<Placed> tensors;
  cuda_ops::Resize given;  // without tensors

  explicit ResizeOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {p.output(0), 0, true}};
    const std::vector<double> ratio = p.attr_floats("ratio");
    if (ratio.empty() || ratio.size() > 3) throw NotForModule("an attribute lacks axes");
    std::copy(ratio.begin(), ratio.end(), given.ratio + 3 - ratio.size());
    given.linear = p.attr_string("mode", "") == "linear";
    given.align_corners = p.attr_int("align_corners", 0) != 0;
  }
  Problem problem(const Tensor* t) const {
    Problem p = given;
    p.x = t[0], p.y = t[1];
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::resize(p, kernel, stream);
  }
};

struct GroupNormOp {
  using Problem = cuda_ops::GroupNorm;
  static constexpr const char* kOp = "group_norm";
  static auto rows() { return cuda_ops::group_norm_rows(); }

  std::vector<Placed> tensors;
  int weight = -1, bias = -1;
  cuda_ops::GroupNorm given;  // without tensors

  explicit GroupNormOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {p.output(0), 0, true}};
    for (const size_t i : {size_t{1}, size_t{2}}) {
      if (!p.has_input(i)) continue;
      (i == 1 ? weight : bias) = static_cast<int>(tensors.size());
      tensors.push_back({p.input(i), i, false});
    }
    given.groups = static_cast<int>(p.attr_int("groups", 1));
    given.eps = static_cast<float>(p.attr_float("eps", 1e-5));
    const std::string_view activation = p.attr_string("activation", "none");
    given.silu = activation == "silu";
    if (!given.silu && activation != "none") throw NotForModule("the module has no such activation");
  }
  Problem problem(const Tensor* t) const {
    Problem p = given;
    p.x = t[0], p.y = t[1];
    if (weight >= 0) p.weight = &t[weight];
    if (bias >= 0) p.bias = &t[bias];
    return p;
  }
  static std::size_t workspace(const Problem& p) { return cuda_ops::group_norm_workspace(p); }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace space,
                              cudaStream_t stream) {
    return cuda_ops::group_norm(p, kernel, space, stream);
  }
};

}  // namespace

void add_image_rows(std::vector<rm_kernel>& out) {
  Row<ConvOp>::add(out);
  Row<PoolOp>::add(out);
  Row<ResizeOp>::add(out);
  Row<GroupNormOp>::add(out);
}

}  // namespace rm::cuda
