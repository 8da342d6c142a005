// layer_norm, rms_norm and softmax.
#include "norm/api.hpp"
#include "rows/row.hpp"
#include "softmax/api.hpp"

namespace rm::cuda {
namespace {

using cuda_ops::Tensor;

template <bool kRms>
struct NormOp {
  using Problem = cuda_ops::NormForward;
  static constexpr const char* kOp = kRms ? "rms_norm" : "layer_norm";
  static constexpr size_t kBias = 2, kResidual = kRms ? 2 : 3;
  static auto rows() { return cuda_ops::norm_forward_rows(); }

  std::vector<Placed> tensors;
  int weight = -1, bias = -1, residual = -1, sum = -1;
  float eps, weight_offset;

  explicit NormOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {p.output(0), 0, true}};
    const auto add = [&](const Tensor& t, size_t index, bool result) {
      tensors.push_back({t, index, result});
      return static_cast<int>(tensors.size()) - 1;
    };
    if (p.has_input(1)) weight = add(p.input(1), 1, false);
    if (!kRms && p.has_input(kBias)) bias = add(p.input(kBias), kBias, false);
    if (p.has_input(kResidual)) residual = add(p.input(kResidual), kResidual, false);
    if (p.has_output(1)) sum = add(p.output(1), 1, true);
    eps = static_cast<float>(p.attr_float("eps", 1e-5));
    weight_offset = static_cast<float>(p.attr_float("weight_offset", 0.0));
  }

  Problem problem(const Tensor* t) const {
    Problem p;
    p.kind = kRms ? cuda_ops::Norm::rms : cuda_ops::Norm::layer;
    p.x = t[0], p.y = t[1];
    if (weight >= 0) p.weight = &t[weight];
    if (bias >= 0) p.bias = &t[bias];
    if (residual >= 0) p.residual = &t[residual];
    if (sum >= 0) p.sum = &t[sum];
    p.eps = eps, p.weight_offset = weight_offset;
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::norm_forward(p, kernel, stream);
  }
};

template <bool kRms>
struct NormBackwardOp {
  using Problem = cuda_ops::NormBackward;
  static constexpr const char* kOp = kRms ? "rms_norm_backward" : "layer_norm_backward";
  static auto rows() { return cuda_ops::norm_backward_rows(); }

  std::vector<Placed> tensors;
  int weight = -1, sum = -1;
  float eps, weight_offset;

  explicit NormBackwardOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {p.input(1), 1, false}};
    for (size_t i = 0; i < (kRms ? 2 : 3); ++i) tensors.push_back({p.output(i), i, true});
    const auto optional = [&](size_t i) {
      if (!p.has_input(i)) return -1;
      tensors.push_back({p.input(i), i, false});
      return static_cast<int>(tensors.size()) - 1;
    };
    weight = optional(2), sum = optional(3);
    eps = static_cast<float>(p.attr_float("eps", 1e-5));
    weight_offset = static_cast<float>(p.attr_float("weight_offset", 0.0));
  }

  Problem problem(const Tensor* t) const {
    Problem p;
    p.kind = kRms ? cuda_ops::Norm::rms : cuda_ops::Norm::layer;
    p.dy = t[0], p.h = t[1], p.dx = t[2], p.dweight = &t[3];
    if (!kRms) p.dbias = &t[4];
    if (weight >= 0) p.weight = &t[weight];
    if (sum >= 0) p.dsum = &t[sum];
    p.eps = eps, p.weight_offset = weight_offset;
    return p;
  }
  static std::size_t workspace(const Problem& p) { return cuda_ops::norm_backward_workspace(p); }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace space,
                              cudaStream_t stream) {
    return cuda_ops::norm_backward(p, kernel, space, stream);
  }
};

struct SoftmaxOp {
  using Problem = cuda_ops::SoftmaxForward;
  static constexpr const char* kOp = "softmax";
  static auto rows() { return cuda_ops::softmax_forward_rows(); }

  std::vector<Placed> tensors;
  bool log;

  explicit SoftmaxOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {p.output(0), 0, true}};
    log = p.attr_int("log", 0) != 0;
  }
  Problem problem(const Tensor* t) const { return {t[0], t[1], log}; }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::softmax_forward(p, kernel, stream);
  }
};

}  // namespace

void add_norm_rows(std::vector<rm_kernel>& out) {
  Row<NormOp<false>>::add(out);
  Row<NormOp<true>>::add(out);
  Row<NormBackwardOp<false>>::add(out);
  Row<NormBackwardOp<true>>::add(out);
  Row<SoftmaxOp>::add(out);
}

}  // namespace rm::cuda
