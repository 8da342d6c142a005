// One parser a type of option: what a value may look like, and its canonical form.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/edit_distance.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/options.hpp"

namespace rm {
namespace {

using Canonical = std::optional<std::string>;  // nullopt: not understood

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\n\r";
  const size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return out;
}

template <typename T>
std::optional<T> number_of(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}

template <typename T>
bool in_range(T value, std::string_view accepted) {
  const size_t dots = accepted.find("..");
  if (dots == std::string_view::npos) return true;
  return value >= *number_of<T>(accepted.substr(0, dots)) &&
         value <= *number_of<T>(accepted.substr(dots + 2));
}

Canonical parse_bool(std::string_view text) {
  const std::string word = lower(text);
  if (word == "true" || word == "1" || word == "yes" || word == "on") return "true";
  // An environment variable set to nothing is a variable that says no.
  if (word == "false" || word == "0" || word == "no" || word == "off" || word.empty())
    return "false";
  return std::nullopt;
}

Canonical parse_int(std::string_view text, std::string_view accepted) {
  const auto value = number_of<int64_t>(text);
  if (!value || !in_range(*value, accepted)) return std::nullopt;
  return std::to_string(*value);
}

Canonical parse_number(std::string_view text, std::string_view accepted) {
  const auto value = number_of<double>(text);
  if (!value || !std::isfinite(*value) || !in_range(*value, accepted)) return std::nullopt;
  char canonical[32];
  const auto end = std::to_chars(canonical, canonical + sizeof(canonical), *value).ptr;
  return std::string(canonical, end);
}

Canonical parse_choice(std::string_view text, std::string_view accepted) {
  const std::string word = lower(text);
  for (std::string_view choice : split(accepted, '|')) {
    if (choice == word) return word;
  }
  return std::nullopt;
}

struct Unit {
  std::string_view suffix;
  int64_t factor;
};

/// A whole number of units; `units` from the smallest, the first without a suffix being 1.
Canonical parse_scaled(std::string_view text, std::span<const Unit> units) {
  const std::string word = lower(text);
  const size_t digits = std::min(word.find_first_not_of("0123456789"), word.size());
  const auto count = number_of<int64_t>(std::string_view(word).substr(0, digits));
  const std::string_view suffix = trimmed(std::string_view(word).substr(digits));
  if (!count) return std::nullopt;
  for (const Unit& unit : units) {
    if (unit.suffix != suffix) continue;
    if (*count > std::numeric_limits<int64_t>::max() / unit.factor) return std::nullopt;
    return std::to_string(*count * unit.factor);
  }
  return std::nullopt;
}

constexpr int64_t kKi = 1024;
constexpr Unit kByteUnits[] = {{"", 1},
                               {"b", 1},
                               {"k", kKi},
                               {"kb", kKi},
                               {"kib", kKi},
                               {"m", kKi* kKi},
                               {"mb", kKi* kKi},
                               {"mib", kKi* kKi},
                               {"g", kKi* kKi* kKi},
                               {"gb", kKi* kKi* kKi},
                               {"gib", kKi* kKi* kKi},
                               {"t", kKi* kKi* kKi* kKi},
                               {"tb", kKi* kKi* kKi* kKi},
                               {"tib", kKi* kKi* kKi* kKi}};
constexpr Unit kDurationUnits[] = {{"", 1}, {"s", 1}, {"m", 60}, {"h", 3600}, {"d", 86400}};

Canonical parse_int_list(std::string_view text) {
  std::string_view body = trimmed(text);
  if (body.starts_with('[') && body.ends_with(']')) body = trimmed(body.substr(1, body.size() - 2));
  if (body.empty()) return "";
  std::vector<int64_t> values;
  for (std::string_view part : split(body, ',')) {
    const auto value = number_of<int64_t>(trimmed(part));
    if (!value || *value <= 0) return std::nullopt;
    values.push_back(*value);
  }
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  std::string out;
  for (int64_t value : values) out += (out.empty() ? "" : ",") + std::to_string(value);
  return out;
}

Canonical parse_json(std::string_view text) {
  if (trimmed(text).empty()) return "{}";
  const auto value = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!value.is_object()) return std::nullopt;
  return value.dump();  // nlohmann::json keeps objects sorted by key
}

Canonical parse_device(std::string_view text) {
  const std::string word = lower(text);
  const size_t colon = word.find(':');
  const std::string name = word.substr(0, colon);
  const auto is_name = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  };
  if (name.empty() || name[0] < 'a' || !std::all_of(name.begin(), name.end(), is_name)) {
    return std::nullopt;
  }
  if (colon == std::string::npos) return word;
  const auto index = number_of<uint32_t>(std::string_view(word).substr(colon + 1));
  if (!index || name == "auto") return std::nullopt;
  return name + ":" + std::to_string(*index);
}

