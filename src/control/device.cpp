// Parses device strings; nothing is guessed: "CPU", "gpu:" or "npu:-1" are errors.
#include "control/device.hpp"

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

[[noreturn]] void reject(std::string_view text) {
  throw_invalid("[device] expected " + std::string(accepted_devices()) + ", got '" +
                std::string(text) + "'");
}

}  // namespace

std::string_view accepted_devices() {
  return "auto, cpu, gpu[:N], cuda[:N], npu[:N], rbln[:N], furiosa[:N] or sim[:N]";
}

std::string_view kind_name(DeviceKind kind) {
  for (const Name& name : kNames) {
    if (name.kind == kind) return name.text;
  }
  return {};
}

DeviceRequest parse_device(std::string_view text) {
  const size_t colon = text.find(':');
  for (const Name& name : kNames) {
    if (text.substr(0, colon) != name.text) continue;
    DeviceRequest request{name.kind, 0, false};
    if (colon == std::string_view::npos) return request;
    if (!name.indexed) reject(text);
    const std::string_view digits = text.substr(colon + 1);
    unsigned index = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    if (error != std::errc() || end != digits.data() + digits.size()) reject(text);
    request.index = index;
    request.explicit_index = true;
    return request;
  }
  reject(text);
}

}  // namespace rm::control
