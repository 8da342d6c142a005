// DeviceFlowController: from what the user asked for to the device that is used, with a reason for
// every device that was passed over.  Pure: what it decides on is handed in (survey() collects it).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "backend/registry.hpp"
#include "control/device.hpp"
#include "control/fallback.hpp"
#include "control/hardware.hpp"

namespace rm::control {

/// A backend as routing sees it.
struct BackendStatus {
  std::string name;  ///< "cpu", "cuda", "rbln", ...
  int score = 0;     ///< 0: cannot run here
  size_t devices = 0;
  std::string why_not;  ///< when devices is 0
};

struct Note {
  std::string code;     ///< "RM402"
  std::string message;  ///< "[device] expected ..., got ...; try ..."
};

struct Resolution {
  std::string device;   ///< "cpu", "cuda:0", "rbln:1": parse_device() reads it back
  std::string backend;  ///< name in the registry
  size_t index = 0;     ///< of the backend's devices
  bool fell_back = false;
  FallbackPolicy::Action action = FallbackPolicy::Action::kWarn;  ///< how to report `notes`
  std::vector<Note> notes;  ///< why better or asked-for devices are not used
};

struct Machine {
  std::vector<BackendStatus> backends;
  std::vector<backend::LoadFailure> failures;
  std::vector<VendorHardware> hardware;
  bool sim_is_npu = false;  ///< RM_SIM_NPU: the simulated NPU comes last in npu:N
};

class DeviceFlowController {
 public:
  explicit DeviceFlowController(Machine machine) : machine_(std::move(machine)) {}

  /// Throws rm::Error with the reason code when the device cannot be used and the policy says so,
  /// when an index is beyond a vendor's devices, or when nothing at all can run; and
  /// RM_INVALID_ARGUMENT under every policy for a name that no plugin has.
  Resolution resolve(const DeviceRequest& request, const FallbackPolicy& policy) const;

  /// Every device `auto` chooses from, best first.
  std::vector<Resolution> usable() const;

  /// Why a kind of device cannot be used here; empty when it can.
  std::vector<Note> why_not(const DeviceRequest& request) const;

  /// Throws RM_INVALID_ARGUMENT for the name of a plugin that is neither loaded nor failed to load.
  void require_known(const DeviceRequest& request) const;

 private:
  const BackendStatus* backend_of(const DeviceRequest& request) const;
  const backend::LoadFailure* failure_of(const DeviceRequest& request) const;
  const VendorHardware* hardware_of(DeviceKind kind) const;
  std::vector<Resolution> candidates(const DeviceRequest& request) const;

  Machine machine_;
};

/// The machine as it is: probes and opens the registered device backends.
Machine survey(const backend::Registry& registry, const std::filesystem::path& root,
               bool sim_is_npu);

}  // namespace rm::control
