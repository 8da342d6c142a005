// plugin.hpp -- write a backend as C++ classes; export_backend() fills in the C table for you.
//
// Invariant: no exception crosses the C line.  Every entry runs under guard(), which turns an
// exception into a host-owned status.  Methods you do not override answer RM_UNIMPLEMENTED.
// Meant for plugins built with hidden visibility: host() is one per plugin.
#pragma once

#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>

#include "rm/backend.h"

namespace rm::plugin {

inline const rm_host_api*& host() {
  static const rm_host_api* api = nullptr;
  return api;
}

inline rm_str str(std::string_view s) { return {s.data(), s.size()}; }
inline std::string_view view(rm_str s) { return {s.data, s.size}; }

/// Where a tensor's first element lies.
inline const void* address(const rm_tensor& t) {
  return static_cast<const char*>(t.data) + t.byte_offset;
}

/// A service of the host by name; NULL when this host does not offer it.
inline const void* host_extension(std::string_view name) {
  const rm_host_api* api = host();
  if (!RM_HAS_FIELD(rm_host_api, api, extension) || api->extension == nullptr) return nullptr;
  return api->extension(str(name));
}

/// A failed status made by the host; the host frees it.
inline rm_status* fail(rm_code code, std::string_view message) {
  return host()->status_create(code, str(message), "", 0);
}

class Error : public std::runtime_error {
 public:
  Error(rm_code code, const std::string& message) : std::runtime_error(message), code_(code) {}
  rm_code code() const noexcept { return code_; }

 private:
  rm_code code_;
};

[[noreturn]] inline void unimplemented(const char* what) {
  throw Error(RM_UNIMPLEMENTED, std::string("[plugin] expected an entry this backend has, got ") +
                                    what + "; try another backend or its rm.kernels/1 rows");
}

/// Runs `body` and turns whatever it throws into a status.
template <class Body>
rm_status* guard(Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const Error& e) {
    return fail(e.code(), e.what());
  } catch (const std::bad_alloc&) {
    return fail(RM_RESOURCE_EXHAUSTED, "[plugin] expected free memory, got none");
  } catch (const std::invalid_argument& e) {
    return fail(RM_INVALID_ARGUMENT, e.what());
  } catch (const std::exception& e) {
    return fail(RM_INTERNAL, e.what());
  } catch (...) {
    return fail(RM_UNKNOWN, "[plugin] expected std::exception, got an unknown exception");
  }
}

/// A blob that owns a copy of `bytes`.
inline rm_blob make_blob(std::string bytes) {
  auto owned = std::make_unique<std::string>(std::move(bytes));
  rm_blob blob{owned->data(), owned->size(), owned.get(), [](rm_blob* self) {
                 delete static_cast<std::string*>(self->ctx);
                 *self = {};
               }};
  owned.release();
  return blob;
}

// ---- handles: what the opaque C types are inside a plugin ---------------------------------------

struct Buffer {
  virtual ~Buffer() = default;
  virtual void* ptr() = 0;
};

/// Host memory, aligned.
class HostBuffer final : public Buffer {
 public:
  HostBuffer(size_t bytes, size_t align) {
    if ((align & (align - 1)) != 0) {
      throw Error(RM_INVALID_ARGUMENT,
                  "[buffer_alloc] expected a power-of-two alignment, got " + std::to_string(align));
    }
    if (align < sizeof(void*)) align = sizeof(void*);
    if (posix_memalign(&ptr_, align, bytes ? bytes : align) != 0) throw std::bad_alloc();
  }
  ~HostBuffer() override { std::free(ptr_); }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  void* ptr() override { return ptr_; }

 private:
  void* ptr_ = nullptr;
};

/// A device's copies of weights: one for all programs of a process that have the same content. A
/// model's programs (a prompt's, a token's, every bucket) are loaded one by one, each with all of its
/// weights. Any thread may call it.
template <class T>
class SharedConstants {
 public:
  /// The copy that a loaded program holds, else `make(constant)`, a std::shared_ptr<T>. It copies:
  /// the constant goes with the executable it was given to, and the copy serves others.
  template <class Make>
  std::shared_ptr<T> of(const rm_constant& constant, Make&& make) {
    if (constant.digest.size == 0) return make(constant);
    const std::string key = key_of(constant);
    const std::lock_guard lock(mutex_);
    if (const auto known = held_.find(key); known != held_.end()) {
      if (std::shared_ptr<T> held = known->second.lock()) return held;
    }
    std::erase_if(held_, [](const auto& one) { return one.second.expired(); });
    std::shared_ptr<T> made = make(constant);
    held_[key] = made;
    return made;
  }

