// Element type table: one row a type, everything else looks it up.
#include "ir/type.hpp"

#include <array>

#include "base/error.hpp"
#include "ir/byte_count.hpp"

namespace rm::ir {
namespace {

struct Row {
  DType dtype;
  std::string_view name;
  uint8_t dl_code, bits;
};

constexpr std::array<Row, 13> kRows{{
    {DType::kF32, "f32", kDLFloat, 32},
    {DType::kF64, "f64", kDLFloat, 64},
    {DType::kBF16, "bf16", kDLBfloat, 16},
    {DType::kF16, "f16", kDLFloat, 16},
    {DType::kI64, "i64", kDLInt, 64},
    {DType::kI32, "i32", kDLInt, 32},
    {DType::kI16, "i16", kDLInt, 16},
    {DType::kI8, "i8", kDLInt, 8},
    {DType::kU8, "u8", kDLUInt, 8},
    {DType::kBool, "bool", kDLBool, 8},
    {DType::kU16, "u16", kDLUInt, 16},
    {DType::kU32, "u32", kDLUInt, 32},
    {DType::kU64, "u64", kDLUInt, 64},
}};

const Row& row(DType dtype) { return kRows[static_cast<size_t>(dtype)]; }

}  // namespace

std::string_view name(DType dtype) { return row(dtype).name; }

DType parse_dtype(std::string_view text) {
  std::string accepted;
  for (const Row& r : kRows) {
    if (r.name == text) return r.dtype;
    accepted += (accepted.empty() ? "" : ", ") + std::string(r.name);
  }
  throw_invalid("[dtype] expected one of " + accepted + ", got '" +
                std::string(text.substr(0, 40)) + "'");
}

size_t size_bytes(DType dtype) { return row(dtype).bits / 8; }

bool is_floating(DType dtype) {
  return row(dtype).dl_code == kDLFloat || row(dtype).dl_code == kDLBfloat;
}

DLDataType to_dlpack(DType dtype) { return {row(dtype).dl_code, row(dtype).bits, 1}; }

bool from_dlpack(DLDataType dl, DType* out) {
  for (const Row& r : kRows) {
    if (r.dl_code == dl.code && r.bits == dl.bits && dl.lanes == 1) {
      *out = r.dtype;
      return true;
    }
  }
  return false;
}

bool TensorType::is_static() const {
  for (const auto& d : dims) {
    if (!d.is_static()) return false;
  }
  return true;
}

namespace {

std::vector<int64_t> values(const Dims& dims) {
  std::vector<int64_t> out;
  for (const Dim& d : dims) out.push_back(d.value());
  return out;
}

}  // namespace

int64_t TensorType::num_elements() const { return ir::num_elements(values(dims)); }

int64_t TensorType::num_bytes() const { return ir::num_bytes(values(dims), dtype); }

std::string TensorType::str() const {
  std::string out(name(dtype));
  out += '[';
  for (size_t i = 0; i < dims.size(); ++i) {
    if (i != 0) out += ',';
    out += dims[i].str();
  }
  return out + ']';
}

}  // namespace rm::ir
