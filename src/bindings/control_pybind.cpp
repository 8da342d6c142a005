// _core.control: device strings, the routing decision and the table of reason codes for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "backend/registry.hpp"
#include "bindings/bind.hpp"
#include "control/device.hpp"
#include "control/device_flow.hpp"
#include "control/fallback.hpp"
#include "control/reasons.hpp"

namespace py = pybind11;

namespace rm::bindings {
namespace {

py::dict note_dict(const control::Note& note) {
  const control::Reason* reason = control::find_reason(note.code);
  py::dict out;
  out["code"] = note.code;
  out["message"] = note.message;
  out["remedy"] = reason == nullptr ? std::string() : std::string(reason->remedy);
  return out;
}

const char* action_name(control::FallbackPolicy::Action action) {
  switch (action) {
    case control::FallbackPolicy::Action::kWarn:
      return "warn";
    case control::FallbackPolicy::Action::kAllow:
      return "allow";
    case control::FallbackPolicy::Action::kError:
      break;
  }
  return "error";
}

py::dict resolution_dict(const control::Resolution& resolution) {
  py::list notes;
  for (const control::Note& note : resolution.notes) notes.append(note_dict(note));
  py::dict out;
  out["device"] = resolution.device;
  out["backend"] = resolution.backend;
  out["index"] = resolution.index;
  out["fell_back"] = resolution.fell_back;
  out["action"] = action_name(resolution.action);
  out["notes"] = notes;
  return out;
}

control::DeviceFlowController controller(bool sim_npu, const std::string& root) {
  const py::gil_scoped_release release;  // opens the backends' devices
  return control::DeviceFlowController(control::survey(backend::registry(), root, sim_npu));
}

py::list usable_devices(bool sim_npu, const std::string& root) {
  py::list out;
  for (const control::Resolution& one : controller(sim_npu, root).usable()) {
    out.append(resolution_dict(one));
  }
  return out;
}

py::list hardware_list(const std::string& root) {
  py::list out;
  for (const control::VendorHardware& hardware : control::detect_hardware(root)) {
    py::dict row;
    row["kind"] = std::string(control::kind_name(hardware.kind));
    row["vendor"] = hardware.vendor;
    row["packages"] = hardware.packages;
    row["looked_for"] = hardware.looked_for;
    row["nodes"] = hardware.nodes;
    row["unreadable"] = hardware.unreadable;
    row["pci_functions"] = hardware.pci_functions;
    out.append(row);
  }
  return out;
}

py::list reason_list() {
  py::list out;
  for (const control::Reason& reason : control::reasons()) {
    py::dict row;
    row["code"] = std::string(reason.code);
    row["text"] = std::string(reason.text);
    row["remedy"] = std::string(reason.remedy);
    row["category"] = std::string(reason.category);
    row["anchor"] = std::string(reason.anchor);
    out.append(row);
  }
  return out;
}

}  // namespace

void bind_control(py::module_& m) {
  py::module_ sub = m.def_submodule("control", "Devices, the routing decision, reason codes.");
  sub.def(
      "parse_device",
      [](const std::string& text) {
        const control::DeviceRequest request = control::parse_device(text);
        py::dict out;
        out["kind"] = std::string(request.name());
        out["plugin"] = request.kind == control::DeviceKind::kPlugin;
        out["index"] = request.index;
        out["explicit_index"] = request.explicit_index;
        return out;
      },
      py::arg("text"), "'gpu:1' -> {'kind': 'cuda', 'plugin': False, 'index': 1, 'explicit_index': True}; 'plugin' "
      "tells that the kind is a name only a plugin can have.");
  sub.def(
      "require_known",
      [](const std::string& device) {
        controller(false, "/").require_known(control::parse_device(device));
      },
      py::arg("device"), "Raises for the name of a plugin that was not found.");
  sub.def(
      "resolve_device",
      [](const std::string& device, const std::string& fallback, bool sim_npu,
         const std::string& root) {
        const control::DeviceRequest request = control::parse_device(device);
        const auto policy = control::FallbackPolicy::parse(fallback);
        return resolution_dict(controller(sim_npu, root).resolve(request, policy));
      },
      py::arg("device"), py::arg("fallback") = "warn", py::arg("sim_npu") = false,
      py::arg("root") = "/",
      "The device to use: device, backend, index, fell_back, action, notes (code, message, "
      "remedy). "
      "Raises with a reason code where the policy or an index says so.");
  sub.def("usable_devices", &usable_devices, py::arg("sim_npu") = false, py::arg("root") = "/",
          "What device='auto' chooses from, best first.");
  sub.def(
      "why_not",
      [](const std::string& device, bool sim_npu, const std::string& root) {
        py::list out;
        const control::DeviceRequest request = control::parse_device(device);
        for (const control::Note& note : controller(sim_npu, root).why_not(request)) {
          out.append(note_dict(note));
        }
        return out;
      },
      py::arg("device"), py::arg("sim_npu") = false, py::arg("root") = "/",
      "Why a kind of device cannot be used here; empty when it can.");
  sub.def("hardware", &hardware_list, py::arg("root") = "/",
          "Accelerators seen without vendor software, one row a vendor.");
  sub.def("reasons", &reason_list, "The table of reason codes.");
}

}  // namespace rm::bindings
