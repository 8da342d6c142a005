// Everything the C struct points at lives in the Problem, which therefore never moves.
#include "select/problem.hpp"

#include "base/error.hpp"

namespace rm::select {
namespace {

rm_str str_of(const std::string& s) { return {s.data(), s.size()}; }

void append_raw(std::string& key, const void* data, size_t bytes) {
  uint64_t n = bytes;
  key.append(reinterpret_cast<const char*>(&n), sizeof n);
  if (bytes != 0) key.append(static_cast<const char*>(data), bytes);
}

}  // namespace

Problem::Problem(std::string op, const std::vector<Operand>& inputs,
                 const std::vector<Operand>& outputs, const ir::Attrs& attrs, DLDevice device)
    : op_(std::move(op)), device_(device), attr_storage_(attrs) {
  for (auto& [name, attr] : attr_storage_) {  // kernels know integers only; throws when symbolic
    if (const auto* dims = std::get_if<ir::Dims>(&attr)) attr = ir::Attr(ir::static_dims(*dims));
  }
  append_raw(key_, op_.data(), op_.size());
  const uint64_t counts[] = {inputs.size(), outputs.size()};
  append_raw(key_, counts, sizeof counts);
  for (size_t i = 0; i < inputs.size(); ++i) {
    add_tensor(inputs[i], inputs_);
    if (inputs[i].constant && i < 64) problem_.constant_inputs |= uint64_t{1} << i;
  }
  for (const auto& operand : outputs) add_tensor(operand, outputs_);
  attrs_.reserve(attr_storage_.size());
  for (const auto& [name, attr] : attr_storage_) add_attr(name, attr);
  append_raw(key_, &problem_.constant_inputs, sizeof problem_.constant_inputs);

  problem_.struct_size = sizeof problem_;
  problem_.op = str_of(op_);
  problem_.inputs = inputs_.data();
  problem_.num_inputs = inputs_.size();
  problem_.outputs = outputs_.data();
  problem_.num_outputs = outputs_.size();
  problem_.attrs = attrs_.data();
  problem_.num_attrs = attrs_.size();
  problem_.attr_stride = sizeof(rm_attr);
}

void Problem::add_tensor(const Operand& operand, std::vector<const rm_tensor*>& list) {
  if (!operand.present) {
    list.push_back(nullptr);
    key_ += '_';
    return;
  }
  const ir::Layout& l = operand.layout;
  ints_.push_back(std::make_unique<ir::Ints>(l.dims));
  int64_t* shape = ints_.back()->data();
  ints_.push_back(std::make_unique<ir::Ints>(l.strides));
  int64_t* strides = ints_.back()->data();
  auto tensor = std::make_unique<rm_tensor>();
  tensor->device = device_;
  tensor->ndim = static_cast<int32_t>(l.dims.size());
  tensor->dtype = ir::to_dlpack(l.dtype);
  tensor->shape = shape;
  tensor->strides = strides;
  tensor->byte_offset = 0;
  list.push_back(tensor.get());
  tensors_.push_back(std::move(tensor));
  key_ += static_cast<char>('A' + static_cast<int>(l.dtype));
  append_raw(key_, l.dims.data(), l.dims.size() * sizeof(int64_t));
  append_raw(key_, l.strides.data(), l.strides.size() * sizeof(int64_t));
}

void Problem::add_attr(const std::string& name, const ir::Attr& attr) {
  rm_attr a{};
  a.struct_size = sizeof a;
  a.name = str_of(name);
  append_raw(key_, name.data(), name.size());
  key_ += static_cast<char>('0' + attr.index());
  if (const auto* i = std::get_if<int64_t>(&attr)) {
    a.kind = RM_ATTR_INT;
    a.i = *i;
    append_raw(key_, i, sizeof *i);
  } else if (const auto* f = std::get_if<double>(&attr)) {
    a.kind = RM_ATTR_FLOAT;
    a.f = *f;
    append_raw(key_, f, sizeof *f);
  } else if (const auto* s = std::get_if<std::string>(&attr)) {
    a.kind = RM_ATTR_STRING;
    a.s = str_of(*s);
    append_raw(key_, s->data(), s->size());
  } else if (const auto* v = std::get_if<std::vector<int64_t>>(&attr)) {
    a.kind = RM_ATTR_INTS;
    a.ints = v->data();
    a.count = v->size();
    append_raw(key_, v->data(), v->size() * sizeof(int64_t));
  } else if (const auto* d = std::get_if<std::vector<double>>(&attr)) {
    a.kind = RM_ATTR_FLOATS;
    a.floats = d->data();
    a.count = d->size();
    append_raw(key_, d->data(), d->size() * sizeof(double));
  }
  attrs_.push_back(a);
}

std::string Problem::str() const {
  auto text = [](const rm_tensor* t) {
    if (t == nullptr) return std::string("_");
    ir::DType dtype = ir::DType::kF32;
    ir::from_dlpack(t->dtype, &dtype);
    std::string out(ir::name(dtype));
    for (int32_t i = 0; i < t->ndim; ++i) {
      out += (i == 0 ? '[' : ',') + std::to_string(t->shape[i]);
    }
    return out + (t->ndim == 0 ? "[]" : "]");
  };
  std::string out = op_;
  for (const auto* t : inputs_) out += " " + text(t);
  out += " ->";
  for (const auto* t : outputs_) out += " " + text(t);
  return out;
}

}  // namespace rm::select
