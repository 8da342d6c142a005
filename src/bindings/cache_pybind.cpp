// _core.cache: the compile cache for Python. The interpreter's lock is released around everything
// that reads, writes, waits or compiles, and taken only for the callbacks.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/error.hpp"
#include "bindings/bind.hpp"
#include "bindings/shared_bytes.hpp"
#include "cache/compile_cache.hpp"
#include "cache/identity.hpp"

namespace py = pybind11;

namespace rm::bindings {
namespace {

using cache::ArtefactKind;
using cache::CompileCache;
using cache::Entry;
using cache::EntryPtr;
using cache::Key;
using cache::KeyBuilder;
using Unlocked = py::call_guard<py::gil_scoped_release>;

/// A Python object that C++ threads may copy and drop without holding the interpreter's lock.
using SharedObject = std::shared_ptr<py::object>;

SharedObject share(py::object value) {
  return {new py::object(std::move(value)), [](py::object* object) {
            const py::gil_scoped_acquire lock;
            delete object;
          }};
}

/// A Python exception on its way through C++ threads. Unlike error_already_set it may be thrown in
/// every thread that waited for the same compile.
struct PythonFailure : std::exception {
  explicit PythonFailure(SharedObject error) : value(std::move(error)) {}
  const char* what() const noexcept override { return "a Python exception"; }
  SharedObject value;
};

/// Runs Python code under the lock; what it raises becomes a PythonFailure.
template <typename Call>
auto in_python(Call call) {
  const py::gil_scoped_acquire lock;
  try {
    return call();
  } catch (py::error_already_set& error) {
    throw PythonFailure(share(error.value()));
  }
}

/// Runs C++ code without the lock; a PythonFailure becomes the exception it carries.
template <typename Call>
auto without_lock(Call call) {
  try {
    const py::gil_scoped_release unlocked;
    return call();
  } catch (const PythonFailure& failure) {
    PyErr_SetObject(py::type::handle_of(*failure.value).ptr(), failure.value->ptr());
    throw py::error_already_set();
  }
}

ByteSpan span_of(const py::buffer_info& info) {
  // Views with gaps would be hashed with them: Python copies those first (bytes(view)).
  ssize_t expected = info.itemsize;
  for (ssize_t axis = info.ndim; axis-- > 0; expected *= info.shape[axis]) {
    if (info.shape[axis] > 1 && info.strides[axis] != expected) {
      throw_invalid("[cache] expected contiguous bytes, got a strided view; try bytes(view)");
    }
  }
  return {static_cast<const std::byte*>(info.ptr), static_cast<size_t>(info.size * info.itemsize)};
}

std::string bytes_of(const py::handle& value) {
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  const py::buffer_info info = py::cast<py::buffer>(value).request();
  const ByteSpan span = span_of(info);
  return {reinterpret_cast<const char*>(span.data()), span.size()};
}

py::bytes to_bytes(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.bytes.data()), Digest::kBytes};
}

ArtefactKind kind_of(const std::string& name) {
  if (const auto kind = cache::kind_from_name(name)) return *kind;
  throw_invalid(
      "[cache] expected program, vendor, verdict, front or file digest as kind, got '" + name +
      "'");
}

KeyBuilder& set_field(KeyBuilder& builder, const std::string& field, const py::object& value) {
  if (!py::isinstance<py::dict>(value)) {
    return builder.set(cache::field_from_name(field), bytes_of(value));
  }
  std::map<std::string, std::string> values;
  for (const auto& [name, item] : value.cast<py::dict>()) {
    values[name.cast<std::string>()] = bytes_of(item);
  }
  return builder.set(cache::field_from_name(field), values);
}

py::dict field_dict(const std::vector<cache::FieldDigest>& fields) {
  py::dict out;
  for (const auto& field : fields) out[py::str(field.field)] = field.digest.hex();
  return out;
}

/// {section: bytes}, or {"sections": {...}, "guards": ..., "producer": ..., "compat": ...}.
cache::Artefact artefact_of(const py::dict& value) {
  cache::Artefact out;
  py::dict sections = value;
  if (value.contains("sections")) {
    sections = value["sections"].cast<py::dict>();
    const auto text = [&](const char* name) {
      return value.contains(name) ? value[name].cast<std::string>() : std::string();
    };
    out.guards = text("guards");
    out.producer = text("producer");
    out.compat = text("compat");
  }
  for (const auto& [name, bytes] : sections) {
    if (const SharedBytes* shared = shared_bytes_of(bytes)) {
      out.sections.push_back({name.cast<std::string>(), {}, shared->owner, shared->bytes,
                              shared->offset == 0 ? shared->file : nullptr});
      continue;
    }
    out.sections.push_back({name.cast<std::string>(), bytes_of(bytes)});
  }
  return out;
}

