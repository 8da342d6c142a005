// One encoder a schema type; wrappers (optional, list) recurse from the outside in.
#include "encode.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "rm/plugin.hpp"

namespace rm::torch_bridge {
namespace {

/// torch's names and DLPack's codes of the element types that cross.
int32_t torch_dtype(DLDataType type) {
  struct Row {
    uint8_t code, bits;
    const char* symbol;
  };
  constexpr Row kRows[] = {
      {kDLFloat, 32, "float32"},   {kDLFloat, 64, "float64"},     {kDLFloat, 16, "float16"},
      {kDLBfloat, 16, "bfloat16"}, {kDLInt, 64, "int64"},         {kDLInt, 32, "int32"},
      {kDLInt, 16, "int16"},       {kDLInt, 8, "int8"},           {kDLUInt, 8, "uint8"},
      {kDLBool, 8, "bool"},        {kDLUInt, 16, "uint16"},       {kDLUInt, 32, "uint32"},
      {kDLUInt, 64, "uint64"},     {kDLComplex, 64, "complex64"}, {kDLComplex, 128, "complex128"}};
  for (const Row& row : kRows) {
    if (row.code == type.code && row.bits == type.bits && type.lanes == 1) {
      return require_torch().constant(std::string("aoti_torch_dtype_") + row.symbol);
    }
  }
  throw plugin::Error(RM_UNIMPLEMENTED,
                      "[torch bridge] expected an element type torch has, got DLPack code " +
                          std::to_string(type.code) + " of " + std::to_string(type.bits) + " bits");
}

template <class T>
Stable bits_of(T value) {
  static_assert(sizeof(T) <= sizeof(Stable));
  Stable out = 0;
  std::memcpy(&out, &value, sizeof value);  // little-endian: the low bytes, as torch packs them
  return out;
}

[[noreturn]] void mismatch(const char* type) {
  throw plugin::Error(RM_INVALID_ARGUMENT, std::string("[torch bridge] expected a value of type ") +
                                               type + " in schema_args, got another kind");
}

/// "cpu", "cuda:1": index in the low half, device type in the high half.
Stable encode_device(const std::string& text) {
  const size_t colon = text.find(':');
  const int32_t type = require_torch().constant("aoti_torch_device_type_" + text.substr(0, colon));
  const int32_t index = colon == std::string::npos ? -1 : std::stoi(text.substr(colon + 1));
  return (static_cast<Stable>(static_cast<uint32_t>(type)) << 32) | static_cast<uint32_t>(index);
}

Stable encode_name(const char* prefix, const Value& value) {
  if (value.kind != Value::Kind::kStr) mismatch(prefix);
  return bits_of(require_torch().constant(prefix + value.s));
}

Stable encode_string(const Value& value) {
  if (value.kind != Value::Kind::kStr) mismatch("str");
  void* handle = nullptr;
  check(require_torch().new_string(value.s.data(), value.s.size(), &handle), "a string argument");
  return bits_of(handle);
}

Stable encode_base(Base base, const Value& value, std::span<const Operand> operands,
                   const void* const* data) {
  using Kind = Value::Kind;
  switch (base) {
    case Base::kTensor: {
      if (value.kind != Kind::kTensor) mismatch("Tensor");
      return bits_of(operands[value.i].over(const_cast<void*>(data[value.i])).release());
    }
    case Base::kInt:
      if (value.kind != Kind::kInt && value.kind != Kind::kBool) mismatch("int");
      return bits_of(value.i);
    case Base::kFloat:
      if (value.kind == Kind::kInt) return bits_of(static_cast<double>(value.i));
      if (value.kind != Kind::kFloat) mismatch("float");
      return bits_of(value.f);
    case Base::kBool:
      if (value.kind != Kind::kBool && value.kind != Kind::kInt) mismatch("bool");
      return bits_of(value.i != 0);
    case Base::kStr:
      return encode_string(value);
    case Base::kScalarType:
      return encode_name("aoti_torch_dtype_", value);
    case Base::kLayout:
      return encode_name("aoti_torch_layout_", value);
    case Base::kMemoryFormat:
      return encode_name("aoti_torch_memory_format_", value);
    case Base::kDevice:
      if (value.kind != Kind::kStr) mismatch("Device");
      return encode_device(value.s);
    case Base::kScalar:
    case Base::kComplex:
    case Base::kGenerator:
      break;
  }
  mismatch("one the stable interface can encode");
}

Stable encode_wrapped(const Type& type, size_t wrappers, const Value& value,
                      std::span<const Operand> operands, const void* const* data) {
  if (wrappers == 0) return encode_base(type.base, value, operands, data);
  const TorchApi& api = require_torch();
  const char outer = type.wrappers[wrappers - 1];
  if (outer == '?') {
    // An absent operand is an absent optional tensor.
    const bool absent = value.kind == Value::Kind::kTensor && !operands[value.i].present;
    if (value.kind == Value::Kind::kNone || absent) return 0;
    const Stable inner = encode_wrapped(type, wrappers - 1, value, operands, data);
    Stable* box = nullptr;
    if (api.new_box != nullptr) {
      check(api.new_box(&box), "an optional argument");
    } else {
      box = new Stable;  // before 2.13 torch frees it with `delete`
    }
    *box = inner;
    return bits_of(box);
  }
  if (value.kind != Value::Kind::kList) mismatch("list");
  void* list = nullptr;
  check(api.new_list(value.items.size(), &list), "a list argument");
  for (const Value& item : value.items) {
    check(api.list_push_back(list, encode_wrapped(type, wrappers - 1, item, operands, data)),
          "a list argument");
  }
  return bits_of(list);
}

}  // namespace

Tensor::~Tensor() {
  if (handle_ != nullptr) require_torch().delete_tensor(handle_);
}

Operand Operand::of(const rm_tensor* tensor) {
  Operand out;
  if (tensor == nullptr) return out;
  const TorchApi& api = require_torch();
  out.present = true;
  out.shape.assign(tensor->shape, tensor->shape + tensor->ndim);
  out.strides.assign(tensor->strides, tensor->strides + tensor->ndim);
  out.dtype = torch_dtype(tensor->dtype);
  const bool cuda = tensor->device.device_type == kDLCUDA;
  out.device_type =
      api.constant(cuda ? "aoti_torch_device_type_cuda" : "aoti_torch_device_type_cpu");
  out.device_index = cuda ? tensor->device.device_id : 0;
  return out;
}

int64_t Operand::elements() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

Tensor Operand::over(void* data) const {
  void* handle = nullptr;
  check(require_torch().create_tensor_from_blob(data, static_cast<int64_t>(shape.size()),
                                                shape.data(), strides.data(), 0, dtype, device_type,
                                                device_index, &handle),
        "a tensor over our memory");
  return Tensor(handle);
}

Stable encode(const Type& type, const Value& value, std::span<const Operand> operands,
              const void* const* data) {
  return encode_wrapped(type, type.wrappers.size(), value, operands, data);
}

}  // namespace rm::torch_bridge
