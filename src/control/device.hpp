// Device strings: auto | cpu | gpu[:N] = cuda[:N] | npu[:N] | rbln[:N] | furiosa[:N] | sim[:N].
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace rm::control {

enum class DeviceKind { kAuto, kCpu, kCuda, kNpu, kRbln, kFuriosa, kSim };

struct DeviceRequest {
  DeviceKind kind = DeviceKind::kAuto;
  size_t index = 0;
  bool explicit_index = false;
};

/// Throws rm::Error(RM_INVALID_ARGUMENT) naming the accepted values.
DeviceRequest parse_device(std::string_view text);

/// "auto", "cpu", "cuda", "npu", "rbln", "furiosa", "sim": also the plugin's name for a real
/// device.
std::string_view kind_name(DeviceKind kind);

/// The accepted forms, as messages and help print them.
std::string_view accepted_devices();

}  // namespace rm::control
