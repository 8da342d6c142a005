// CApiBackend.  Every call into the plugin goes through call(), the one place where a status or a
// stray exception becomes rm::Error.
#include "backend/c_api_backend.hpp"

#include <algorithm>
#include <cstring>

#include "backend/guarded.hpp"
#include "base/error.hpp"

namespace rm::backend {
namespace {

constexpr size_t kMaxTableBytes = 1 << 16;  // no major version will have 8192 entries
constexpr size_t kMaxDevices = 4096;        // more is a plugin that did not write its answer
constexpr size_t kMinTableBytes = 312;      // rm_backend_api of version 1.0
constexpr size_t kMinRowBytes = 128;        // rm_kernel of version 1.0
constexpr size_t kMinRowsBytes = 32;        // rm_kernels of version 1.0

[[noreturn]] void reject(const std::string& where, const std::string& what) {
  throw Error(RM_FAILED_PRECONDITION, "[backend " + where + "] " + what, "RM405");
}

void check_table(const rm_backend_api& api, const std::string& where) {
  if (api.struct_size < kMinTableBytes || api.struct_size > kMaxTableBytes) {
    reject(where, "expected a table of " + std::to_string(kMinTableBytes) + " to " +
                      std::to_string(kMaxTableBytes) + " bytes, got struct_size " +
                      std::to_string(api.struct_size) + "; rebuild it with this rm/backend.h");
  }
  if ((api.abi_version >> 16) != RM_ABI_MAJOR) {
    throw Error(RM_FAILED_PRECONDITION,
                "[backend " + where + "] expected ABI major " + std::to_string(RM_ABI_MAJOR) +
                    ", got " + std::to_string(api.abi_version >> 16) +
                    "; install the plugin built for this version of rm_abstract",
                "RM403");
  }
  if (view(api.name).empty()) reject(where, "expected a name, got an empty one");
  if (api.probe_score == nullptr || api.initialize == nullptr || api.device_count == nullptr ||
      api.device_open == nullptr || api.device_info == nullptr) {
    reject(where,
           "expected probe_score, initialize, device_count, device_open and device_info, "
           "got a table without one of them");
  }
}

struct CApiExecutable final : Executable {
  CApiExecutable(const rm_backend_api* api, rm_executable* handle) : api(api), handle(handle) {}
  ~CApiExecutable() override {
    if (api->executable_destroy != nullptr) api->executable_destroy(handle);
  }
  rm_executable_info info() const override {
    if (api->executable_info == nullptr) {
      throw Error(RM_UNIMPLEMENTED, "[executable_info] the backend does not offer it");
    }
    return fill_guarded<rm_executable_info>("executable_info", [&](rm_executable_info* out) {
      check(api->executable_info(handle, out), "executable_info");
    });
  }

  const rm_backend_api* api;
  rm_executable* handle;
};

const CApiExecutable& own(const Executable& executable, const std::string& name) {
  const auto* mine = dynamic_cast<const CApiExecutable*>(&executable);
  if (mine == nullptr) {
    throw Error(RM_INVALID_ARGUMENT, "[backend " + name +
                                         "] expected one of its own executables, "
                                         "got another backend's");
  }
  return *mine;
}

/// rm_compile_options over CompileOptions: the callbacks may not throw into the plugin.
class CompileOptionsView {
 public:
  explicit CompileOptionsView(const CompileOptions& options) : options_(options) {
    for (const auto& [key, value] : options.options) {
      pairs_.push_back({to_rm_str(key), to_rm_str(value)});
    }
    raw_.struct_size = sizeof raw_;
    raw_.options = {pairs_.data(), pairs_.size()};
    raw_.constants = {options.constants.data(), options.constants.size(), sizeof(rm_constant)};
    raw_.progress_ctx = raw_.cancelled_ctx = this;
    if (options.progress) raw_.progress = &CompileOptionsView::progress;
    if (options.cancelled) raw_.cancelled = &CompileOptionsView::cancelled;
  }
  const rm_compile_options* get() const { return &raw_; }
  /// The caller's own exception, thrown by a callback, wins over what the plugin made of it.
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  static void progress(void* ctx, double fraction, rm_str stage) {
    auto* self = static_cast<CompileOptionsView*>(ctx);
    try {
      self->options_.progress(fraction, view(stage));
    } catch (...) {
      self->error_ = std::current_exception();
    }
  }
  static int cancelled(void* ctx) {
    auto* self = static_cast<CompileOptionsView*>(ctx);
    if (self->error_) return 1;
    try {
      return self->options_.cancelled() ? 1 : 0;
    } catch (...) {
      self->error_ = std::current_exception();
      return 1;
    }
  }

