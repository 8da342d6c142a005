// A device of another maker, written from docs/plugin_guide.md and include/rm/ alone: it compiles
// by putting a header before the program and executes by the host's executor.
#include <cstring>
#include <string>
#include <thread>

#include "rm/host_executor.h"
#include "rm/plugin.hpp"

namespace plugin = rm::plugin;

namespace {

constexpr std::string_view kMagic = "GUIDE/1\n";

std::string_view bytes_of(rm_bytes b) { return {static_cast<const char*>(b.data), b.size}; }

struct GuideExecutable final : plugin::Executable {
  GuideExecutable(std::string bytes, rm_constants constants) : artefact(std::move(bytes)) {
    host = static_cast<const rm_host_executor*>(plugin::host_extension(RM_HOST_EXECUTOR_EXTENSION));
    if (host == nullptr || artefact.size() == kMagic.size()) return;
    const rm_program text{sizeof(rm_program),
                          plugin::str("rm.ir/1"),
                          {artefact.data() + kMagic.size(), artefact.size() - kMagic.size()}};
    check(host->prepare(&text, constants, {nullptr, 0}, &program));
  }
  ~GuideExecutable() override {
    if (program != nullptr) host->destroy(program);
  }
  rm_blob serialize() const override { return plugin::make_blob(artefact); }
  void execute(const rm_execute_args& args) const override {
    if (program == nullptr) throw plugin::Error(RM_UNAVAILABLE, "[guide] expected a host executor");
    check(host->run(program, args.inputs, args.num_inputs, args.outputs, args.num_outputs));
#ifdef GUIDE_WRONG  // a compiler with a bug: the conformance suite must find it
    static_cast<float*>(args.outputs[0]->data)[0] += 0.01f;
#endif
  }
  static void check(rm_status* status) {
    if (status == nullptr) return;
    const rm_host_api* api = plugin::host();
    const plugin::Error error(api->status_code(status),
                              std::string(plugin::view(api->status_message(status))));
    api->status_release(status);
    throw error;
  }

  const std::string artefact;
  const rm_host_executor* host = nullptr;
  rm_host_program* program = nullptr;
};

struct GuideDevice final : plugin::Device {
  rm_device_info info() const override {
    static const rm_option properties[] = {{plugin::str("static_shapes"), plugin::str("1")},
                                           {plugin::str("worker"), plugin::str("1")}};
    rm_device_info out{};
    out.struct_size = sizeof out;
    out.caps = RM_CAP_SERIALIZE;
    out.dl_device_type = kDLExtDev;
    out.memory_bytes = uint64_t{1} << 30;
    out.alignment = 64;
    out.name = plugin::str("Guide device");
    out.arch = plugin::str("guide-1");
    out.properties = {properties, 2};
    return out;
  }
  std::string fingerprint() const override { return "guide compiler 1"; }
  void query_support(const rm_program&, rm_node_support* out, size_t n) override {
    const size_t stride = n > 0 ? out->struct_size : 0;
    for (size_t i = 0; i < n; ++i) {
      auto* row = reinterpret_cast<rm_node_support*>(reinterpret_cast<char*>(out) + i * stride);
      row->verdict = RM_NODE_YES;
    }
  }
  std::unique_ptr<plugin::Executable> compile(const rm_program& program,
                                              const rm_compile_options& options) override {
    for (int step = 0; step <= 20; ++step) {
      if (options.cancelled != nullptr && options.cancelled(options.cancelled_ctx) != 0) {
        throw plugin::Error(RM_CANCELLED, "[guide] cancelled");
      }
      if (options.progress != nullptr) {
        options.progress(options.progress_ctx, step / 20.0, plugin::str("wrapping"));
      }
    }
    return std::make_unique<GuideExecutable>(
        std::string(kMagic) + std::string(bytes_of(program.code)), options.constants);
  }
  rm_compat check_compat(rm_bytes artefact) override {
    return bytes_of(artefact).starts_with(kMagic) ? RM_COMPAT_OPTIMAL : RM_COMPAT_NO;
  }
  std::unique_ptr<plugin::Executable> deserialize(rm_bytes artefact,
                                                  rm_constants constants) override {
    if (!bytes_of(artefact).starts_with(kMagic)) {
      throw plugin::Error(RM_DATA_LOSS, "[guide] expected an artefact of this compiler");
    }
    return std::make_unique<GuideExecutable>(std::string(bytes_of(artefact)), constants);
  }
};

struct GuideBackend final : plugin::Backend {
  std::string_view name() const override { return "furiosa"; }
  std::string_view version() const override { return "1.0"; }
  std::string_view build_id() const override { return ""; }
  int probe_score() noexcept override { return 1; }
  size_t device_count() override { return 1; }
  std::unique_ptr<plugin::Device> device_open(size_t index) override {
    if (index != 0) throw plugin::Error(RM_NOT_FOUND, "[guide] expected device 0");
    return std::make_unique<GuideDevice>();
  }
};

}  // namespace

RM_EXPORT_BACKEND(GuideBackend)
