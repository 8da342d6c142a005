#include "ops/conv/onednn.hpp"

#include <algorithm>

#include "isa.hpp"

namespace rm::cpu::conv {
namespace {

using namespace onednn;

constexpr Caller kCaller{"conv"};

dnnl_data_type_t data_type(DType t) { return t == DType::f32 ? dnnl_f32 : dnnl_bf16; }

struct Eltwise {
  dnnl_alg_kind_t algorithm;
  float alpha, beta;
};

// The library's relu and clips turn NaN into a number. x * clamp(1e30 x, 0, 1) does not, and is
// relu(x) for every x but -Inf (NaN) and those below 1e-30 (0).
Eltwise eltwise(Activation a) {
  switch (a) {
    case kRelu:
      return {dnnl_eltwise_hardswish, 1e30f, 0};
    case kGelu:
      return {dnnl_eltwise_gelu_erf, 0, 0};
    case kGeluTanh:
      return {dnnl_eltwise_gelu_tanh, 0, 0};
    case kSilu:
      return {dnnl_eltwise_swish, 1, 0};
    case kTanh:
      return {dnnl_eltwise_tanh, 0, 0};
    default:
      return {dnnl_eltwise_hardswish, 1.f / 6, 0.5f};
  }
}

uint64_t aligned(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

const char* OneDnnConv::reject(const ConvProblem& c) {
  if (c.dtype != DType::f32 && c.dtype != DType::bf16) return "onednn: f32 and bf16 only";
  if (c.dtype == DType::bf16 && !supported(Isa::avx512)) return "onednn: bf16 needs AVX-512";
  if (c.activation == kSigmoid) return "onednn: its sigmoid turns NaN into a number";
  if (c.empty()) return "onednn: not for empty operands";
  for (Operand o : {kX, kResidual, kY}) {
    if (c.given[o] && !c.channels_last[o]) return "onednn: channels do not lie last";
  }
  if (c.given[kBias] && c.to > 1 && c.step[kBias][0] != 1) return "onednn: strides of the bias";
  for (int a = 0; a < 3; ++a) {
    if (c.begin[a] < 0 || c.end[a] < 0) return "onednn: negative padding";
  }
  return api().why_not.empty() ? nullptr : api().why_not.c_str();
}

Description OneDnnConv::describe_image(int64_t channels, const Triple& sizes) const {
  std::vector<int64_t> dims{c_.batch, channels}, strides(2, 1);
  for (int a = 3 - c_.axes; a < 3; ++a) dims.push_back(sizes[static_cast<size_t>(a)]);
  strides.resize(dims.size());
  int64_t step = channels;
  for (size_t i = dims.size(); i-- > 2; step *= dims[i]) strides[i] = step;
  strides[0] = step;
  strides[1] = 1;
  return describe(kCaller, dims, data_type(c_.dtype), strides, "an image");
}

Description OneDnnConv::describe_weight(bool any) const {
  const auto& s = c_.step[kW];
  std::vector<int64_t> dims{c_.to_each(), c_.from_each()};
  std::vector<int64_t> strides = c_.transposed ? std::vector<int64_t>{s[1], s[0]}
                                               : std::vector<int64_t>{s[0], s[1]};
  if (c_.groups > 1) {
    dims.insert(dims.begin(), c_.groups);
    strides.insert(strides.begin(), s[0] * (c_.transposed ? c_.from_each() : c_.to_each()));
  }
  for (size_t a = static_cast<size_t>(3 - c_.axes); a < 3; ++a) {
    dims.push_back(c_.k[a]);
    strides.push_back(s[2 + a]);
  }
  const dnnl_data_type_t type = data_type(c_.dtype);
  return any ? describe_any_layout(kCaller, dims, type, "a weight")
             : describe(kCaller, dims, type, strides, "a weight");
}

Description OneDnnConv::describe_bias() const {
  const int64_t dims[] = {c_.to}, strides[] = {1};
  return describe(kCaller, dims, data_type(c_.dtype), strides, "a bias");
}

Attributes OneDnnConv::attributes() const {
  const PostOps ops = no_post_ops(kCaller);
  if (c_.given[kResidual]) {
    kCaller.require(
        api().post_ops_append_binary(ops.get(), dnnl_binary_add, md_[kResidual].get()),
        "the residual");
  }
  if (c_.activation != kNone) {
    const Eltwise e = eltwise(c_.activation);
    kCaller.require(api().post_ops_append_eltwise(ops.get(), e.algorithm, e.alpha, e.beta),
                    "the activation");
  }
  return attributes_with(kCaller, ops);
}

PrimitiveDescription OneDnnConv::describe_primitive(const_dnnl_memory_desc_t any_weight) const {
  const auto front = static_cast<size_t>(3 - c_.axes);
  Triple dilation = c_.dilation, end = c_.end;
  for (size_t a = 0; a < 3; ++a) {
    dilation[a] -= 1;
    // The library works the padding at the ends out again and wants to see the same.
    const int64_t reach = (c_.dilation[a] * (c_.k[a] - 1) + 1);
    const int64_t windows = c_.transposed ? c_.x[a] : c_.y[a], size = c_.transposed ? c_.y[a] : c_.x[a];
    end[a] = (windows - 1) * c_.stride[a] + reach - size - c_.begin[a];
  }
  const Attributes attributes = this->attributes();
  const auto create = c_.transposed ? api().deconvolution_forward_primitive_desc_create
                                    : api().convolution_forward_primitive_desc_create;
  dnnl_primitive_desc_t made = nullptr;
  kCaller.require(create(&made, api().engine, dnnl_forward_inference,
                         c_.transposed ? dnnl_deconvolution_direct : dnnl_convolution_direct,
                         md_[kX].get(), any_weight, md_[kBias].get(), md_[kY].get(),
                         c_.stride.data() + front, dilation.data() + front, c_.begin.data() + front,
                         end.data() + front, attributes.get()),
                  "this convolution");
  return PrimitiveDescription(made);
}

OneDnnConv::OneDnnConv(ConvProblem problem) : c_(std::move(problem)) {
  md_[kX] = describe_image(c_.from, c_.x);
  md_[kW] = describe_weight(false);
  if (c_.given[kBias]) md_[kBias] = describe_bias();
  if (c_.given[kResidual]) md_[kResidual] = describe_image(c_.to, c_.y);
  md_[kY] = describe_image(c_.to, c_.y);
  const Description any = describe_weight(true);
  primitive_.emplace(kCaller, describe_primitive(any.get()));
  scratchpad_bytes_ = api().memory_desc_get_size(primitive_->scratchpad());
  packed_bytes_ = api().memory_desc_get_size(primitive_->weights());
  layout_ = "onednn-" + api().version_text + (c_.transposed ? "-deconv" : "-conv") +
            std::to_string(c_.groups) + '-' + dtype_name(c_.dtype) +
            layout_text(primitive_->weights(), c_.axes + (c_.groups > 1 ? 3 : 2));
  std::vector<Primitive::Operand> operands = {{DNNL_ARG_SRC, md_[kX].get()},
                                              {DNNL_ARG_WEIGHTS, primitive_->weights()},
                                              {DNNL_ARG_DST, md_[kY].get()},
                                              {DNNL_ARG_SCRATCHPAD, primitive_->scratchpad()}};
  if (c_.given[kBias]) operands.push_back({DNNL_ARG_BIAS, md_[kBias].get()});
  if (c_.given[kResidual]) {
    operands.push_back(
        {DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_SRC_1, md_[kResidual].get()});
  }
  primitive_->set_operands(std::move(operands));
}

uint64_t OneDnnConv::workspace_bytes() const {
  return aligned(scratchpad_bytes_) + (c_.constant_w ? 0 : aligned(packed_bytes_));
}

void OneDnnConv::pack(const void* src, void* dst) const {
  reorder(kCaller, md_[kW].get(), src, primitive_->weights(), dst);
}

void OneDnnConv::launch(const rm_launch& l) const {
  const void* weights = l.inputs[kW];
  if (!c_.constant_w) {
    char* packed = static_cast<char*>(l.workspace) + aligned(scratchpad_bytes_);
    pack(weights, packed);
    weights = packed;
  }
  const void* data[6] = {l.inputs[kX], weights, l.outputs[0], l.workspace};
  size_t count = 4;
  for (Operand o : {kBias, kResidual}) {
    if (c_.given[o]) data[count++] = l.inputs[o];
  }
  primitive_->launch(std::span(data, count));
}

}  // namespace rm::cpu::conv