/// What a Python check returns: True, False, or the name of a verdict.
cache::Verdict verdict_of(const py::object& answer) {
  if (py::isinstance<py::bool_>(answer)) {
    return answer.cast<bool>() ? cache::Verdict::kAccept : cache::Verdict::kGuardMiss;
  }
  const auto name = answer.cast<std::string>();
  if (name == "accept") return cache::Verdict::kAccept;
  if (name == "guard_miss") return cache::Verdict::kGuardMiss;
  if (name == "incompatible") return cache::Verdict::kIncompatible;
  if (name == "corrupt") throw Error(RM_DATA_LOSS, "[cache] the check found it corrupt");
  throw py::value_error("expected accept, guard_miss, incompatible or corrupt, got " + name);
}

cache::CheckFn check_of(const py::object& check) {
  if (check.is_none()) return {};
  return [held = share(check)](const Entry& entry) {
    return in_python([&] {
      return verdict_of(
          (*held)(py::cast(std::const_pointer_cast<Entry>(entry.shared_from_this()))));
    });
  };
}

py::dict info_dict(const cache::EntryInfo& info) {
  py::dict out;
  out["name"] = info.object.name;
  out["path"] = info.object.path;
  out["key"] = info.header.key.hex();
  out["guard_digest"] = info.header.guard_digest == Digest{} ? "" : info.header.guard_digest.hex();
  out["kind"] = cache::kind_name(info.header.kind);
  out["size"] = info.object.size;
  out["used"] = info.object.used_s;
  out["created"] = info.metadata.created_s;
  out["compile_ms"] = info.metadata.compile_ms;
  out["producer"] = info.metadata.producer;
  out["guards"] = info.metadata.guards;
  out["compat"] = info.metadata.compat;
  out["authenticated"] = info.header.has_code;
  out["fields"] = field_dict(info.metadata.fields);
  return out;
}

py::dict collect(CompileCache& cache, std::optional<uint64_t> max_size,
                 std::optional<int64_t> max_age, int64_t min_age, bool dry_run) {
  cache::GcLimits limits = cache.default_limits();
  if (max_size) limits.max_bytes = *max_size;
  if (max_age) limits.max_age_s = *max_age;
  limits.min_age_s = min_age;
  limits.dry_run = dry_run;
  const cache::GcReport report = without_lock([&] { return cache.collect(limits); });
  py::dict out;
  out["before"] = report.before_bytes;
  out["after"] = report.after_bytes;
  out["entries"] = report.entries;
  out["evicted"] = report.evicted;
  out["temporary_files"] = report.temporary_files;
  out["busy"] = report.busy;
  out["removed"] = report.removed;
  return out;
}


py::memoryview section_view(const EntryPtr& entry, const std::string& name) {
  const cache::Section* section = entry->section(name);
  if (section == nullptr) throw py::key_error(name);
  return py::memoryview(
      py::cast(SharedBytes{entry, section->bytes, section->file, section->offset}));
}

py::list section_names(const Entry& entry) {
  py::list out;
  for (const auto& section : entry.sections) out.append(section.name);
  return out;
}

std::string mode_name(cache::Mode mode) {
  constexpr const char* kNames[] = {"off", "read", "readwrite", "refresh", "check"};
  return kNames[static_cast<size_t>(mode)];
}

/// Caches whose counters are written when the interpreter exits: it does not destroy every object,
/// so their destructors cannot be relied on. Touched only under the interpreter's lock.
class OpenCaches {
 public:
  void add(const std::shared_ptr<CompileCache>& cache) {
    std::erase_if(caches_, [](const auto& held) { return held.expired(); });
    caches_.push_back(cache);
  }
  void flush() const {
    for (const auto& held : caches_) {
      if (const auto cache = held.lock()) cache->flush_counters();
    }
  }

 private:
  std::vector<std::weak_ptr<CompileCache>> caches_;
};