 private:
  static std::string key_of(const rm_constant& constant) {
    const rm_tensor& tensor = *constant.tensor;
    std::string key(static_cast<const char*>(constant.digest.data), constant.digest.size);
    const auto append = [&key](const auto& value) {
      key.append(reinterpret_cast<const char*>(&value), sizeof value);
    };
    append(tensor.dtype.code), append(tensor.dtype.bits), append(tensor.dtype.lanes);
    for (int i = 0; i < tensor.ndim; ++i) append(tensor.shape[i]);
    return key;
  }
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<T>> held_;
};

/// The default stream runs everything at once, so syncing it has nothing to wait for.
struct Stream {
  virtual ~Stream() = default;
  virtual void sync() {}
  virtual void copy(const rm_tensor&, rm_tensor&) { unimplemented("copy"); }
};

/// The default event is complete as soon as it is recorded.
struct Event {
  virtual ~Event() = default;
  virtual void record(Stream&) {}
  virtual void wait(Stream&) {}
  virtual bool ready() { return true; }
  virtual void sync() {}
};

struct Executable {
  virtual ~Executable() = default;
  virtual rm_blob serialize() const { unimplemented("serialize"); }
  virtual void info(rm_executable_info&) const { unimplemented("executable_info"); }
  virtual void execute(const rm_execute_args&) const { unimplemented("execute"); }
};

struct Device {
  virtual ~Device() = default;
  virtual rm_device_info info() const = 0;
  virtual std::string fingerprint() const = 0;
  virtual void query_support(const rm_program&, rm_node_support*, size_t) {
    unimplemented("query_support");
  }
  virtual std::unique_ptr<Executable> compile(const rm_program&, const rm_compile_options&) {
    unimplemented("compile");
  }
  virtual rm_compat check_compat(rm_bytes) { return RM_COMPAT_NO; }
  virtual std::unique_ptr<Executable> deserialize(rm_bytes, rm_constants) {
    unimplemented("deserialize");
  }
  virtual std::unique_ptr<Buffer> alloc(uint32_t /*kind*/, size_t bytes, size_t align) {
    return std::make_unique<HostBuffer>(bytes, align);
  }
  virtual std::unique_ptr<Stream> stream_create(uint32_t) { return std::make_unique<Stream>(); }
  virtual std::unique_ptr<Stream> stream_wrap(void*) { unimplemented("stream_wrap"); }
  virtual std::unique_ptr<Event> event_create() { return std::make_unique<Event>(); }
};

struct Backend {
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  virtual std::string_view version() const = 0;
  virtual std::string_view build_id() const = 0;
  virtual int probe_score() noexcept = 0;
  virtual void initialize(rm_options) {}
  virtual void shutdown() noexcept {}
  virtual size_t device_count() = 0;
  virtual std::unique_ptr<Device> device_open(size_t index) = 0;
  virtual const void* extension(std::string_view) noexcept { return nullptr; }
};

/// The object behind a handle of this plugin (rm_state_handle.buffer, rm_execute_args.workspace).
inline Buffer& buffer_of(rm_buffer* handle) {
  if (!handle) throw Error(RM_INVALID_ARGUMENT, "[plugin] expected a buffer, got NULL");
  return *reinterpret_cast<Buffer*>(handle);
}

// ---- the C table --------------------------------------------------------------------------------

