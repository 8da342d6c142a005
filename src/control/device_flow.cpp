// The routing decision.
#include "control/device_flow.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace rm::control {
namespace {

// Ties in the probe score: a physical NPU before a GPU before the CPU.
constexpr DeviceKind kByPreference[] = {DeviceKind::kRbln, DeviceKind::kFuriosa, DeviceKind::kCuda,
                                        DeviceKind::kCpu};
constexpr DeviceKind kPhysicalNpus[] = {DeviceKind::kRbln, DeviceKind::kFuriosa};

bool is_npu(DeviceKind kind) {
  return std::find(std::begin(kPhysicalNpus), std::end(kPhysicalNpus), kind) !=
         std::end(kPhysicalNpus);
}

DeviceRequest any(DeviceKind kind) { return {kind, 0, false, {}}; }

std::string device_text(const DeviceRequest& request, size_t index) {
  std::string text(request.name());
  return request.kind == DeviceKind::kCpu ? text : text + ":" + std::to_string(index);
}

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

}  // namespace

const BackendStatus* DeviceFlowController::backend_of(const DeviceRequest& request) const {
  for (const BackendStatus& backend : machine_.backends) {
    if (backend.name == request.name()) return &backend;
  }
  return nullptr;
}

const backend::LoadFailure* DeviceFlowController::failure_of(const DeviceRequest& request) const {
  for (const backend::LoadFailure& failure : machine_.failures) {
    if (failure.plugin_name() == request.name()) return &failure;
  }
  return nullptr;
}

void DeviceFlowController::require_known(const DeviceRequest& request) const {
  if (request.kind != DeviceKind::kPlugin || backend_of(request) || failure_of(request)) return;
  std::vector<std::string> names;
  for (const BackendStatus& backend : machine_.backends) names.push_back(backend.name);
  throw_invalid("[device] expected " + std::string(accepted_devices()) + " (there are " +
                join(names) + "), got '" + request.plugin + "'");
}

const VendorHardware* DeviceFlowController::hardware_of(DeviceKind kind) const {
  for (const VendorHardware& hardware : machine_.hardware) {
    if (hardware.kind == kind) return &hardware;
  }
  return nullptr;
}

std::vector<Resolution> DeviceFlowController::candidates(const DeviceRequest& request) const {
  const DeviceKind kind = request.kind;
  std::vector<Resolution> out;
  if (kind == DeviceKind::kNpu) {
    for (const DeviceKind npu : kPhysicalNpus) {
      for (Resolution& one : candidates(any(npu))) out.push_back(std::move(one));
    }
    if (machine_.sim_is_npu) {
      for (Resolution& one : candidates(any(DeviceKind::kSim))) out.push_back(std::move(one));
    }
    return out;
  }
  const BackendStatus* backend = backend_of(request);
  if (backend == nullptr || backend->score <= 0) return out;
  // Some vendors' runtimes report devices on a machine without any: a node must be there.
  const VendorHardware* hardware = hardware_of(kind);
  if (is_npu(kind) && (hardware == nullptr || hardware->nodes.empty())) return out;
  for (size_t i = 0; i < backend->devices; ++i) {
    Resolution one;
    one.device = device_text(request, i);
    one.backend = backend->name;
    one.index = i;
    out.push_back(std::move(one));
  }
  return out;
}