std::shared_ptr<CompileCache> open_cache(OpenCaches& open,
                                         const std::map<std::string, std::string>& options) {
  const Options resolved = Options::resolve({options.begin(), options.end()});
  std::shared_ptr<CompileCache> cache;
  {
    const py::gil_scoped_release unlocked;
    cache = std::make_shared<CompileCache>(cache::settings_from(resolved));
  }
  open.add(cache);
  return cache;
}

void bind_key(py::module_& m) {
  py::class_<Key>(m, "Key", "One digest over all fields, and a digest a field for explain.")
      .def_property_readonly("hex", [](const Key& key) { return key.digest.hex(); })
      .def_property_readonly("digest", [](const Key& key) { return to_bytes(key.digest); })
      .def_property_readonly("kind", [](const Key& key) { return cache::kind_name(key.kind); })
      .def_property_readonly("fields", [](const Key& key) { return field_dict(key.fields); })
      .def_readonly("bypass", &Key::bypass);
  py::class_<KeyBuilder>(m, "KeyBuilder", "Framed fields in a fixed order.")
      .def(py::init([](const std::string& kind) { return KeyBuilder(kind_of(kind)); }),
           py::arg("kind"))
      .def("set", &set_field, py::arg("field"), py::arg("value"),
           py::return_value_policy::reference_internal,
           "Text, bytes, or a dict of them whose order does not matter.")
      .def("bypass", &KeyBuilder::bypass, py::arg("reason"),
           py::return_value_policy::reference_internal)
      .def("finish", &KeyBuilder::finish);
}

void bind_entry(py::module_& m) {
  py::class_<SharedBytes>(m, "SharedBytes", py::buffer_protocol(),
                          "Immutable bytes of the core, by the buffer protocol.")
      .def_buffer([](SharedBytes& section) {
        return py::buffer_info(const_cast<std::byte*>(section.bytes.data()), 1, "B", 1,
                               {static_cast<ssize_t>(section.bytes.size())}, {ssize_t{1}},
                               /*readonly=*/true);
      })
      .def("__len__", [](const SharedBytes& section) { return section.bytes.size(); });
  py::class_<Entry, std::shared_ptr<Entry>>(m, "Entry", "One immutable entry.")
      .def_property_readonly("key", [](const Entry& entry) { return entry.key.hex(); })
      .def_property_readonly("kind",
                             [](const Entry& entry) { return cache::kind_name(entry.kind); })
      .def_property_readonly("guards", [](const Entry& entry) { return entry.metadata.guards; })
      .def_property_readonly("producer", [](const Entry& entry) { return entry.metadata.producer; })
      .def_property_readonly("compat", [](const Entry& entry) { return entry.metadata.compat; })
      .def_property_readonly("created", [](const Entry& entry) { return entry.metadata.created_s; })
      .def_property_readonly("compile_ms",
                             [](const Entry& entry) { return entry.metadata.compile_ms; })
      .def_property_readonly("fields",
                             [](const Entry& entry) { return field_dict(entry.metadata.fields); })
      .def_readonly("size", &Entry::stored_bytes)
      .def_property_readonly("sections", &section_names)
      .def(
          "section",
          [](const std::shared_ptr<Entry>& entry, const std::string& name) {
            return section_view(entry, name);
          },
          py::arg("name"), "A read-only view of the bytes. Raises KeyError.");
}

using CacheClass = py::class_<CompileCache, std::shared_ptr<CompileCache>>;

