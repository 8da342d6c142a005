// Adapts a plugin's C table to rm::Backend.
//
// Trusts nothing it can check: a missing entry is RM_UNIMPLEMENTED, an exception thrown across the
// C line is RM_INTERNAL, sizes are compared with what the host handed out, and memory the plugin
// fills is guarded against writes past its end.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/backend.hpp"

namespace rm::backend {

struct PluginIdentity {
  std::string path, build_id;
};

class CApiBackend final : public Backend {
 public:
  /// `api` must live as long as the process.  Throws when the table is not one this host can use.
  CApiBackend(const rm_backend_api* api, PluginIdentity identity, Options options = {});
  ~CApiBackend() override;

  const std::string& name() const override { return name_; }
  const std::string& version() const override { return version_; }
  const std::string& build_id() const override { return identity_.build_id; }
  const std::string& path() const override { return identity_.path; }

  int probe_score() const override;
  bool is_available(std::string* why_not) override;
  size_t device_count() override;
  const rm_device_info& get_device_info(size_t device) override;
  std::string fingerprint(size_t device) override;
  KernelRows kernels() override;
  const rm_graphs* graphs() override;
  const rm_generators* generators() override;

  std::vector<NodeSupport> query_support(size_t device, const rm_program& program,
                                         size_t nodes) override;
  std::unique_ptr<Executable> prepare_model(size_t device, const rm_program& program,
                                            const CompileOptions& options) override;
  std::string serialize(const Executable& executable) override;
  rm_compat check_compat(size_t device, std::string_view artefact) override;
  std::unique_ptr<Executable> deserialize(size_t device, std::string_view artefact,
                                          std::span<const rm_constant> constants) override;
  void execute(const Executable& executable, const rm_execute_args& args) override;

  Buffer allocate(size_t device, uint32_t kind, size_t bytes, size_t alignment) override;
  void copy(rm_stream* stream, const rm_tensor& src, rm_tensor& dst) override;
  Stream create_stream(size_t device, uint32_t flags) override;
  Stream wrap_stream(size_t device, void* native) override;
  Event create_event(size_t device) override;

  const rm_backend_api& api() const { return api_; }
  /// An optional table of the plugin, NULL when it has none of that name.
  const void* extension(std::string_view name) const;

 private:
  struct Device;

  template <class Fn, class... Args>
  void call(const char* what, Fn fn, Args... args) const;
  /// The handle an entry gives through its last argument. Throws rm::Error also for OK without one.
  template <class Handle, class Fn, class... Args>
  Handle* handle_of(const char* what, Fn fn, Args... args) const;
  void initialize();
  Device& device(size_t index);

  rm_backend_api api_{};  // entries the plugin does not know are NULL
  PluginIdentity identity_;
  std::string name_, version_;
  Options options_;
  std::mutex mutex_;  // guards initialised_, devices_ and rows_checked_
  bool initialised_ = false, rows_checked_ = false;
  std::vector<std::unique_ptr<Device>> devices_;
};

}  // namespace rm::backend
