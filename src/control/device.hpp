// Device strings: auto | cpu | gpu[:N] = cuda[:N] | npu[:N] | rbln[:N] | furiosa[:N] | sim[:N], or
// the name of any other plugin, PLUGIN[:N]: whether there is one of that name is not known here.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace rm::control {

enum class DeviceKind { kAuto, kCpu, kCuda, kNpu, kRbln, kFuriosa, kSim, kPlugin };

struct DeviceRequest {
  DeviceKind kind = DeviceKind::kAuto;
  size_t index = 0;
  bool explicit_index = false;
  std::string plugin;  ///< its name, for kPlugin

  /// The plugin's name of a real device: "cuda" for gpu:1, "mine" for mine:0.
  std::string_view name() const;
};

/// Throws rm::Error(RM_INVALID_ARGUMENT) naming the accepted values.
DeviceRequest parse_device(std::string_view text);

/// "auto", "cpu", "cuda", "npu", "rbln", "furiosa", "sim": also the plugin's name for a real
/// device. Empty for kPlugin, whose name the request holds.
std::string_view kind_name(DeviceKind kind);

/// The accepted forms, as messages and help print them.
std::string_view accepted_devices();

}  // namespace rm::control
