// A reader by searching: lines are "%3 = op(...) {...} : f32[2,3], i64[2]", "weight %1 "name" :
// ...".
#include "program_text.hpp"

#include <charconv>
#include <map>

#include "rm/plugin.hpp"

namespace rm::sim {
namespace {

[[noreturn]] void reject(std::string_view line) {
  throw plugin::Error(RM_INVALID_ARGUMENT,
                      "[sim] expected a line of rm.ir/1, got '" + std::string(line) + "'");
}

constexpr std::string_view kDonated = " donated";

uint64_t element_bytes(std::string_view dtype) {
  if (dtype == "f64" || dtype == "i64") return 8;
  if (dtype == "f32" || dtype == "i32") return 4;
  if (dtype == "bf16" || dtype == "f16" || dtype == "i16") return 2;
  return 1;
}

Type parse_type(std::string_view text, std::string_view line) {
  const size_t open = text.find('['), close = text.rfind(']');
  if (open == std::string_view::npos || close == std::string_view::npos) reject(line);
  Type type;
  type.dtype = text.substr(0, open);
  std::string_view rest = text.substr(open + 1, close - open - 1);
  while (!rest.empty()) {
    // Dims are integers or expressions whose commas stand inside parentheses.
    size_t end = 0;
    for (int depth = 0; end < rest.size() && (depth > 0 || rest[end] != ','); ++end) {
      depth += rest[end] == '(' ? 1 : rest[end] == ')' ? -1 : 0;
    }
    int64_t dim = 0;
    const auto [at, error] = std::from_chars(rest.data(), rest.data() + end, dim);
    if (error != std::errc() || at != rest.data() + end) type.is_static = false;
    type.dims.push_back(dim);
    rest.remove_prefix(end < rest.size() ? end + 1 : end);
  }
  return type;
}

/// The types behind the last " : " of a line, separated by ", ".
std::vector<Type> types_of(std::string_view line) {
  const size_t colon = line.rfind(" : ");
  if (colon == std::string_view::npos) reject(line);
  std::string_view rest = line.substr(colon + 3);
  if (rest.ends_with(kDonated)) rest.remove_suffix(kDonated.size());
  std::vector<Type> out;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find(", "), rest.size());
    out.push_back(parse_type(rest.substr(0, end), line));
    rest.remove_prefix(std::min(end + 2, rest.size()));
  }
  return out;
}

template <class Fn>
void each_line(std::string_view text, Fn fn) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    if (end > 0) fn(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

/// Every "%12" outside quotes through `rename`.
template <class Fn>
std::string rename_values(std::string_view line, Fn rename) {
  std::string out;
  bool quoted = false;
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '"' && (i == 0 || line[i - 1] != '\\')) quoted = !quoted;
    if (line[i] != '%' || quoted) {
      out.push_back(line[i]);
      continue;
    }
    int number = 0;
    const auto [end, error] =
        std::from_chars(line.data() + i + 1, line.data() + line.size(), number);
    if (error != std::errc()) reject(line);
    out += "%" + std::to_string(rename(number));
    i = static_cast<size_t>(end - line.data()) - 1;
  }
  return out;
}

}  // namespace

uint64_t Type::bytes() const {
  uint64_t count = element_bytes(dtype);
  for (const int64_t dim : dims) count *= static_cast<uint64_t>(dim);
  return count;
}

DLDataType Type::dl_dtype() const {
  const uint8_t bits = static_cast<uint8_t>(8 * element_bytes(dtype));
  if (dtype == "bool") return {kDLBool, bits, 1};
  if (dtype == "bf16") return {kDLBfloat, bits, 1};
  if (dtype.starts_with("f")) return {kDLFloat, bits, 1};
  return {static_cast<uint8_t>(dtype.starts_with("u") ? kDLUInt : kDLInt), bits, 1};
}

Program parse(std::string_view text) {
  Program program;
  each_line(text, [&](std::string_view line) {
    if (line.starts_with("input ")) {
      program.inputs.push_back(types_of(line).at(0));
      program.donated.push_back(line.ends_with(kDonated));
    } else if (line.starts_with("weight ")) {
      const size_t open = line.find('"'), close = line.rfind('"');
      if (open == close) reject(line);
      program.weight_names.emplace_back(line.substr(open + 1, close - open - 1));
      program.weights.push_back(types_of(line).at(0));
    } else if (line.starts_with("%")) {
      const size_t equals = line.find(" = "), open = line.find('(');
      if (equals == std::string_view::npos || open == std::string_view::npos) reject(line);
      program.nodes.push_back(
          {std::string(line.substr(equals + 3, open - equals - 3)), types_of(line)});
    } else if (!line.starts_with("rmir ") && !line.starts_with("sym ") &&
               !line.starts_with("literal ") && !line.starts_with("return")) {
      reject(line);
    }
  });
  return program;
}

std::string round_to_bf16(std::string_view text) {
  int next = 0;
  rename_values(text, [&](int number) {
    next = std::max(next, number + 1);
    return number;
  });
  std::map<int, int> rounded;
  std::string out;
  each_line(text, [&](std::string_view line) {
    const size_t equals = line.starts_with("%") ? line.find(" = ") : std::string_view::npos;
    const auto use = [&](int number) {
      const auto at = rounded.find(number);
      return at == rounded.end() ? number : at->second;
    };
    if (equals == std::string_view::npos) {
      out += (line.starts_with("return") ? rename_values(line, use) : std::string(line)) + "\n";
      return;
    }
    out += std::string(line.substr(0, equals)) + rename_values(line.substr(equals), use) + "\n";
    const std::vector<Type> types = types_of(line);
    if (types.size() != 1 || types[0].dtype != "f32") return;
    const std::string name(line.substr(0, equals));
    const std::string shape(line.substr(line.rfind(" : ") + 3 + 3));  // behind "f32"
    const std::string half = "%" + std::to_string(next), whole = "%" + std::to_string(next + 1);
    out += half + " = cast(" + name + ") : bf16" + shape + "\n";
    out += whole + " = cast(" + half + ") : f32" + shape + "\n";
    rounded[std::stoi(name.substr(1))] = next + 1;
    next += 2;
  });
  return out;
}

}  // namespace rm::sim
