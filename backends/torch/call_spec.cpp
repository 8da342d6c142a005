// Reads the JSON of `schema_args`; everything malformed is named.
#include "call_spec.hpp"

#include <array>
#include <limits>
#include <nlohmann/json.hpp>

#include "rm/plugin.hpp"

namespace rm::torch_bridge {
namespace {

using Json = nlohmann::json;

[[noreturn]] void malformed(const std::string& what) {
  throw plugin::Error(RM_INVALID_ARGUMENT, "[torch bridge] expected schema_args of format 1, got " +
                                               what + "; encode calls with aten_args.encode_call");
}

Type parse_type(std::string_view text) {
  constexpr std::array<std::pair<std::string_view, Base>, 12> kBases = {
      {{"Tensor", Base::kTensor},
       {"int", Base::kInt},
       {"float", Base::kFloat},
       {"bool", Base::kBool},
       {"str", Base::kStr},
       {"Scalar", Base::kScalar},
       {"complex", Base::kComplex},
       {"ScalarType", Base::kScalarType},
       {"Device", Base::kDevice},
       {"Layout", Base::kLayout},
       {"MemoryFormat", Base::kMemoryFormat},
       {"Generator", Base::kGenerator}}};
  const size_t end = std::min(text.find('?'), text.find('['));
  Type type;
  bool known = false;
  for (const auto& [name, base] : kBases) {
    if (text.substr(0, end) == name) type.base = base, known = true;
  }
  if (!known) malformed("the type '" + std::string(text) + "'");
  std::string_view rest = end == std::string_view::npos ? std::string_view() : text.substr(end);
  while (!rest.empty()) {
    if (rest.starts_with("?")) {
      type.wrappers += '?', rest.remove_prefix(1);
    } else if (rest.starts_with("[]")) {
      type.wrappers += 'l', rest.remove_prefix(2);
    } else {
      malformed("the type '" + std::string(text) + "'");
    }
  }
  return type;
}

double special_float(const std::string& text) {
  if (text == "inf") return std::numeric_limits<double>::infinity();
  if (text == "-inf") return -std::numeric_limits<double>::infinity();
  if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
  malformed("the float '" + text + "'");
}

Value parse_object(const Json& json, std::span<const int64_t> sym_args) {
  Value value;
  if (json.contains("t")) {
    value.kind = Value::Kind::kTensor;
    value.i = json.at("t").get<int64_t>();
  } else if (json.contains("s")) {
    const auto index = json.at("s").get<size_t>();
    if (index >= sym_args.size()) malformed("symbol " + std::to_string(index) + " without a value");
    value.kind = Value::Kind::kInt;
    value.i = sym_args[index];
  } else if (json.contains("f")) {
    value.kind = Value::Kind::kFloat;
    value.f = special_float(json.at("f").get<std::string>());
  } else if (json.contains("c")) {
    value.kind = Value::Kind::kComplex;
  } else {
    malformed(json.dump());
  }
  return value;
}

Value parse_value(const Json& json, std::span<const int64_t> sym_args) {
  Value value;
  switch (json.type()) {
    case Json::value_t::null:
      break;
    case Json::value_t::boolean:
      value.kind = Value::Kind::kBool, value.i = json.get<bool>() ? 1 : 0;
      break;
    case Json::value_t::number_integer:
    case Json::value_t::number_unsigned:
      value.kind = Value::Kind::kInt, value.i = json.get<int64_t>();
      break;
    case Json::value_t::number_float:
      value.kind = Value::Kind::kFloat, value.f = json.get<double>();
      break;
    case Json::value_t::string:
      value.kind = Value::Kind::kStr, value.s = json.get<std::string>();
      break;
    case Json::value_t::array:
      value.kind = Value::Kind::kList;
      for (const Json& item : json) value.items.push_back(parse_value(item, sym_args));
      break;
    case Json::value_t::object:
      return parse_object(json, sym_args);
    default:
      malformed(json.dump());
  }
  return value;
}

bool beyond_stable_abi(Base base, const Value& value) {
  if (value.kind == Value::Kind::kNone) return false;
  if (value.kind == Value::Kind::kList) {
    for (const Value& item : value.items) {
      if (beyond_stable_abi(base, item)) return true;
    }
    return false;
  }
  if (base == Base::kTensor) return value.kind != Value::Kind::kTensor;
  return base == Base::kScalar || base == Base::kComplex || base == Base::kGenerator;
}

}  // namespace

CallSpec parse_call(std::string_view text, std::span<const int64_t> sym_args) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || json.value("v", 0) != 1) malformed("'" + std::string(text) + "'");
  CallSpec call;
  try {
    for (const Json& arg : json.at("args")) {
      Type type = parse_type(arg.at(0).get<std::string>());
      Value value = parse_value(arg.at(1), sym_args);
      call.needs_python |= beyond_stable_abi(type.base, value);
      call.args.emplace_back(std::move(type), std::move(value));
    }
    for (const Json& type : json.at("returns")) {
      call.returns.push_back(parse_type(type.get<std::string>()));
    }
  } catch (const Json::exception& e) {
    malformed(std::string(text) + " (" + e.what() + ")");
  }
  for (const Type& type : call.returns) {
    if (type.base != Base::kTensor) malformed("an operator that returns something but tensors");
  }
  return call;
}

}  // namespace rm::torch_bridge