  const CompileOptions& options_;
  std::vector<rm_option> pairs_;
  rm_compile_options raw_{};
  std::exception_ptr error_;
};

/// A plugin's blob as bytes of ours, released whatever happens.
std::string take(rm_blob& blob) {
  struct Release {
    rm_blob* blob;
    ~Release() {
      if (blob->release != nullptr) blob->release(blob);
    }
  } release{&blob};
  if (blob.size != 0 && blob.data == nullptr) {
    throw Error(RM_DATA_LOSS, "[blob] expected data, got NULL with a size");
  }
  return std::string(static_cast<const char*>(blob.data), blob.size);
}

}  // namespace

struct CApiBackend::Device {
  rm_device* handle = nullptr;
  rm_device_info info{};
};

CApiBackend::CApiBackend(const rm_backend_api* api, PluginIdentity identity, Options options)
    : identity_(std::move(identity)), options_(std::move(options)) {
  const std::string where = identity_.path.empty() ? "(in process)" : identity_.path;
  if (api == nullptr) reject(where, "expected a table, got NULL");
  check_table(*api, where);
  std::memcpy(&api_, api, std::min(api->struct_size, sizeof api_));
  name_ = view(api_.name);
  version_ = view(api_.version);
}

CApiBackend::~CApiBackend() {
  for (const auto& device : devices_) {
    if (device != nullptr && api_.device_close != nullptr) api_.device_close(device->handle);
  }
  if (initialised_ && api_.shutdown != nullptr) api_.shutdown();
}

template <class Fn, class... Args>
void CApiBackend::call(const char* what, Fn fn, Args... args) const {
  // A text only for an error: copies and executions come here at every call.
  const auto where = [&] { return "backend " + name_ + ": " + what; };
  if (fn == nullptr) {
    throw Error(RM_UNIMPLEMENTED, "[" + where() + "] the backend does not offer it");
  }
  rm_status* status = nullptr;
  try {
    status = fn(args...);
  } catch (const std::exception& e) {
    throw Error(RM_INTERNAL, "[" + where() +
                                 "] expected a status, got an exception across the C "
                                 "line: " +
                                 e.what() + "; the plugin needs a guard");
  } catch (...) {
    throw Error(RM_INTERNAL, "[" + where() +
                                 "] expected a status, got an unknown exception across "
                                 "the C line; the plugin needs a guard");
  }
  if (status != nullptr) check(status, where());
}

template <class Handle, class Fn, class... Args>
Handle* CApiBackend::handle_of(const char* what, Fn fn, Args... args) const {
  Handle* handle = nullptr;
  call(what, fn, args..., &handle);
  if (handle == nullptr) {
    throw Error(RM_INTERNAL, "[backend " + name_ + ": " + what +
                                 "] expected a handle or an error, got neither; the plugin "
                                 "forgets to set its result");
  }
  return handle;
}

int CApiBackend::probe_score() const {
  try {
    return std::max(0, api_.probe_score());
  } catch (...) {
    return 0;  // a plugin without a guard; is_available() says what its initialize() throws
  }
}

void CApiBackend::initialize() {  // under mutex_
  if (initialised_) return;
  std::vector<rm_option> pairs;
  for (const auto& [key, value] : options_) pairs.push_back({to_rm_str(key), to_rm_str(value)});
  call("initialize", api_.initialize, rm_options{pairs.data(), pairs.size()});
  initialised_ = true;
}

bool CApiBackend::is_available(std::string* why_not) {
  std::string why;
  try {
    if (probe_score() > 0) {
      if (device_count() > 0) return true;
      why = "[backend " + name_ + "] it sees no device";
    } else {
      // The probe only gives a number; what is missing is what initialize() complains about.
      const std::lock_guard lock(mutex_);
      initialize();
      why = "[backend " + name_ + "] its probe says it cannot run here";
    }
  } catch (const std::exception& e) {
    why = e.what();
  }
  if (why_not != nullptr) *why_not = std::move(why);
  return false;
}

size_t CApiBackend::device_count() {
  const std::lock_guard lock(mutex_);
  initialize();
  size_t count = 0;
  call("device_count", api_.device_count, &count);
  if (count > kMaxDevices) {
    throw Error(RM_INTERNAL, "[backend " + name_ + "] expected at most " +
                                 std::to_string(kMaxDevices) + " devices, got " +
                                 std::to_string(count));
  }
  return count;
}

CApiBackend::Device& CApiBackend::device(size_t index) {
  {
    const std::lock_guard lock(mutex_);
    if (index < devices_.size() && devices_[index] != nullptr) return *devices_[index];
  }
  const size_t count = device_count();
  if (index >= count) {
    throw Error(RM_OUT_OF_RANGE, "[backend " + name_ + "] expected a device below " +
                                     std::to_string(count) + ", got " + std::to_string(index));
  }
  const std::lock_guard lock(mutex_);
  if (devices_.size() < count) devices_.resize(count);
  if (devices_[index] == nullptr) {
    auto opened = std::make_unique<Device>();
    opened->handle = handle_of<rm_device>("device_open", api_.device_open, index);
    try {
      opened->info = fill_guarded<rm_device_info>("device_info", [&](rm_device_info* out) {
        call("device_info", api_.device_info, opened->handle, out);
      });
    } catch (...) {
      if (api_.device_close != nullptr) api_.device_close(opened->handle);
      throw;
    }
    devices_[index] = std::move(opened);
  }
  return *devices_[index];
}

const rm_device_info& CApiBackend::get_device_info(size_t index) { return device(index).info; }

std::string CApiBackend::fingerprint(size_t index) {
  rm_blob blob{};
  call("fingerprint", api_.fingerprint, device(index).handle, &blob);
  return take(blob);
}

const void* CApiBackend::extension(std::string_view name) const {
  return api_.extension == nullptr ? nullptr : api_.extension(to_rm_str(name));
}

const rm_graphs* CApiBackend::graphs() {
  const auto* table = static_cast<const rm_graphs*>(extension(RM_GRAPH_EXTENSION));
  if (table == nullptr) return nullptr;
  if (table->struct_size < sizeof(rm_graphs) || !table->begin || !table->end || !table->launch ||
      !table->destroy) {
    reject(name_, "expected a complete table of rm.graph/1, got one with a missing entry");
  }
  return table;
}

const rm_generators* CApiBackend::generators() {
  {
    const std::lock_guard lock(mutex_);
    initialize();
  }
  const auto* table = static_cast<const rm_generators*>(extension(RM_GENERATE_EXTENSION));
  if (table == nullptr) return nullptr;
  if (table->struct_size < sizeof(rm_generators) || !table->open || !table->max_tokens ||
      !table->close || !table->start || !table->step || !table->finish) {
    reject(name_, "expected a complete table of rm.generate/1, got one with a missing entry");
  }
  return table;
}

KernelRows CApiBackend::kernels() {
  const auto* table = static_cast<const rm_kernels*>(extension(RM_KERNELS_EXTENSION));
  if (table == nullptr) return {};
  const std::lock_guard lock(mutex_);
  if (!rows_checked_) {
    if (table->struct_size < kMinRowsBytes || table->row_stride < kMinRowBytes ||
        table->row_stride % alignof(rm_kernel) != 0 || (table->count > 0 && !table->rows)) {
      reject(name_, "expected kernel rows of at least " + std::to_string(kMinRowBytes) +
                        " bytes, got a table that says otherwise");
    }
    for (const rm_kernel& row : KernelRows(table->rows, table->count, table->row_stride)) {
      if (row.struct_size < kMinRowBytes || row.struct_size > table->row_stride) {
        reject(name_, "expected rows no longer than their stride of " +
                          std::to_string(table->row_stride) + ", got one of " +
                          std::to_string(row.struct_size) + " bytes");
      }
      if (view(row.op).empty() || view(row.name).empty() || row.num_configs == 0 || !row.supports ||
          !row.cost_ns || !row.prepare || !row.release || !row.launch ||
          (row.packing != nullptr) != (row.prepack != nullptr)) {
        reject(name_, "expected a complete kernel row, got '" + std::string(view(row.name)) +
                          "' with a missing entry");
      }
    }
    rows_checked_ = true;
  }
  return {table->rows, table->count, table->row_stride};
}

std::vector<NodeSupport> CApiBackend::query_support(size_t index, const rm_program& program,
                                                    size_t nodes) {
  std::vector<rm_node_support> rows(nodes);
  for (auto& row : rows) row = {sizeof(rm_node_support), RM_NODE_NO, 0, -1, {nullptr, 0}};
  call("query_support", api_.query_support, device(index).handle, &program, rows.data(), nodes);
  std::vector<NodeSupport> out(nodes);
  for (size_t i = 0; i < nodes; ++i) {
    out[i] = {rows[i].verdict, rows[i].cluster, rows[i].est_ns, std::string(view(rows[i].reason))};
  }
  return out;
}

std::unique_ptr<Executable> CApiBackend::prepare_model(size_t index, const rm_program& program,
                                                       const CompileOptions& options) {
  CompileOptionsView raw(options);
  rm_executable* handle = nullptr;
  try {
    handle = handle_of<rm_executable>("compile", api_.compile, device(index).handle, &program,
                                      raw.get());
  } catch (...) {
    raw.rethrow();
    throw;
  }
  auto executable = std::make_unique<CApiExecutable>(&api_, handle);
  raw.rethrow();
  return executable;
}

std::string CApiBackend::serialize(const Executable& executable) {
  rm_blob blob{};
  call("serialize", api_.serialize, own(executable, name_).handle, &blob);
  return take(blob);
}

rm_compat CApiBackend::check_compat(size_t index, std::string_view artefact) {
  rm_compat out = RM_COMPAT_NO;
  call("check_compat", api_.check_compat, device(index).handle,
       rm_bytes{artefact.data(), artefact.size()}, &out);
  return out;
}

std::unique_ptr<Executable> CApiBackend::deserialize(size_t index, std::string_view artefact,
                                                     std::span<const rm_constant> constants) {
  auto* handle = handle_of<rm_executable>(
      "deserialize", api_.deserialize, device(index).handle,
      rm_bytes{artefact.data(), artefact.size()},
      rm_constants{constants.data(), constants.size(), sizeof(rm_constant)});
  return std::make_unique<CApiExecutable>(&api_, handle);
}

void CApiBackend::execute(const Executable& executable, const rm_execute_args& args) {
  call("execute", api_.execute, own(executable, name_).handle, &args);
}

Buffer CApiBackend::allocate(size_t index, uint32_t kind, size_t bytes, size_t alignment) {
  auto* handle = handle_of<rm_buffer>("buffer_alloc", api_.buffer_alloc, device(index).handle, kind,
                                      bytes, alignment);
  return Buffer(&api_, handle, api_.buffer_free);
}

void CApiBackend::copy(rm_stream* stream, const rm_tensor& src, rm_tensor& dst) {
  call("copy", api_.copy, stream, &src, &dst);
}

Stream CApiBackend::create_stream(size_t index, uint32_t flags) {
  auto* handle =
      handle_of<rm_stream>("stream_create", api_.stream_create, device(index).handle, flags);
  return Stream(&api_, handle, api_.stream_destroy);
}

Stream CApiBackend::wrap_stream(size_t index, void* native) {
  auto* handle =
      handle_of<rm_stream>("stream_wrap", api_.stream_wrap, device(index).handle, native);
  return Stream(&api_, handle, api_.stream_destroy);
}

Event CApiBackend::create_event(size_t index) {
  auto* handle = handle_of<rm_event>("event_create", api_.event_create, device(index).handle);
  return Event(&api_, handle, api_.event_destroy);
}

}  // namespace rm::backend