void bind_use(CacheClass& type) {
  const auto open = std::make_shared<OpenCaches>();
  py::module_::import("atexit").attr("register")(py::cpp_function([open] { open->flush(); }));
  type.def(py::init([open](const std::map<std::string, std::string>& options) {
             return open_cache(*open, options);
           }),
           py::arg("options") = std::map<std::string, std::string>(),
           "Options by name; those left out come from the environment.")
      .def_property_readonly("directory", &CompileCache::directory)
      .def_property_readonly("disk_problem", &CompileCache::disk_problem)
      .def_property_readonly(
          "mode", [](const CompileCache& cache) { return mode_name(cache.settings().mode); })
      .def(
          "new_key",
          [](const CompileCache& cache, const std::string& kind) {
            return cache.new_key(kind_of(kind));
          },
          py::arg("kind"), "A builder with the salt and the digest of the core library set.")
      .def(
          "lookup",
          [](CompileCache& cache, const Key& key, const py::object& check, bool counted) {
            const cache::CheckFn fn = check_of(check);
            return std::const_pointer_cast<Entry>(
                without_lock([&] { return cache.lookup(key, fn, counted); }));
          },
          py::arg("key"), py::arg("check") = py::none(), py::arg("counted") = true,
          "The entry or None; a miss is in the statistics if `counted`. `check(entry)` returns True or accept, False or guard_miss, "
          "incompatible, corrupt.")
      .def(
          "publish",
          [](CompileCache& cache, const Key& key, const py::dict& artefact, double compile_ms) {
            cache::Artefact owned = artefact_of(artefact);
            return std::const_pointer_cast<Entry>(
                without_lock([&] { return cache.publish(key, std::move(owned), compile_ms); }));
          },
          py::arg("key"), py::arg("artefact"), py::arg("compile_ms") = 0.0)
      .def(
          "get_or_compile",
          [](CompileCache& cache, const Key& key, const py::function& compile,
             const py::object& check) {
            const cache::CheckFn fn = check_of(check);
            const auto run = [&] {
              return in_python([&] { return artefact_of(compile().cast<py::dict>()); });
            };
            const cache::Result result =
                without_lock([&] { return cache.get_or_compile(key, run, fn); });
            return std::make_pair(std::const_pointer_cast<Entry>(result.entry),
                                  std::string(cache::source_name(result.source)));
          },
          py::arg("key"), py::arg("compile"), py::arg("check") = py::none(),
          "(entry, source). `compile()` returns {section: bytes} or a dict with sections, guards, "
          "producer and compat; it runs once however many threads and processes ask.")
      .def(
          "reject",
          [](CompileCache& cache, const Entry& entry, const std::string& why) {
            cache.reject(entry, why);
          },
          py::arg("entry"), py::arg("why"), Unlocked())
      .def(
          "file_digest",
          [](CompileCache& cache, const std::string& path) {
            return to_bytes(without_lock([&] { return cache.file_digest(path); }));
          },
          py::arg("path"));
}

void bind_management(CacheClass& type) {
  type.def("entries",
           [](const CompileCache& cache) {
             py::list out;
             for (const auto& info : without_lock([&] { return cache.entries(); })) {
               out.append(info_dict(info));
             }
             return out;
           })
      .def(
          "verify",
          [](CompileCache& cache, bool remove) {
            const auto report = without_lock([&] { return cache.verify(remove); });
            py::dict out;
            out["sound"] = report.sound;
            out["bad"] = report.bad;
            return out;
          },
          py::arg("remove") = false)
      .def("collect", &collect, py::kw_only(), py::arg("max_size") = py::none(),
           py::arg("max_age") = py::none(), py::arg("min_age") = 60,
           py::arg("dry_run") = false)
      .def("clear", &CompileCache::clear, Unlocked())
      .def(
          "import_entry",
          [](CompileCache& cache, const py::bytes& bytes) {
            const auto view = static_cast<std::string_view>(bytes);
            return without_lock([&] { return cache.import_entry(view); }) == Published::kCreated;
          },
          py::arg("bytes"), "True when it was new. Raises CoreError unless the bytes are sound.")
      .def("counters", &CompileCache::counters, Unlocked())
      .def("total_counters", &CompileCache::total_counters, Unlocked())
      .def("flush_counters", &CompileCache::flush_counters, Unlocked())
      .def("last_miss", &CompileCache::last_miss, Unlocked());
}

}  // namespace

void bind_cache(py::module_& m) {
  py::module_ sub = m.def_submodule("cache", "The compile cache.");
  sub.attr("hash_algorithm") = hash_algorithm();
  sub.def(
      "digest",
      [](const py::buffer& data) {
        const py::buffer_info info = data.request();
        const ByteSpan span = span_of(info);
        return to_bytes(without_lock([&] { return hash_bytes(span); }));
      },
      py::arg("data"), "32 bytes for any contiguous bytes-like object.");
  sub.def(
      "digest_file",
      [](const std::string& path) {
        return to_bytes(without_lock([&] { return hash_file(path); }));
      },
      py::arg("path"));
  sub.def("core_digest", [] { return to_bytes(cache::core_digest()); });
  sub.def("default_directory", &cache::default_directory);
  sub.def("field_names", [] {
    py::list out;
    for (std::string_view name : cache::field_names()) out.append(name);
    return out;
  });
  bind_key(sub);
  bind_entry(sub);
  CacheClass type(sub, "CompileCache", "One compile for many, and never a wrong answer.");
  bind_use(type);
  bind_management(type);
}

}  // namespace rm::bindings
