// The user's side of a plugin in Python: cheap questions only; the SDK is in the worker.
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.hpp"
#include "bindings/python_plugin.hpp"

namespace rm::bindings {
namespace {

namespace py = pybind11;

struct DeviceRow {
  std::string name, arch;
  std::vector<std::pair<std::string, std::string>> properties;
  std::vector<rm_option> options;  // views into `properties`
  rm_device_info info{};

  bool operator==(const DeviceRow& other) const {
    return name == other.name && arch == other.arch && properties == other.properties &&
           info.memory_bytes == other.info.memory_bytes;
  }
};

rm_str view(const std::string& text) { return {text.data(), text.size()}; }

std::unique_ptr<DeviceRow> row_of(const py::handle& device, size_t index) {
  auto row = std::make_unique<DeviceRow>();
  row->name = device.attr("name").cast<std::string>();
  row->arch = device.attr("arch").cast<std::string>();
  for (auto& [key, value] :
       device.attr("properties").cast<std::map<std::string, std::string>>()) {
    row->properties.emplace_back(key, value);
  }
  for (const auto& [key, value] : row->properties) row->options.push_back({view(key), view(value)});
  rm_device_info& info = row->info;
  info.struct_size = sizeof info;
  info.caps = RM_CAP_SERIALIZE | RM_CAP_HOST_POINTERS;
  info.dl_device_type = kDLExtDev;
  info.dl_device_id = static_cast<int32_t>(index);
  info.memory_bytes = device.attr("memory_bytes").cast<uint64_t>();
  info.alignment = 64;
  info.name = view(row->name);
  info.arch = view(row->arch);
  info.properties = {row->options.data(), row->options.size()};
  return row;
}

/// Runs `body` with the GIL; what Python raises becomes rm::Error.
template <class Body>
auto in_python(Body&& body) {
  const py::gil_scoped_acquire locked;
  try {
    return body();
  } catch (const py::error_already_set& raised) {
    if (raised.matches(PyExc_KeyboardInterrupt)) throw;  // Ctrl-C is nobody's failure
    throw error_of(raised);
  } catch (const py::cast_error& error) {
    throw Error(RM_INTERNAL, std::string("[plugin] expected another type: ") + error.what());
  }
}

std::string text_of(const py::object& hooks, const char* name) {
  return hooks.attr(name).cast<std::string>();
}

class PythonBackend final : public Backend {
 public:
  explicit PythonBackend(py::object hooks)
      : hooks_(std::move(hooks)),
        name_(text_of(hooks_, "name")),
        version_(text_of(hooks_, "version")),
        build_id_(text_of(hooks_, "build_id")),
        path_(text_of(hooks_, "path")) {}
  // Like every registered backend it lives until the process ends, when there is no GIL to take.
  ~PythonBackend() override { (void)hooks_.release(); }

  const std::string& name() const override { return name_; }
  const std::string& version() const override { return version_; }
  const std::string& build_id() const override { return build_id_; }
  const std::string& path() const override { return path_; }

  int probe_score() const override {
    try {
      return in_python([&] { return hooks_.attr("score")().cast<int>(); });
    } catch (const Error&) {
      return 0;  // is_available() tells why
    }
  }

  bool is_available(std::string* why_not) override {
    std::string why;
    try {
      const int score = in_python([&] { return hooks_.attr("score")().cast<int>(); });
      if (score <= 0) why = "its probe says it cannot run here";
      if (why.empty() && device_count() == 0) why = "it found no device";
    } catch (const Error& error) {
      why = error.what();
    }
    if (why_not != nullptr) *why_not = why;
    return why.empty();
  }

  size_t device_count() override { return rows().size(); }

  bool refresh_devices() override {
    return in_python([&] {
      auto found = find_rows();
      const bool same = std::equal(found.begin(), found.end(), rows_.begin(), rows_.end(),
                                   [](const auto& a, const auto& b) { return *a == *b; });
      if (same) return false;
      // Whoever holds a device's info goes on reading it: a row that is gone is kept.
      for (auto& row : rows_) gone_.push_back(std::move(row));
      rows_ = std::move(found);
      known_ = !rows_.empty();
      return true;
    });
  }

  const rm_device_info& get_device_info(size_t device) override {
    const auto& all = rows();
    if (device >= all.size()) {
      throw Error(RM_NOT_FOUND, "[" + name_ + "] expected a device below " +
                                    std::to_string(all.size()) + ", got " +
                                    std::to_string(device));
    }
    return all[device]->info;
  }

