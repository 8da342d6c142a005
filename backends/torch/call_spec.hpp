// A call of an ATen operator as the importer describes it: the attribute `schema_args`, a JSON
// object written by rm_abstract.capture.aten_args (the format is documented there), and the
// attribute `sym_args`, the values of its symbolic integers for this problem.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace rm::torch_bridge {

enum class Base {
  kTensor,
  kInt,
  kFloat,
  kBool,
  kStr,
  kScalar,
  kComplex,
  kScalarType,
  kDevice,
  kLayout,
  kMemoryFormat,
  kGenerator
};

/// A schema type: a base and its wrappers from the inside out, '?' optional and 'l' list.
struct Type {
  Base base = Base::kTensor;
  std::string wrappers;
};

struct Value {
  enum class Kind { kNone, kTensor, kInt, kFloat, kBool, kStr, kList, kComplex };
  Kind kind = Kind::kNone;
  int64_t i = 0;  ///< kInt, kBool; operand index of kTensor
  double f = 0;   ///< kFloat
  std::string s;  ///< kStr
  std::vector<Value> items;
};

struct CallSpec {
  std::vector<std::pair<Type, Value>> args;  ///< one per schema argument, in schema order
  std::vector<Type> returns;
  /// The stable C interface has no encoding for Scalar, complex or a number in a tensor's place:
  /// such a call goes through torch's Python bindings.
  bool needs_python = false;
};

/// Throws plugin::Error(RM_INVALID_ARGUMENT) when the text is not of the format.
CallSpec parse_call(std::string_view json, std::span<const int64_t> sym_args);

}  // namespace rm::torch_bridge
