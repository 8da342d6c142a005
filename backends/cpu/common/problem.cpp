// Decodes rm_problem once, at prepare time.
#include "common/problem.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace rm::cpu {

int64_t dtype_bytes(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64:
    case DType::u64:
      return 8;
    case DType::f32:
    case DType::i32:
    case DType::u32:
      return 4;
    case DType::bf16:
    case DType::f16:
    case DType::i16:
    case DType::u16:
      return 2;
    default:
      return 1;
  }
}

const char* dtype_name(DType t) {
  static const char* const names[] = {"f32", "f64", "bf16", "f16", "i64", "i32", "i16",
                                      "i8",  "u8",  "bool", "u16", "u32", "u64", "invalid"};
  return names[static_cast<int>(t)];
}

DType to_dtype(DLDataType t) {
  if (t.lanes != 1) return DType::invalid;
  const int key = t.code * 1000 + t.bits;
  switch (key) {
    case kDLFloat * 1000 + 32:
      return DType::f32;
    case kDLFloat * 1000 + 64:
      return DType::f64;
    case kDLFloat * 1000 + 16:
      return DType::f16;
    case kDLBfloat * 1000 + 16:
      return DType::bf16;
    case kDLInt * 1000 + 64:
      return DType::i64;
    case kDLInt * 1000 + 32:
      return DType::i32;
    case kDLInt * 1000 + 16:
      return DType::i16;
    case kDLInt * 1000 + 8:
      return DType::i8;
    case kDLUInt * 1000 + 8:
      return DType::u8;
    case kDLUInt * 1000 + 16:
      return DType::u16;
    case kDLUInt * 1000 + 32:
      return DType::u32;
    case kDLUInt * 1000 + 64:
      return DType::u64;
    case kDLBool * 1000 + 8:
      return DType::boolean;
    default:
      return DType::invalid;
  }
}

int64_t View::numel() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

static View to_view(const rm_tensor& t) {
  View v;
  v.dtype = to_dtype(t.dtype);
  v.shape.assign(t.shape, t.shape + t.ndim);
  v.stride.assign(t.strides, t.strides + t.ndim);
  return v;
}

View Problem::input(size_t i) const {
  if (!has_input(i)) {
    throw std::invalid_argument("[" + std::string(p_.op.data, p_.op.size) + "] expected operand " +
                                std::to_string(i) + ", got none");
  }
  return to_view(*p_.inputs[i]);
}

View Problem::output(size_t i) const {
  if (!has_output(i)) {
    throw std::invalid_argument("[" + std::string(p_.op.data, p_.op.size) + "] expected result " +
                                std::to_string(i) + ", got none");
  }
  return to_view(*p_.outputs[i]);
}

const rm_attr* Problem::find(std::string_view name) const {
  const char* at = reinterpret_cast<const char*>(p_.attrs);
  for (size_t i = 0; i < p_.num_attrs; ++i, at += p_.attr_stride) {
    const auto* attr = reinterpret_cast<const rm_attr*>(at);
    if (std::string_view(attr->name.data, attr->name.size) == name) return attr;
  }
  return nullptr;
}

int64_t Problem::attr_int(std::string_view name, int64_t otherwise) const {
  const rm_attr* a = find(name);
  if (!a) return otherwise;
  return a->kind == RM_ATTR_FLOAT ? static_cast<int64_t>(a->f) : a->i;
}

double Problem::attr_float(std::string_view name, double otherwise) const {
  const rm_attr* a = find(name);
  if (!a) return otherwise;
  return a->kind == RM_ATTR_INT ? static_cast<double>(a->i) : a->f;
}

std::string_view Problem::attr_string(std::string_view name, std::string_view otherwise) const {
  const rm_attr* a = find(name);
  return a && a->kind == RM_ATTR_STRING ? std::string_view(a->s.data, a->s.size) : otherwise;
}

std::vector<int64_t> Problem::attr_ints(std::string_view name) const {
  const rm_attr* a = find(name);
  if (!a) return {};
  if (a->kind == RM_ATTR_INT) return {a->i};
  return std::vector<int64_t>(a->ints, a->ints + a->count);
}

std::vector<double> Problem::attr_floats(std::string_view name) const {
  const rm_attr* a = find(name);
  if (!a) return {};
  if (a->kind == RM_ATTR_FLOAT) return {a->f};
  return std::vector<double>(a->floats, a->floats + a->count);
}

int normal_axis(int64_t axis, int rank) {
  const int64_t at = axis < 0 ? axis + rank : axis;
  if (at < 0 || at >= rank) {
    throw std::invalid_argument("[axis] expected an axis of a tensor of rank " +
                                std::to_string(rank) + ", got " + std::to_string(axis));
  }
  return static_cast<int>(at);
}

int64_t Nest::numel() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

Nest make_nest(std::vector<int64_t> shape, std::vector<std::vector<int64_t>> strides, int sort_by) {
  const size_t operands = strides.size();
  std::vector<size_t> order;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] != 1) order.push_back(i);
  }
  if (sort_by >= 0) {
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return std::abs(strides[sort_by][a]) > std::abs(strides[sort_by][b]);
    });
  }
  Nest nest;
  nest.strides.resize(operands);
  for (size_t axis : order) {
    bool merge = !nest.shape.empty();
    for (size_t o = 0; o < operands && merge; ++o) {
      merge = nest.strides[o].back() == strides[o][axis] * shape[axis];
    }
    if (merge) {
      nest.shape.back() *= shape[axis];
      for (size_t o = 0; o < operands; ++o) nest.strides[o].back() = strides[o][axis];
    } else {
      nest.shape.push_back(shape[axis]);
      for (size_t o = 0; o < operands; ++o) nest.strides[o].push_back(strides[o][axis]);
    }
  }
  if (nest.shape.empty()) {
    nest.shape.push_back(1);
    for (auto& s : nest.strides) s.push_back(1);
  }
  return nest;
}

}  // namespace rm::cpu
