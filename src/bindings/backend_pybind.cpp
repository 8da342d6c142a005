// _core.backend: the process's plugins for Python.  Paths come from Python (the package's folder,
// entry points, RM_BACKEND_PATH); what fails to load is listed with its reason, like the rest.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <filesystem>

#include "backend/registry.hpp"
#include "backend/status.hpp"
#include "base/error.hpp"
#include "bindings/bind.hpp"

namespace py = pybind11;

namespace rm::bindings {
namespace {

py::dict device_dict(const rm_device_info& info, size_t index) {
  py::dict properties;
  for (size_t i = 0; i < info.properties.size; ++i) {
    const rm_option& option = info.properties.data[i];
    properties[py::str(std::string(backend::view(option.key)))] =
        std::string(backend::view(option.value));
  }
  py::dict out;
  out["index"] = index;
  out["name"] = std::string(backend::view(info.name));
  out["arch"] = std::string(backend::view(info.arch));
  out["memory_bytes"] = info.memory_bytes;
  out["caps"] = info.caps;
  out["dl_device"] = py::make_tuple(info.dl_device_type, info.dl_device_id);
  out["properties"] = properties;
  return out;
}

py::dict backend_dict(backend::Backend& backend) {
  std::string why_not;
  std::vector<const rm_device_info*> infos;
  bool available = false;
  {
    const py::gil_scoped_release release;  // a vendor's runtime may take its time
    available = backend.is_available(&why_not);
    try {
      for (size_t i = 0; available && i < backend.device_count(); ++i) {
        infos.push_back(&backend.get_device_info(i));
      }
    } catch (const Error& error) {
      available = false;
      why_not = error.what();
    }
  }
  py::list devices;
  for (size_t i = 0; i < infos.size(); ++i) devices.append(device_dict(*infos[i], i));
  py::dict out;
  out["name"] = backend.name();
  out["path"] = backend.path();
  out["version"] = backend.version();
  out["build_id"] = backend.build_id();
  out["score"] = backend.probe_score();
  out["available"] = available;
  out["code"] = "";
  out["reason"] = why_not;
  out["devices"] = devices;
  return out;
}

/// A plugin that could not be loaded, in the shape of one that could.
py::dict failure_dict(const backend::LoadFailure& failure) {
  std::string name = std::filesystem::path(failure.path).stem().string();
  if (name.starts_with("rm_backend_")) name = name.substr(11);
  py::dict out;
  out["name"] = name;
  out["path"] = failure.path;
  out["version"] = "";
  out["build_id"] = "";
  out["score"] = 0;
  out["available"] = false;
  out["code"] = failure.reason;
  out["reason"] = failure.message;
  out["devices"] = py::list();
  return out;
}

py::list backend_list() {
  py::list out;
  for (backend::Backend* backend : backend::registry().backends()) {
    out.append(backend_dict(*backend));
  }
  for (const backend::LoadFailure& failure : backend::registry().failures()) {
    out.append(failure_dict(failure));
  }
  return out;
}

py::bytes fingerprint(const std::string& name, size_t device) {
  backend::Backend* backend = backend::registry().find(name);
  if (backend == nullptr) {
    throw Error(RM_NOT_FOUND, "[backend] expected a loaded plugin, got '" + name + "'");
  }
  std::string out;
  {
    const py::gil_scoped_release release;
    out = backend->fingerprint(device);
  }
  return out;
}

}  // namespace

void bind_backend(py::module_& m) {
  py::module_ sub = m.def_submodule("backend", "Plugins: what is loaded, what is not, and why.");
  sub.def(
      "load_plugin",
      [](const std::string& path, const backend::Options& options) {
        return backend_dict(backend::registry().load(path, options));
      },
      py::arg("path"), py::arg("options") = backend::Options(),
      "Load one plugin from an absolute path; a file that is loaded already is not loaded again. "
      "`options` are (key, value) pairs for its initialize(). Raises with a reason code.");
  sub.def(
      "load_folder", [](const std::string& folder) { backend::registry().load_folder(folder); },
      py::arg("folder"), "Load every rm_backend_*.so of an absolute folder; failures are listed.");
  sub.def(
      "load_search_path",
      [](const std::string& path) { backend::registry().load_search_path(path); },
      py::arg("search_path"),
      "Load the files and folders of RM_BACKEND_PATH; failures are listed.");
  sub.def(
      "fingerprint",
      [](const std::string& name) {
        backend::Backend* backend = backend::registry().find(name);
        if (backend == nullptr)
          throw_invalid("[backend] expected a loaded backend, got '" + name + "'");
        return py::bytes(backend->fingerprint(0));
      },
      py::arg("name"),
      "What besides the program shapes results on this machine: binaries, ISA, libraries (bytes).");
  sub.def(
      "backends", &backend_list,
      "One dict a plugin, loaded or not: name, path, version, build_id, score, available, code, "
      "reason, devices.");
  sub.def("fingerprint", &fingerprint, py::arg("name"), py::arg("device") = 0,
          "Everything besides the program that changes an artefact of the device: for cache keys.");
}

}  // namespace rm::bindings