  std::string fingerprint(size_t device) override {
    return in_python(
        [&] { return std::string(hooks_.attr("fingerprint")(device).cast<py::bytes>()); });
  }

  backend::KernelRows kernels() override { return {}; }

  std::vector<backend::NodeSupport> query_support(size_t device, const rm_program& program,
                                                  size_t nodes) override {
    return in_python([&] {
      const py::str text(static_cast<const char*>(program.code.data), program.code.size);
      const auto rows = hooks_.attr("query_support")(device, text, nodes)
                            .cast<std::vector<std::pair<bool, std::string>>>();
      if (rows.size() != nodes) {
        throw Error(RM_INTERNAL, "[" + name_ + "] expected " + std::to_string(nodes) +
                                     " verdicts, got " + std::to_string(rows.size()));
      }
      std::vector<backend::NodeSupport> out;
      for (const auto& [yes, why] : rows) {
        out.push_back({yes ? RM_NODE_YES : RM_NODE_NO, 0, -1, why});
      }
      return out;
    });
  }

  rm_compat check_compat(size_t device, std::string_view artefact) override {
    return in_python([&] {
      const auto bytes =
          py::memoryview::from_memory(artefact.data(), static_cast<ssize_t>(artefact.size()));
      return hooks_.attr("fits")(device, bytes).cast<bool>() ? RM_COMPAT_OPTIMAL : RM_COMPAT_NO;
    });
  }

  std::unique_ptr<backend::Executable> prepare_model(size_t, const rm_program&,
                                                     const backend::CompileOptions&) override {
    only_in_a_worker();
  }
  std::string serialize(const backend::Executable&) override { only_in_a_worker(); }
  std::unique_ptr<backend::Executable> deserialize(size_t, std::string_view,
                                                   std::span<const rm_constant>) override {
    only_in_a_worker();
  }
  void execute(const backend::Executable&, const rm_execute_args&) override { only_in_a_worker(); }
  backend::Buffer allocate(size_t, uint32_t, size_t, size_t) override { only_in_a_worker(); }
  void copy(rm_stream*, const rm_tensor&, rm_tensor&) override { only_in_a_worker(); }
  backend::Stream create_stream(size_t, uint32_t) override { only_in_a_worker(); }
  backend::Stream wrap_stream(size_t, void*) override { only_in_a_worker(); }
  backend::Event create_event(size_t) override { only_in_a_worker(); }

 private:
  [[noreturn]] void only_in_a_worker() const {
    throw Error(RM_UNIMPLEMENTED, "[" + name_ + "] expected to compile and run in a worker, got "
                                                "the user's process");
  }

  using DeviceRows = std::vector<std::unique_ptr<DeviceRow>>;
  DeviceRows find_rows() {
    DeviceRows found;
    for (const py::handle device : hooks_.attr("devices")()) {
      found.push_back(row_of(device, found.size()));
    }
    return found;
  }

  /// Found once, and by refresh_devices(). No lock: the GIL guards rows_ and gone_.
  const DeviceRows& rows() {
    return *in_python([&]() -> const DeviceRows* {
      if (!known_) {
        DeviceRows found = find_rows();
        if (!known_) rows_ = std::move(found);
        known_ = !rows_.empty();  // none may become some: nodes appear when a driver is loaded
      }
      return &rows_;
    });
  }

  py::object hooks_;
  const std::string name_, version_, build_id_, path_;
  DeviceRows rows_;
  DeviceRows gone_;  // of a few bytes each: devices that were there once
  bool known_ = false;
};

}  // namespace

Error error_of(const py::error_already_set& raised) {
  const py::object& value = raised.value();
  const auto type = std::string(py::str(raised.type().attr("__name__")));
  const auto text = std::string(py::str(value));
  if (py::hasattr(value, "rm_code")) {
    return Error(static_cast<rm_code>(value.attr("rm_code").cast<int>()), text,
                 value.attr("code").cast<std::string>());
  }
  if (py::hasattr(value, "code") && py::isinstance<py::str>(value.attr("code"))) {
    return Error(RM_UNAVAILABLE, text, value.attr("code").cast<std::string>());  // errors.py
  }
  return Error(RM_INTERNAL, type + ": " + text);
}

std::unique_ptr<Backend> make_python_backend(py::object hooks) {
  return std::make_unique<PythonBackend>(std::move(hooks));
}

}  // namespace rm::bindings
