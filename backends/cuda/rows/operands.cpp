#include "rows/operands.hpp"

namespace rm::cuda {
namespace {

using cuda_ops::DType;

DType dtype_of(DLDataType t) {
  if (t.lanes == 1) {
    switch (t.code) {
      case kDLFloat:
        if (t.bits == 32) return DType::f32;
        if (t.bits == 64) return DType::f64;
        if (t.bits == 16) return DType::f16;
        break;
      case kDLBfloat:
        if (t.bits == 16) return DType::bf16;
        break;
      case kDLInt:
        if (t.bits == 64) return DType::i64;
        if (t.bits == 32) return DType::i32;
        if (t.bits == 16) return DType::i16;
        if (t.bits == 8) return DType::i8;
        break;
      case kDLUInt:
        if (t.bits == 8) return DType::u8;
        break;
      case kDLBool:
        if (t.bits == 8) return DType::boolean;
        break;
      default:
        break;
    }
  }
  throw NotForModule("an operand has a type that the CUDA modules do not have");
}

}  // namespace

cuda_ops::Tensor tensor_of(const rm_tensor& t) {
  if (t.ndim > cuda_ops::kMaxRank) throw NotForModule("an operand has more than 8 axes");
  cuda_ops::Tensor out;
  out.dtype = dtype_of(t.dtype);
  out.rank = t.ndim;
  for (int32_t i = 0; i < t.ndim; ++i) out.shape[i] = t.shape[i], out.stride[i] = t.strides[i];
  return out;
}

cuda_ops::Activation activation_of(std::string_view name) {
  for (int i = 0; i <= static_cast<int>(cuda_ops::Activation::sigmoid); ++i) {
    if (name == cuda_ops::kActivationNames[i]) return static_cast<cuda_ops::Activation>(i);
  }
  throw NotForModule("the module has no such activation");
}

bool same_strides(const cuda_ops::Tensor& a, const cuda_ops::Tensor& b) {
  for (int i = 0; i < a.rank; ++i) {
    if (a.shape[i] > 1 && a.stride[i] != b.stride[i]) return false;
  }
  return true;
}

cuda_ops::Tensor Operands::input(size_t i) const {
  if (!has_input(i)) throw NotForModule("an operand is missing");
  return tensor_of(*p_.inputs[i]);
}

cuda_ops::Tensor Operands::output(size_t i) const {
  if (!has_output(i)) throw NotForModule("a result is missing");
  return tensor_of(*p_.outputs[i]);
}

const rm_attr* Operands::find(std::string_view name) const {
  const auto* at = reinterpret_cast<const char*>(p_.attrs);
  for (size_t i = 0; i < p_.num_attrs; ++i, at += p_.attr_stride) {
    const auto* attr = reinterpret_cast<const rm_attr*>(at);
    if (std::string_view(attr->name.data, attr->name.size) == name) return attr;
  }
  return nullptr;
}

int64_t Operands::attr_int(std::string_view name, int64_t otherwise) const {
  const rm_attr* a = find(name);
  return a != nullptr && a->kind == RM_ATTR_INT ? a->i : otherwise;
}
double Operands::attr_float(std::string_view name, double otherwise) const {
  const rm_attr* a = find(name);
  if (a == nullptr) return otherwise;
  return a->kind == RM_ATTR_INT ? static_cast<double>(a->i) : a->f;
}
std::string_view Operands::attr_string(std::string_view name, std::string_view otherwise) const {
  const rm_attr* a = find(name);
  return a != nullptr && a->kind == RM_ATTR_STRING ? std::string_view(a->s.data, a->s.size)
                                                   : otherwise;
}
std::vector<int64_t> Operands::attr_ints(std::string_view name) const {
  const rm_attr* a = find(name);
  if (a == nullptr || a->kind != RM_ATTR_INTS) return {};
  return {a->ints, a->ints + a->count};
}
std::vector<double> Operands::attr_floats(std::string_view name) const {
  const rm_attr* a = find(name);
  if (a == nullptr || a->kind != RM_ATTR_FLOATS) return {};
  return {a->floats, a->floats + a->count};
}

}  // namespace rm::cuda