Canonical parse_fallback(std::string_view text) {
  constexpr std::string_view kGroups[] = {"cache",       "capture", "compile",
                                          "correctness", "device",  "routing"};
  const std::string word = lower(text);
  if (word == "warn" || word == "allow" || word == "error") return word;
  if (!word.starts_with("error:")) return std::nullopt;
  std::vector<std::string> groups;
  for (std::string_view part : split(std::string_view(word).substr(6), ',')) {
    const std::string_view group = trimmed(part);
    if (std::find(std::begin(kGroups), std::end(kGroups), group) == std::end(kGroups)) {
      return std::nullopt;
    }
    groups.emplace_back(group);
  }
  std::sort(groups.begin(), groups.end());
  groups.erase(std::unique(groups.begin(), groups.end()), groups.end());
  std::string out = "error:";
  for (const std::string& group : groups) out += (out.back() == ':' ? "" : ",") + group;
  return out;
}

Canonical parse_verify(std::string_view text) {
  const std::string word = lower(text);
  if (word == "off" || word == "first" || word == "auto" || word == "always") return word;
  if (word.starts_with("p=")) {
    const Canonical probability = parse_number(std::string_view(word).substr(2), "0..1");
    return probability ? Canonical("p=" + *probability) : std::nullopt;
  }
  return parse_int(word, "1..1000000000");
}

Canonical parse(const OptionSpec& spec, std::string_view text) {
  switch (spec.type) {
    case OptionType::kBool:
      return parse_bool(text);
    case OptionType::kInt:
      return parse_int(text, spec.accepted);
    case OptionType::kNumber:
      return parse_number(text, spec.accepted);
    case OptionType::kChoice:
      return parse_choice(text, spec.accepted);
    case OptionType::kBytes:
      return parse_scaled(text, kByteUnits);
    case OptionType::kDuration:
      return parse_scaled(text, kDurationUnits);
    case OptionType::kIntList:
      return parse_int_list(text);
    case OptionType::kJson:
      return parse_json(text);
    case OptionType::kDevice:
      return parse_device(text);
    case OptionType::kFallback:
      return parse_fallback(text);
    case OptionType::kVerify:
      return parse_verify(text);
    case OptionType::kLogSpec:
      check_log_spec(text);
      return std::string(text);
    case OptionType::kText:
    case OptionType::kPath:
      return std::string(text);
  }
  return std::nullopt;
}

/// "; try 'x'" for a choice: the nearest one, or the default where none is alike.
std::string suggestion(const OptionSpec& spec, std::string_view text) {
  if (spec.type != OptionType::kChoice) return {};
  const std::string given = lower(trimmed(text));
  std::string_view nearest = spec.default_text;
  size_t best = given.size() / 2 + 1;  // more than half of the letters wrong is another word
  for (std::string_view choice : split(spec.accepted, '|')) {
    const size_t distance = edit_distance(given, choice);
    if (distance >= best) continue;
    best = distance;
    nearest = choice;
  }
  return "; try '" + std::string(nearest) + "'";
}

}  // namespace

std::string_view option_type_name(OptionType type) {
  constexpr std::string_view kNames[] = {"bool",     "int",      "number", "choice",  "bytes",
                                         "duration", "int list", "text",   "path",    "json",
                                         "device",   "fallback", "verify", "log spec"};
  return kNames[static_cast<size_t>(type)];
}

std::string_view option_group_name(OptionGroup group) {
  constexpr std::string_view kNames[] = {"session", "compile", "cache", "debug"};
  return kNames[static_cast<size_t>(group)];
}

std::string accepted_values(const OptionSpec& spec) {
  if (spec.type == OptionType::kBool) return "true or false";
  if (spec.type == OptionType::kInt) return "an integer in " + std::string(spec.accepted);
  if (spec.type == OptionType::kNumber) return "a number in " + std::string(spec.accepted);
  if (spec.type != OptionType::kChoice) return std::string(spec.accepted);
  std::string words;
  for (std::string_view choice : split(spec.accepted, '|')) {
    words += (words.empty() ? "" : ", ") + std::string(choice);
  }
  return words;
}

std::string canonical_option(const OptionSpec& spec, std::string_view text,
                             std::string_view source) {
  const bool verbatim = spec.type == OptionType::kText || spec.type == OptionType::kPath;
  Canonical canonical;
  std::string detail;
  try {
    canonical = parse(spec, verbatim ? text : trimmed(text));
  } catch (const Error& error) {  // a parser that can say more than "not understood"
    detail = std::string(" (") + error.what() + ")";
  }
  if (canonical) return *canonical;
  throw_invalid("[options] expected " + accepted_values(spec) + " for '" + std::string(spec.name) +
                "' from " + std::string(source) + ", got '" + std::string(text) + "'" + detail +
                suggestion(spec, text));
}

}  // namespace rm
