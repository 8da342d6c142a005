// The torch bridge as a plugin: kernel rows only, on the host's memory.  It is usable as soon as
// the process has imported torch, and is never a device of its own.
#include "rm/plugin.hpp"

#include <string>

#include "bridge.hpp"
#include "torch_api.hpp"

namespace rm::torch_bridge {
namespace {

class TorchDevice final : public plugin::Device {
 public:
  rm_device_info info() const override {
    rm_device_info info{};
    info.struct_size = sizeof info;
    info.caps = RM_CAP_CONCURRENT_EXECUTE | RM_CAP_HOST_POINTERS;
    info.dl_device_type = kDLCPU;
    info.alignment = 64;
    info.name = plugin::str("torch");
    info.arch = plugin::str("libtorch");
    return info;
  }
  std::string fingerprint() const override {
    return "libtorch-abi=" + std::to_string(require_torch().abi_version());
  }
};

class TorchBackend final : public plugin::Backend {
 public:
  std::string_view name() const override { return "torch"; }
  std::string_view version() const override { return "1"; }
  std::string_view build_id() const override { return ""; }  // the host digests the file
  int probe_score() noexcept override { return torch_api() == nullptr ? 0 : 1; }
  void initialize(rm_options) override { require_torch(); }
  size_t device_count() override { return 1; }
  std::unique_ptr<plugin::Device> device_open(size_t index) override {
    if (index != 0) throw plugin::Error(RM_OUT_OF_RANGE, "[torch bridge] expected device 0");
    return std::make_unique<TorchDevice>();
  }
  const void* extension(std::string_view name) noexcept override {
    return name == RM_KERNELS_EXTENSION ? kernel_rows() : nullptr;
  }
};

}  // namespace
}  // namespace rm::torch_bridge

RM_EXPORT_BACKEND(rm::torch_bridge::TorchBackend)