std::vector<Resolution> DeviceFlowController::usable() const {
  std::vector<std::pair<int, DeviceKind>> kinds;
  for (const DeviceKind kind : kByPreference) {
    if (!candidates(any(kind)).empty()) kinds.emplace_back(backend_of(any(kind))->score, kind);
  }
  std::stable_sort(kinds.begin(), kinds.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<Resolution> out;
  for (const auto& [score, kind] : kinds) {
    for (Resolution& one : candidates(any(kind))) out.push_back(std::move(one));
  }
  return out;
}

std::vector<Note> DeviceFlowController::why_not(const DeviceRequest& request) const {
  const DeviceKind kind = request.kind;
  std::vector<Note> notes;
  if (!candidates(request).empty()) return notes;
  if (kind == DeviceKind::kNpu) {
    for (const DeviceKind npu : kPhysicalNpus) {
      for (Note& note : why_not(any(npu))) notes.push_back(std::move(note));
    }
    // Vendors without anything here are worth a word only when nobody has: then one for all.
    std::erase_if(notes, [](const Note& note) { return note.code == "RM402"; });
    if (notes.empty()) {
      std::vector<std::string> looked;
      for (const DeviceKind npu : kPhysicalNpus) {
        if (const VendorHardware* one = hardware_of(npu)) {
          looked.push_back(one->vendor + " (" + one->looked_for + ")");
        }
      }
      notes.push_back({"RM402", "[device npu] expected a device of " + join(looked) +
                                    ", got none of them; try RM_SIM_NPU=1 for a simulated NPU"});
    }
    return notes;
  }
  const std::string name(request.name());
  const VendorHardware* hardware = hardware_of(kind);
  if (hardware != nullptr && hardware->nodes.empty()) {
    const std::string seen = std::to_string(hardware->pci_functions);
    if (!hardware->refused.empty()) {
      notes.push_back({"RM401", "[device " + name + "] expected " + hardware->looked_for +
                                    ", got " + hardware->refused + "; try device='auto'"});
      return notes;
    }
    const std::string wanted =
        "a device of " + std::string(hardware->vendor) + " (" + hardware->looked_for + ")";
    if (hardware->pci_functions > 0) {
      notes.push_back({"RM406", "[device " + name + "] expected " + wanted + ", got " + seen +
                                    " on the PCI bus without a device file; load the " +
                                    hardware->vendor + " driver"});
    } else {
      notes.push_back(
          {"RM402", "[device " + name + "] expected " + wanted + ", got none; try device='auto'"});
      return notes;
    }
  }
  if (hardware != nullptr && !hardware->unreadable.empty()) {
    notes.push_back({"RM404", "[device " + name + "] expected permission to open " +
                                  join(hardware->unreadable) +
                                  ", got none; join the node's group"});
  }
  const BackendStatus* backend = backend_of(request);
  if (backend == nullptr) {
    const std::string file = "rm_backend_" + name + ".so";
    if (const backend::LoadFailure* failure = failure_of(request); failure != nullptr) {
      notes.push_back({failure->reason, failure->message});
    } else {
      const std::string packages =
          hardware == nullptr || hardware->packages.empty() ? "" : " " + hardware->packages;
      notes.push_back({"RM401", "[device " + name + "] expected the plugin " + file +
                                    ", got none; try pip install rm_abstract" + packages +
                                    ", in a build that has this plugin" +
                                    (hardware == nullptr || hardware->packages_from.empty()
                                         ? ""
                                         : "; " + hardware->packages_from)});
    }
  } else if (backend->score <= 0 || backend->devices == 0) {
    const std::string why = backend->why_not.empty() ? "it gave no reason" : backend->why_not;
    notes.push_back({"RM401", "[device " + name + "] expected a usable backend, got: " + why});
  }
  return notes;
}

Resolution DeviceFlowController::resolve(const DeviceRequest& request,
                                         const FallbackPolicy& policy) const {
  std::vector<Note> notes;
  require_known(request);
  if (request.kind != DeviceKind::kAuto) {
    std::vector<Resolution> found = candidates(request);
    if (request.index < found.size()) return found[request.index];
    if (!found.empty()) {
      throw Error(RM_OUT_OF_RANGE,
                  "[device " + device_text(request, request.index) +
                      "] expected an index below " + std::to_string(found.size()) + ", got " +
                      std::to_string(request.index) + "; rm-abstract devices lists them",
                  "RM402");
    }
    notes = why_not(request);
    for (const Note& note : notes) {
      if (policy.action_for(note.code) == FallbackPolicy::Action::kError) {
        throw Error(RM_UNAVAILABLE, note.message, note.code);
      }
    }
  } else {
    // A device that is in the machine and cannot be used is worth a word; one that is not is not.
    for (const DeviceKind kind : kByPreference) {
      const VendorHardware* hardware = hardware_of(kind);
      if (hardware == nullptr || hardware->nodes.size() + hardware->pci_functions == 0) continue;
      // A GPU is used when it is asked for: its plugin is not even loaded for "auto".
      if (kind == DeviceKind::kCuda && backend_of(any(kind)) == nullptr) continue;
      for (Note& note : why_not(any(kind))) notes.push_back(std::move(note));
    }
  }
  std::vector<Resolution> all = usable();
  if (all.empty()) {
    std::string text = "[device] expected at least the cpu backend, got no usable one";
    for (const Note& note : why_not(any(DeviceKind::kCpu))) text += "; " + note.message;
    throw Error(RM_UNAVAILABLE, text + "; reinstall rm_abstract", "RM405");
  }
  Resolution chosen = std::move(all.front());
  chosen.fell_back = request.kind != DeviceKind::kAuto;
  if (!notes.empty()) chosen.action = policy.action_for(notes.front().code);
  chosen.notes = std::move(notes);
  return chosen;
}

Machine survey(const backend::Registry& registry, const std::filesystem::path& root,
               bool sim_is_npu) {
  Machine machine;
  machine.hardware = detect_hardware(root);
  machine.failures = registry.failures();
  machine.sim_is_npu = sim_is_npu;
  for (backend::Backend* backend : registry.backends()) {
    BackendStatus status;
    status.name = backend->name();
    status.score = backend->probe_score();
    if (backend->is_available(&status.why_not)) status.devices = backend->device_count();
    machine.backends.push_back(std::move(status));
  }
  return machine;
}

}  // namespace rm::control
