// _core.backend: the process's plugins for Python.  Paths come from Python (the package's folder,
// entry points, RM_BACKEND_PATH); what fails to load is listed with its reason, like the rest.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "backend/registry.hpp"
#include "backend/status.hpp"
#include "base/error.hpp"
#include "bindings/bind.hpp"
#include "exchange/core_error.hpp"
#include "bindings/python_plugin.hpp"

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
  size_t kernels = 0;  // without any, the backend compiles whole programs
  {
    const py::gil_scoped_release release;  // a vendor's runtime may take its time
    available = backend.is_available(&why_not);
    try {
      for (size_t i = 0; available && i < backend.device_count(); ++i) {
        infos.push_back(&backend.get_device_info(i));
      }
      if (available) kernels = backend.kernels().size();
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
  out["reason"] = exchange::readable(why_not);
  out["devices"] = devices;
  out["kernels"] = kernels;
  return out;
}

/// A plugin that could not be loaded, in the shape of one that could.
py::dict failure_dict(const backend::LoadFailure& failure) {
  const std::string name = failure.plugin_name();
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
  out["kernels"] = size_t{0};
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

std::vector<std::string> refresh_devices() {
  std::vector<std::string> changed;
  for (backend::Backend* backend : backend::registry().backends()) {
    try {
      if (backend->refresh_devices()) changed.push_back(backend->name());
    } catch (const Error&) {
      // What it knew stays; is_available() tells what is wrong.
    }
  }
  return changed;
}

backend::Backend& loaded(const std::string& name) {
  backend::Backend* backend = backend::registry().find(name);
  if (backend == nullptr) {
    throw Error(RM_NOT_FOUND, "[backend] expected a loaded plugin, got '" + name + "'");
  }
  return *backend;
}

py::bytes fingerprint(const std::string& name, size_t device) {
  backend::Backend& backend = loaded(name);
  std::string out;
  {
    const py::gil_scoped_release release;
    out = backend.fingerprint(device);
  }
  return out;
}

py::list query_support(const std::string& name, size_t device, const std::string& program,
                       size_t nodes) {
  backend::Backend& backend = loaded(name);
  const rm_program raw{sizeof(rm_program), backend::to_rm_str("rm.ir/1"),
                       {program.data(), program.size()}};
  std::vector<backend::NodeSupport> rows;
  {
    const py::gil_scoped_release release;
    rows = backend.query_support(device, raw, nodes);
  }
  py::list out;
  for (const auto& row : rows) out.append(py::make_tuple(row.verdict != RM_NODE_NO, row.reason));
  return out;
}

std::string check_compat(const std::string& name, size_t device, const py::buffer& artefact) {
  const py::buffer_info info = artefact.request();
  const std::string_view bytes(static_cast<const char*>(info.ptr),
                               static_cast<size_t>(info.size * info.itemsize));
  switch (loaded(name).check_compat(device, bytes)) {
    case RM_COMPAT_OPTIMAL:
      return "optimal";
    case RM_COMPAT_RECOMPILE_BETTER:
      return "recompile_better";
    case RM_COMPAT_NO:
      break;
  }
  return "no";
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
      "add_python_plugin",
      [](const py::object& hooks) {
        return backend_dict(backend::registry().add(make_python_backend(hooks)));
      },
      py::arg("hooks"), "Registers a plugin in Python (rm_abstract.worker.python_plugins).");
  sub.def(
      "add_failure",
      [](const std::string& name, const std::string& path, const std::string& reason,
         const std::string& message) {
        backend::registry().add_failure({path, reason, message, name});
      },
      py::arg("name"), py::arg("path"), py::arg("reason"), py::arg("message"),
      "Lists a plugin that Python could not load.");
  sub.def(
      "load_folder", [](const std::string& folder) { backend::registry().load_folder(folder); },
      py::arg("folder"), "Load every rm_backend_*.so of an absolute folder; failures are listed.");
  sub.def(
      "load_search_path",
      [](const std::string& path) { backend::registry().load_search_path(path); },
      py::arg("search_path"),
      "Load the files and folders of RM_BACKEND_PATH; failures are listed.");
  sub.def(
      "backends", &backend_list,
      "One dict a plugin, loaded or not: name, path, version, build_id, score, available, code, "
      "reason, devices.");
  sub.def(
      "refresh_devices", &refresh_devices,
      "Has every plugin look for its devices again; names of those whose devices changed.");
  sub.def("fingerprint", &fingerprint, py::arg("name"), py::arg("device") = 0,
          "Everything besides the program that changes an artefact of the device: for cache keys.");
  sub.def("query_support", &query_support, py::arg("name"), py::arg("device"), py::arg("program"),
          py::arg("nodes"), "[(supported, why not)] for each node of a program in rm.ir/1.");
  sub.def("check_compat", &check_compat, py::arg("name"), py::arg("device"), py::arg("artefact"),
          "optimal, recompile_better or no.");
}

}  // namespace rm::bindings
