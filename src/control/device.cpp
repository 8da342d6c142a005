// Parses device strings; nothing is guessed: "CPU", "gpu:" or "npu:-1" are errors.
#include "control/device.hpp"

#include <algorithm>
#include <charconv>

#include "base/error.hpp"

namespace rm::control {
namespace {

struct Name {
  std::string_view text;
  DeviceKind kind;
  bool indexed;
};
constexpr Name kNames[] = {
    {"auto", DeviceKind::kAuto, false},      {"cpu", DeviceKind::kCpu, false},
    {"cuda", DeviceKind::kCuda, true},       {"gpu", DeviceKind::kCuda, true},
    {"npu", DeviceKind::kNpu, true},         {"rbln", DeviceKind::kRbln, true},
    {"furiosa", DeviceKind::kFuriosa, true}, {"sim", DeviceKind::kSim, true}};

/// A plugin's name as a device string may have it: RM_DEVICE and the options table use lower case.
bool is_plugin_name(std::string_view text) {
  const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || c == '_'; };
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  return !text.empty() && is_letter(text[0]) &&
         std::all_of(text.begin(), text.end(), [&](char c) { return is_letter(c) || is_digit(c); });
}

[[noreturn]] void reject(std::string_view text) {
  throw_invalid("[device] expected " + std::string(accepted_devices()) + ", got '" +
                std::string(text) + "'");
}

}  // namespace

std::string_view accepted_devices() {
  return "auto, cpu, gpu[:N], cuda[:N], npu[:N], rbln[:N], furiosa[:N], sim[:N] or a plugin's "
         "name[:N]";
}

std::string_view kind_name(DeviceKind kind) {
  for (const Name& name : kNames) {
    if (name.kind == kind) return name.text;
  }
  return {};
}

std::string_view DeviceRequest::name() const {
  return kind == DeviceKind::kPlugin ? std::string_view(plugin) : kind_name(kind);
}

DeviceRequest parse_device(std::string_view text) {
  const size_t colon = text.find(':');
  const std::string_view word = text.substr(0, colon);
  DeviceRequest request;
  const Name* known = std::find_if(std::begin(kNames), std::end(kNames),
                                   [&](const Name& name) { return name.text == word; });
  if (known != std::end(kNames)) {
    request.kind = known->kind;
  } else if (is_plugin_name(word)) {
    request.kind = DeviceKind::kPlugin;
    request.plugin = word;
  } else {
    reject(text);
  }
  if (colon == std::string_view::npos) return request;
  if (known != std::end(kNames) && !known->indexed) reject(text);
  const std::string_view digits = text.substr(colon + 1);
  unsigned index = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
  if (error != std::errc() || end != digits.data() + digits.size()) reject(text);
  request.index = index;
  request.explicit_index = true;
  return request;
}

}  // namespace rm::control
