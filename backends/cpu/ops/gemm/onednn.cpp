#include "ops/gemm/onednn.hpp"

#include <algorithm>

#include "isa.hpp"
#include "rm/plugin.hpp"

namespace rm::cpu::gemm {
namespace {

using namespace onednn;

constexpr Caller kCaller{"gemm"};

dnnl_data_type_t data_type(DType t) {
  return t == DType::f32 ? dnnl_f32 : t == DType::bf16 ? dnnl_bf16 : dnnl_f16;
}

dnnl_alg_kind_t algorithm(Activation a) {
  switch (a) {
    case kRelu:
      return dnnl_eltwise_relu;
    case kGelu:
      return dnnl_eltwise_gelu_erf;
    case kGeluTanh:
      return dnnl_eltwise_gelu_tanh;
    case kSilu:
      return dnnl_eltwise_swish;
    case kTanh:
      return dnnl_eltwise_tanh;
    default:
      return dnnl_eltwise_logistic;
  }
}

/// What the library has no words for: rows or columns that overlap or run with a stride.
bool plain_strides(const GemmProblem& g, Operand o, int64_t rows, int64_t cols) {
  if (!g.has(o)) return true;
  return (cols == 1 || g.col[o] == 1) && (rows == 1 || g.row[o] >= cols);
}

}  // namespace

const char* OneDnnGemm::reject(const GemmProblem& g) {
  const DType t = g.dtype[kA];
  if (t != DType::f32 && t != DType::bf16) return "onednn: f32 and bf16 only";
  if (t == DType::bf16 && !supported(Isa::avx512)) return "onednn: bf16 needs AVX-512";
  for (Operand o : {kB, kBias, kResidual, kC}) {
    if (g.has(o) && g.dtype[o] != t) return "onednn: all operands must have one element type";
  }
  if (g.activation == kRelu || g.activation == kSigmoid) {
    return "onednn: its relu and sigmoid turn NaN into a number";
  }
  if (g.empty() || g.k == 0) return "onednn: not for empty operands";
  if (g.outer.size() > 1) return "onednn: more than one leading axis that does not fold";
  if (g.alpha != 1.0 && g.has(kBias)) return "onednn: alpha together with a bias";
  for (Operand o : {kA, kResidual, kC}) {
    if (!plain_strides(g, o, g.m, o == kA ? g.k : g.n))
      return "onednn: strides of a, residual or c";
  }
  if (g.has(kBias) && g.n > 1 && g.col[kBias] != 1) return "onednn: strides of the bias";
  const bool plain_b = (g.n == 1 || g.col[kB] == 1) && (g.k == 1 || g.row[kB] >= g.n);
  const bool transposed_b = (g.k == 1 || g.row[kB] == 1) && (g.n == 1 || g.col[kB] >= g.k);
  if (!plain_b && !transposed_b) return "onednn: strides of b";
  if (!g.outer.empty()) {
    for (Operand o : {kA, kB, kResidual, kC}) {
      if (g.has(o) && g.outer_stride[o][0] <= 0 && !(o == kB && g.shared_b)) {
        return "onednn: a broadcast leading axis";
      }
    }
  }
  // Static storage: api() lives as long as the process.
  return api().why_not.empty() ? nullptr : api().why_not.c_str();
}

std::vector<int64_t> OneDnnGemm::dims(int64_t rows, int64_t cols, bool shared) const {
  if (g_.outer.empty()) return {rows, cols};
  return {shared ? 1 : g_.outer[0], rows, cols};
}

Description OneDnnGemm::describe(Operand o, int64_t rows, int64_t cols) const {
  const bool shared = o == kBias || (o == kB && g_.shared_b);
  const std::vector<int64_t> shape = dims(rows, cols, shared);
  // The stride of an axis of size 1 is free: give the library the one it expects.
  const bool column_major = cols > 1 && g_.col[o] != 1;
  const int64_t row = rows == 1 ? (column_major ? 1 : cols) : g_.row[o];
  const int64_t col = cols == 1 ? (rows > 1 && g_.row[o] == 1 ? rows : 1) : g_.col[o];
  std::vector<int64_t> steps = {row, col};
  if (!g_.outer.empty()) steps.insert(steps.begin(), shared ? rows * cols : g_.outer_stride[o][0]);
  return onednn::describe(kCaller, shape, data_type(g_.dtype[o]), steps, "an operand's strides");
}

Attributes OneDnnGemm::attributes(int* residual_argument) const {
  const PostOps ops = no_post_ops(kCaller);
  int position = 0;
  const auto append = [&](dnnl_alg_kind_t kind, double alpha, const char* what) {
    kCaller.require(
        api().post_ops_append_eltwise(ops.get(), kind, static_cast<float>(alpha), 0), what);
    ++position;
  };
  if (g_.alpha != 1.0) append(dnnl_eltwise_linear, g_.alpha, "alpha");
  if (g_.activation != kNone) {
    // swish: x * sigmoid(alpha * x)
    append(algorithm(g_.activation), g_.activation == kSilu ? 1 : 0, "the activation");
  }
  if (g_.has(kResidual)) {
    kCaller.require(
        api().post_ops_append_binary(ops.get(), dnnl_binary_add, md_[kResidual].get()),
        "the residual");
    *residual_argument = DNNL_ARG_ATTR_MULTIPLE_POST_OP(position) | DNNL_ARG_SRC_1;
  }
  return attributes_with(kCaller, ops);
}

OneDnnGemm::OneDnnGemm(GemmProblem problem) : g_(std::move(problem)) {
  md_[kA] = describe(kA, g_.m, g_.k);
  md_[kB] = describe(kB, g_.k, g_.n);
  if (g_.has(kBias)) md_[kBias] = describe(kBias, 1, g_.n);
  if (g_.has(kResidual)) md_[kResidual] = describe(kResidual, g_.m, g_.n);
  md_[kC] = describe(kC, g_.m, g_.n);
  int residual_argument = 0;
  const Attributes attributes = this->attributes(&residual_argument);
  Description any;
  if (g_.constant_b) {
    const auto shape = dims(g_.k, g_.n, g_.shared_b);
    any = describe_any_layout(kCaller, shape, data_type(g_.dtype[kB]), "a weight");
  }
  dnnl_primitive_desc_t made = nullptr;
  kCaller.require(api().matmul_primitive_desc_create(
                      &made, api().engine, md_[kA].get(), any ? any.get() : md_[kB].get(),
                      md_[kBias].get(), md_[kC].get(), attributes.get()),
                  "this matmul");
  primitive_.emplace(kCaller, PrimitiveDescription(made));
  workspace_bytes_ = api().memory_desc_get_size(primitive_->scratchpad());
  packed_bytes_ = api().memory_desc_get_size(primitive_->weights());
  layout_ = "onednn-" + api().version_text + "-" + dtype_name(g_.dtype[kB]) +
            layout_text(primitive_->weights(), g_.outer.empty() ? 2 : 3);
  std::vector<Primitive::Operand> operands = {{DNNL_ARG_SRC, md_[kA].get()},
                                              {DNNL_ARG_WEIGHTS, primitive_->weights()},
                                              {DNNL_ARG_DST, md_[kC].get()},
                                              {DNNL_ARG_SCRATCHPAD, primitive_->scratchpad()}};
  if (g_.has(kBias)) operands.push_back({DNNL_ARG_BIAS, md_[kBias].get()});
  if (g_.has(kResidual)) operands.push_back({residual_argument, md_[kResidual].get()});
  primitive_->set_operands(std::move(operands));
}

void OneDnnGemm::prepack(size_t, const rm_tensor& source, void* packed) const {
  reorder(kCaller, md_[kB].get(), plugin::address(source), primitive_->weights(), packed);
}

void OneDnnGemm::launch(const rm_launch& l) const {
  const void* data[6] = {l.inputs[kA], l.inputs[kB], l.outputs[0], l.workspace};
  size_t count = 4;
  for (Operand o : {kBias, kResidual}) {
    if (g_.has(o)) data[count++] = l.inputs[o];
  }
  primitive_->launch(std::span(data, count));
}

}  // namespace rm::cpu::gemm