namespace detail {

template <class T, class Handle>
T& as(Handle* handle) {
  if (!handle) throw Error(RM_INVALID_ARGUMENT, "[plugin] expected a handle, got NULL");
  return *reinterpret_cast<T*>(handle);
}
template <class T, class Handle>
const T& as(const Handle* handle) {
  return as<T>(const_cast<Handle*>(handle));
}
template <class Handle, class T>
void give(std::unique_ptr<T> object, Handle** out) {
  *out = reinterpret_cast<Handle*>(object.release());
}
template <class T, class Handle>
void destroy(Handle* handle) {
  delete reinterpret_cast<T*>(handle);
}

/// Writes no more than the caller's struct holds, and keeps the caller's size.
template <class T>
void copy_out(T value, T* out) {
  const size_t size = out->struct_size;
  std::memcpy(out, &value, size < sizeof(T) ? size : sizeof(T));
  out->struct_size = size;
}

template <class B>
B& backend() {
  static B instance;
  return instance;
}

template <class B>
void fill_devices(rm_backend_api& t) {
  t.probe_score = [] { return backend<B>().probe_score(); };
  t.initialize = [](rm_options o) { return guard([&] { backend<B>().initialize(o); }); };
  t.shutdown = [] { backend<B>().shutdown(); };
  t.device_count = [](size_t* out) { return guard([&] { *out = backend<B>().device_count(); }); };
  t.device_open = [](size_t i, rm_device** out) {
    return guard([&] { give(backend<B>().device_open(i), out); });
  };
  t.device_close = [](rm_device* d) { destroy<Device>(d); };
  t.device_info = [](rm_device* d, rm_device_info* out) {
    return guard([&] { copy_out(as<Device>(d).info(), out); });
  };
  t.fingerprint = [](rm_device* d, rm_blob* out) {
    return guard([&] { *out = make_blob(as<Device>(d).fingerprint()); });
  };
  t.extension = [](rm_str name) { return backend<B>().extension(view(name)); };
}

inline void fill_programs(rm_backend_api& t) {
  t.query_support = [](rm_device* d, const rm_program* p, rm_node_support* out, size_t n) {
    return guard([&] { as<Device>(d).query_support(*p, out, n); });
  };
  t.compile = [](rm_device* d, const rm_program* p, const rm_compile_options* o,
                 rm_executable** out) {
    return guard([&] { give(as<Device>(d).compile(*p, *o), out); });
  };
  t.serialize = [](const rm_executable* e, rm_blob* out) {
    return guard([&] { *out = as<Executable>(e).serialize(); });
  };
  t.check_compat = [](rm_device* d, rm_bytes b, rm_compat* out) {
    return guard([&] { *out = as<Device>(d).check_compat(b); });
  };
  t.deserialize = [](rm_device* d, rm_bytes b, rm_constants c, rm_executable** out) {
    return guard([&] { give(as<Device>(d).deserialize(b, c), out); });
  };
  t.executable_info = [](const rm_executable* e, rm_executable_info* out) {
    return guard([&] {
      rm_executable_info info{};
      as<Executable>(e).info(info);
      copy_out(info, out);
    });
  };
  t.executable_destroy = [](rm_executable* e) { destroy<Executable>(e); };
  t.execute = [](const rm_executable* e, const rm_execute_args* a) {
    return guard([&] { as<Executable>(e).execute(*a); });
  };
}

inline void fill_streams(rm_backend_api& t) {
  t.buffer_alloc = [](rm_device* d, uint32_t kind, size_t bytes, size_t align, rm_buffer** out) {
    return guard([&] { give(as<Device>(d).alloc(kind, bytes, align), out); });
  };
  t.buffer_free = [](rm_buffer* b) { destroy<Buffer>(b); };
  t.buffer_ptr = [](rm_buffer* b, void** out) {
    return guard([&] { *out = as<Buffer>(b).ptr(); });
  };
  t.copy = [](rm_stream* s, const rm_tensor* src, rm_tensor* dst) {
    return guard([&] { as<Stream>(s).copy(*src, *dst); });
  };
  t.stream_create = [](rm_device* d, uint32_t flags, rm_stream** out) {
    return guard([&] { give(as<Device>(d).stream_create(flags), out); });
  };
  t.stream_wrap = [](rm_device* d, void* native, rm_stream** out) {
    return guard([&] { give(as<Device>(d).stream_wrap(native), out); });
  };
  t.stream_sync = [](rm_stream* s) { return guard([&] { as<Stream>(s).sync(); }); };
  t.stream_destroy = [](rm_stream* s) { destroy<Stream>(s); };
  t.event_create = [](rm_device* d, rm_event** out) {
    return guard([&] { give(as<Device>(d).event_create(), out); });
  };
  t.event_record = [](rm_event* e, rm_stream* s) {
    return guard([&] { as<Event>(e).record(as<Stream>(s)); });
  };
  t.event_wait = [](rm_event* e, rm_stream* s) {
    return guard([&] { as<Event>(e).wait(as<Stream>(s)); });
  };
  t.event_query = [](rm_event* e, int* ready) {
    return guard([&] { *ready = as<Event>(e).ready() ? 1 : 0; });
  };
  t.event_sync = [](rm_event* e) { return guard([&] { as<Event>(e).sync(); }); };
  t.event_destroy = [](rm_event* e) { destroy<Event>(e); };
}

}  // namespace detail

/// The body of rm_backend_query: the table of backend B, or NULL for a host of another major.
template <class B>
const rm_backend_api* export_backend(uint32_t host_abi, const rm_host_api* api) {
  if ((host_abi >> 16) != RM_ABI_MAJOR || !api) return nullptr;
  host() = api;
  static const rm_backend_api table = [] {
    rm_backend_api t{};
    t.struct_size = sizeof(t);
    t.abi_version = RM_ABI_VERSION;
    t.name = str(detail::backend<B>().name());
    t.version = str(detail::backend<B>().version());
    t.build_id = str(detail::backend<B>().build_id());
    detail::fill_devices<B>(t);
    detail::fill_programs(t);
    detail::fill_streams(t);
    return t;
  }();
  return &table;
}

}  // namespace rm::plugin

/// Place once in a plugin: RM_EXPORT_BACKEND(MyBackend).
#define RM_EXPORT_BACKEND(Class)                                                            \
  extern "C" __attribute__((visibility("default"))) const rm_backend_api* rm_backend_query( \
      uint32_t host_abi, const rm_host_api* host) {                                         \
    return rm::plugin::export_backend<Class>(host_abi, host);                               \
  }
