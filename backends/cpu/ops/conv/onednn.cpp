// One primitive a problem; memory objects are pooled, so a launch in steady state creates none.
#include "ops/conv/onednn.hpp"

#include <algorithm>
#include <stdexcept>

#include "isa.hpp"

namespace rm::cpu::conv {
namespace {

using namespace gemm::onednn;

void require(int status, const char* what) {
  if (status != 0) {
    throw std::runtime_error(std::string("[conv] expected oneDNN to accept ") + what +
                             ", got status " + std::to_string(status) + "; try another conv row");
  }
}

int data_type(DType t) { return t == DType::f32 ? kFloat : kBfloat; }

struct Eltwise {
  int algorithm;
  float alpha, beta;
};

// The library's relu and clips turn NaN into a number. x * clamp(1e30 x, 0, 1) does not, and is
// relu(x) for every x but -Inf (NaN) and those below 1e-30 (0).
Eltwise eltwise(Activation a) {
  switch (a) {
    case kRelu:
      return {kEltHardSwish, 1e30f, 0};
    case kGelu:
      return {kEltGeluErf, 0, 0};
    case kGeluTanh:
      return {kEltGeluTanh, 0, 0};
    case kSilu:
      return {kEltSwish, 1, 0};
    case kTanh:
      return {kEltTanh, 0, 0};
    default:
      return {kEltHardSwish, 1.f / 6, 0.5f};
  }
}

using Destroy = int (*)(Handle);
struct Destroyer {
  Destroy destroy;
  void operator()(void* handle) const {
    if (handle != nullptr) destroy(handle);
  }
};
class Owned : public std::unique_ptr<void, Destroyer> {
 public:
  Owned(Handle handle, Destroy destroy) : unique_ptr(handle, Destroyer{destroy}) {}
};

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

Handle OneDnnConv::describe_image(int64_t channels, const Triple& sizes) const {
  std::vector<int64_t> dims{c_.batch, channels}, strides(2, 1);
  for (int a = 3 - c_.axes; a < 3; ++a) dims.push_back(sizes[static_cast<size_t>(a)]);
  strides.resize(dims.size());
  int64_t step = channels;
  for (size_t i = dims.size(); i-- > 2; step *= dims[i]) strides[i] = step;
  strides[0] = step;
  strides[1] = 1;
  Handle md = nullptr;
  require(api().memory_desc_create_with_strides(&md, static_cast<int>(dims.size()), dims.data(),
                                                data_type(c_.dtype), strides.data()),
          "an image");
  return md;
}

Handle OneDnnConv::describe_weight(bool any) const {
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
  Handle md = nullptr;
  const int rank = static_cast<int>(dims.size()), type = data_type(c_.dtype);
  require(any ? api().memory_desc_create_with_tag(&md, rank, dims.data(), type, kFormatAny)
              : api().memory_desc_create_with_strides(&md, rank, dims.data(), type, strides.data()),
          "a weight");
  return md;
}

Handle OneDnnConv::describe_bias() const {
  const int64_t dims[] = {c_.to}, strides[] = {1};
  Handle md = nullptr;
  require(api().memory_desc_create_with_strides(&md, 1, dims, data_type(c_.dtype), strides),
          "a bias");
  return md;
}

OneDnnConv::Slot::~Slot() {
  for (const Argument& a : arguments) api().memory_destroy(a.memory);
  if (stream != nullptr) api().stream_destroy(stream);
}

Handle OneDnnConv::attributes() {
  Handle ops = nullptr, attr = nullptr;
  require(api().post_ops_create(&ops), "post-operations");
  const Owned owned_ops(ops, api().post_ops_destroy);
  require(api().primitive_attr_create(&attr), "attributes");
  Owned owned_attr(attr, api().primitive_attr_destroy);
  if (c_.given[kResidual]) {
    require(api().post_ops_append_binary(ops, kBinaryAdd, md_[kResidual]), "the residual");
    residual_argument_ = kArgPostOp | kArgSource1;
  }
  if (c_.activation != kNone) {
    const Eltwise e = eltwise(c_.activation);
    require(api().post_ops_append_eltwise(ops, e.algorithm, e.alpha, e.beta), "the activation");
  }
  require(api().primitive_attr_set_post_ops(attr, ops), "post-operations");
  require(api().primitive_attr_set_scratchpad_mode(attr, kScratchpadUser), "a scratchpad");
  return owned_attr.release();
}

void OneDnnConv::create_primitive(Handle any_weight, Handle attributes) {
  const auto front = static_cast<size_t>(3 - c_.axes);
  Triple dilation = c_.dilation, end = c_.end;
  for (size_t a = 0; a < 3; ++a) {
    dilation[a] -= 1;
    // The library works the padding at the ends out again and wants to see the same.
    const int64_t reach = (c_.dilation[a] * (c_.k[a] - 1) + 1);
    const int64_t windows = c_.transposed ? c_.x[a] : c_.y[a], size = c_.transposed ? c_.y[a] : c_.x[a];
    end[a] = (windows - 1) * c_.stride[a] + reach - size - c_.begin[a];
  }
  const auto create = c_.transposed ? api().deconvolution_forward_primitive_desc_create
                                    : api().convolution_forward_primitive_desc_create;
  require(create(&description_, api().engine, kForwardInference,
                 c_.transposed ? kDeconvolutionDirect : kConvolutionDirect, md_[kX], any_weight,
                 md_[kBias], md_[kY], c_.stride.data() + front, dilation.data() + front,
                 c_.begin.data() + front, end.data() + front, attributes),
          "this convolution");
  require(api().primitive_create(&primitive_, description_), "this convolution");
}

OneDnnConv::OneDnnConv(ConvProblem problem) : OneDnnConv(std::move(problem), Unprepared()) {
  md_[kX] = describe_image(c_.from, c_.x);
  md_[kW] = describe_weight(false);
  if (c_.given[kBias]) md_[kBias] = describe_bias();
  if (c_.given[kResidual]) md_[kResidual] = describe_image(c_.to, c_.y);
  md_[kY] = describe_image(c_.to, c_.y);
  const Owned attr(attributes(), api().primitive_attr_destroy);
  const Owned any(describe_weight(true), api().memory_desc_destroy);
  create_primitive(any.get(), attr.get());
  weights_ = api().primitive_desc_query_md(description_, kQueryWeights, 0);
  scratchpad_ = api().primitive_desc_query_md(description_, kQueryScratchpad, 0);
  scratchpad_bytes_ = api().memory_desc_get_size(scratchpad_);
  packed_bytes_ = api().memory_desc_get_size(weights_);
  layout_ = "onednn-" + api().version_text + (c_.transposed ? "-deconv" : "-conv") +
            std::to_string(c_.groups) + '-' + dtype_name(c_.dtype) +
            layout_text(weights_, c_.axes + (c_.groups > 1 ? 3 : 2));
  free_slots_.push_back(make_slot());
}

OneDnnConv::~OneDnnConv() {
  free_slots_.clear();
  if (primitive_) api().primitive_destroy(primitive_);
  if (description_) api().primitive_desc_destroy(description_);
  for (Handle md : md_) {
    if (md) api().memory_desc_destroy(md);
  }
}

uint64_t OneDnnConv::workspace_bytes() const {
  return aligned(scratchpad_bytes_) + (prepacked() ? 0 : aligned(packed_bytes_));
}

void OneDnnConv::prepack(const void* src, void* dst) const {
  const Api& a = api();
  Handle description = nullptr, primitive = nullptr, from = nullptr, to = nullptr, stream = nullptr;
  int status = a.reorder_primitive_desc_create(&description, md_[kW], a.engine, weights_, a.engine,
                                               nullptr);
  require(status, "a reorder of the weight");
  const Owned owned_description(description, a.primitive_desc_destroy);
  status = a.primitive_create(&primitive, description);
  const Owned owned_primitive(primitive, a.primitive_destroy);
  status |= a.memory_create(&from, md_[kW], a.engine, const_cast<void*>(src));
  const Owned owned_from(from, a.memory_destroy);
  status |= a.memory_create(&to, weights_, a.engine, dst);
  const Owned owned_to(to, a.memory_destroy);
  status |= a.stream_create(&stream, a.engine, kStreamInOrder);
  const Owned owned_stream(stream, a.stream_destroy);
  require(status, "a reorder of the weight");
  const Argument arguments[] = {{kArgSource, from}, {kArgResult, to}};
  require(a.primitive_execute(primitive, stream, 2, arguments), "a reorder of the weight");
}

std::unique_ptr<OneDnnConv::Slot> OneDnnConv::make_slot() const {
  auto slot = std::make_unique<Slot>();
  const auto add = [&](int id, Handle md) {
    Handle memory = nullptr;
    // No data yet: launch() sets it.
    require(api().memory_create(&memory, md, api().engine, nullptr), "an operand");
    slot->arguments.push_back({id, memory});
  };
  add(kArgSource, md_[kX]);
  add(kArgWeights, weights_);
  add(kArgResult, md_[kY]);
  add(kArgScratchpad, scratchpad_);
  if (c_.given[kBias]) add(kArgBias, md_[kBias]);
  if (c_.given[kResidual]) add(residual_argument_, md_[kResidual]);
  require(api().stream_create(&slot->stream, api().engine, kStreamInOrder), "a stream");
  return slot;
}

std::unique_ptr<OneDnnConv::Slot> OneDnnConv::take_slot() const {
  {
    const std::lock_guard lock(mutex_);
    if (!free_slots_.empty()) {
      auto slot = std::move(free_slots_.back());
      free_slots_.pop_back();
      return slot;
    }
  }
  return make_slot();
}

void OneDnnConv::launch(const rm_launch& l) const {
  const void* weights = l.inputs[kW];
  if (!prepacked()) {
    char* packed = static_cast<char*>(l.workspace) + aligned(scratchpad_bytes_);
    prepack(weights, packed);
    weights = packed;
  }
  auto slot = take_slot();
  const void* data[] = {l.inputs[kX],
                        weights,
                        l.outputs[0],
                        l.workspace,
                        c_.given[kBias] ? l.inputs[kBias] : nullptr,
                        c_.given[kResidual] ? l.inputs[kResidual] : nullptr};
  int status = 0;
  size_t next = 0;
  for (size_t i = 0; i < std::size(data); ++i) {
    if (i >= 4 && data[i] == nullptr) continue;
    status |= api().memory_set_data_handle(slot->arguments[next++].memory,
                                           const_cast<void*>(data[i]));
  }
  if (status == 0) {
    status = api().primitive_execute(primitive_, slot->stream,
                                     static_cast<int>(slot->arguments.size()),
                                     slot->arguments.data());
  }
  {
    const std::lock_guard lock(mutex_);
    free_slots_.push_back(std::move(slot));
  }
  require(status, "a launch");
}

}  // namespace rm::cpu::conv
