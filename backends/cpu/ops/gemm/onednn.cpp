// One matmul primitive a problem; memory objects are pooled, so a launch in steady state creates
// none.
#include "ops/gemm/onednn.hpp"

#include <algorithm>
#include <stdexcept>

#include "isa.hpp"

namespace rm::cpu::gemm {
namespace {

using namespace onednn;

void require(int status, const char* what) {
  if (status != 0) {
    throw std::runtime_error(std::string("[gemm] expected oneDNN to accept ") + what +
                             ", got status " + std::to_string(status) + "; try another gemm row");
  }
}

int data_type(DType t) { return t == DType::f32 ? kFloat : t == DType::bf16 ? kBfloat : kHalf; }

int algorithm(Activation a) {
  switch (a) {
    case kRelu:
      return kEltRelu;
    case kGelu:
      return kEltGeluErf;
    case kGeluTanh:
      return kEltGeluTanh;
    case kSilu:
      return kEltSwish;
    case kTanh:
      return kEltTanh;
    default:
      return kEltLogistic;
  }
}

/// A handle of the library's that is destroyed at the end of its scope.
using Destroy = int (*)(Handle);
struct Destroyer {
  Destroy destroy;
  void operator()(void* handle) const { destroy(handle); }
};
class Owned : public std::unique_ptr<void, Destroyer> {
 public:
  Owned(Handle handle, Destroy destroy) : unique_ptr(handle, Destroyer{destroy}) {}
};

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

Handle OneDnnGemm::describe(Operand o, int64_t rows, int64_t cols) const {
  const bool shared = o == kBias || (o == kB && g_.shared_b);
  const std::vector<int64_t> shape = dims(rows, cols, shared);
  // The stride of an axis of size 1 is free: give the library the one it expects.
  const bool column_major = cols > 1 && g_.col[o] != 1;
  const int64_t row = rows == 1 ? (column_major ? 1 : cols) : g_.row[o];
  const int64_t col = cols == 1 ? (rows > 1 && g_.row[o] == 1 ? rows : 1) : g_.col[o];
  std::vector<int64_t> steps = {row, col};
  if (!g_.outer.empty()) steps.insert(steps.begin(), shared ? rows * cols : g_.outer_stride[o][0]);
  Handle md = nullptr;
  require(api().memory_desc_create_with_strides(&md, static_cast<int>(shape.size()), shape.data(),
                                                data_type(g_.dtype[o]), steps.data()),
          "an operand's strides");
  return md;
}

OneDnnGemm::Slot::~Slot() {
  for (const Argument& a : arguments) api().memory_destroy(a.memory);
  if (stream != nullptr) api().stream_destroy(stream);
}

Handle OneDnnGemm::attributes() {
  Handle ops = nullptr, attr = nullptr;
  require(api().post_ops_create(&ops), "post-operations");
  const Owned owned_ops(ops, api().post_ops_destroy);
  require(api().primitive_attr_create(&attr), "attributes");
  Owned owned_attr(attr, api().primitive_attr_destroy);
  int position = 0;
  if (g_.alpha != 1.0) {
    require(api().post_ops_append_eltwise(ops, kEltLinear, static_cast<float>(g_.alpha), 0),
            "alpha");
    ++position;
  }
  if (g_.activation != kNone) {
    const float one = g_.activation == kSilu ? 1.f : 0.f;  // swish: x * sigmoid(one * x)
    require(api().post_ops_append_eltwise(ops, algorithm(g_.activation), one, 0), "the activation");
    ++position;
  }
  if (g_.has(kResidual)) {
    require(api().post_ops_append_binary(ops, kBinaryAdd, md_[kResidual]), "the residual");
    residual_argument_ = kArgPostOp * (position + 1) | kArgSource1;
  }
  require(api().primitive_attr_set_post_ops(attr, ops), "post-operations");
  require(api().primitive_attr_set_scratchpad_mode(attr, kScratchpadUser), "a scratchpad");
  return owned_attr.release();
}

OneDnnGemm::OneDnnGemm(GemmProblem problem) : OneDnnGemm(std::move(problem), Unprepared()) {
  md_[kA] = describe(kA, g_.m, g_.k);
  md_[kB] = describe(kB, g_.k, g_.n);
  if (g_.has(kBias)) md_[kBias] = describe(kBias, 1, g_.n);
  if (g_.has(kResidual)) md_[kResidual] = describe(kResidual, g_.m, g_.n);
  md_[kC] = describe(kC, g_.m, g_.n);
  const Owned attr(attributes(), api().primitive_attr_destroy);
  Handle any = nullptr;
  if (g_.constant_b) {
    const std::vector<int64_t> shape = dims(g_.k, g_.n, g_.shared_b);
    require(api().memory_desc_create_with_tag(&any, static_cast<int>(shape.size()), shape.data(),
                                              data_type(g_.dtype[kB]), kFormatAny),
            "a weight");
  }
  const int status = api().matmul_primitive_desc_create(
      &description_, api().engine, md_[kA], any ? any : md_[kB], md_[kBias], md_[kC], attr.get());
  if (any) api().memory_desc_destroy(any);
  require(status, "this matmul");
  weights_ = api().primitive_desc_query_md(description_, kQueryWeights, 0);
  scratchpad_ = api().primitive_desc_query_md(description_, kQueryScratchpad, 0);
  require(api().primitive_create(&primitive_, description_), "this matmul");
  workspace_bytes_ = api().memory_desc_get_size(scratchpad_);
  packed_bytes_ = api().memory_desc_get_size(weights_);
  name_layout(weights_);
  free_slots_.push_back(make_slot());
}

OneDnnGemm::~OneDnnGemm() {
  free_slots_.clear();
  if (primitive_) api().primitive_destroy(primitive_);
  if (description_) api().primitive_desc_destroy(description_);
  for (Handle md : md_) {
    if (md) api().memory_desc_destroy(md);
  }
}

void OneDnnGemm::name_layout(Handle weights) {
  layout_ = "onednn-" + api().version_text + "-" + dtype_name(g_.dtype[kB]) +
            layout_text(weights, g_.outer.empty() ? 2 : 3);
}

void OneDnnGemm::prepack(const void* src, void* dst) const {
  Handle description = nullptr, primitive = nullptr, from = nullptr, to = nullptr, stream = nullptr;
  const Api& a = api();
  require(
      a.reorder_primitive_desc_create(&description, md_[kB], a.engine, weights_, a.engine, nullptr),
      "a reorder of the weight");
  int status = a.primitive_create(&primitive, description);
  status |= a.memory_create(&from, md_[kB], a.engine, const_cast<void*>(src));
  status |= a.memory_create(&to, weights_, a.engine, dst);
  status |= a.stream_create(&stream, a.engine, kStreamInOrder);
  if (status == 0) {
    const Argument arguments[] = {{kArgSource, from}, {kArgResult, to}};
    status = a.primitive_execute(primitive, stream, 2, arguments);
  }
  a.stream_destroy(stream), a.memory_destroy(from), a.memory_destroy(to);
  a.primitive_destroy(primitive), a.primitive_desc_destroy(description);
  require(status, "a reorder of the weight");
}

std::unique_ptr<OneDnnGemm::Slot> OneDnnGemm::make_slot() const {
  auto slot = std::make_unique<Slot>();
  const auto add = [&](int id, Handle md) {
    Handle memory = nullptr;
    // No data yet: launch() sets it.
    require(api().memory_create(&memory, md, api().engine, nullptr), "an operand");
    slot->arguments.push_back({id, memory});
  };
  add(kArgSource, md_[kA]);
  add(kArgWeights, weights_);
  add(kArgResult, md_[kC]);
  add(kArgScratchpad, scratchpad_);
  if (g_.has(kBias)) add(kArgBias, md_[kBias]);
  if (g_.has(kResidual)) add(residual_argument_, md_[kResidual]);
  require(api().stream_create(&slot->stream, api().engine, kStreamInOrder), "a stream");
  return slot;
}

std::unique_ptr<OneDnnGemm::Slot> OneDnnGemm::take_slot() const {
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

void OneDnnGemm::launch(const rm_launch& l) const {
  auto slot = take_slot();
  std::vector<Argument>& arguments = slot->arguments;
  const void* data[] = {l.inputs[kA], l.inputs[kB], l.outputs[0], l.workspace};
  int status = 0;
  for (int i = 0; i < 4; ++i) {
    status |= api().memory_set_data_handle(arguments[static_cast<size_t>(i)].memory,
                                           const_cast<void*>(data[i]));
  }
  size_t next = 4;
  for (Operand o : {kBias, kResidual}) {
    if (!g_.has(o)) continue;
    status |=
        api().memory_set_data_handle(arguments[next++].memory, const_cast<void*>(l.inputs[o]));
  }
  if (status == 0) {
    status = api().primitive_execute(primitive_, slot->stream, static_cast<int>(arguments.size()),
                                     arguments.data());
  }
  {
    const std::lock_guard lock(mutex_);
    free_slots_.push_back(std::move(slot));
  }
  require(status, "a launch");
}

}  // namespace rm::cpu::gemm
