// The CPU backend: one device, host pointers, synchronous, kernel rows only.
//
// Options of initialize(): cpu_isa = auto, or the one set that kernels may use (isa.hpp).
// Whole-program entries answer RM_UNIMPLEMENTED: the core lowers programs to these rows.
#include "rm/plugin.hpp"

#include <omp.h>
#include <unistd.h>

#include <vector>

#include "common/build_id.hpp"
#include "common/options.hpp"
#include "isa.hpp"
#include "ops/all_rows.hpp"
#include "rm/kernels.h"

namespace rm::cpu {
namespace {

constexpr std::string_view kVersion = "0.1.0";

class CpuDevice final : public plugin::Device {
 public:
  CpuDevice() : arch_(isa_fingerprint()), threads_(std::to_string(omp_get_num_procs())) {
    properties_ = {{plugin::str("isa"), plugin::str(arch_)},
                   {plugin::str("processors"), plugin::str(threads_)}};
  }

  rm_device_info info() const override {
    rm_device_info out{};
    out.struct_size = sizeof(out);
    out.caps = RM_CAP_HOST_POINTERS | RM_CAP_CONCURRENT_EXECUTE;
    out.dl_device_type = kDLCPU;
    out.dl_device_id = 0;
    out.memory_bytes = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                       static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    out.alignment = 64;
    out.name = plugin::str("CPU");
    out.arch = plugin::str(arch_);
    out.properties = {properties_.data(), properties_.size()};
    return out;
  }

  std::string fingerprint() const override {
    return "cpu;build=" + build_id() + ";isa=" + isa_fingerprint() + kernel_library_fingerprint();
  }

 private:
  std::string arch_, threads_;
  std::vector<rm_option> properties_;
};

class CpuBackend final : public plugin::Backend {
 public:
  std::string_view name() const override { return "cpu"; }
  std::string_view version() const override { return kVersion; }
  std::string_view build_id() const override { return cpu::build_id(); }
  int probe_score() noexcept override { return 100; }

  void initialize(rm_options options) override {
    set_plugin_options(options);
    set_isa_cap(plugin_option("cpu_isa"));
  }

  size_t device_count() override { return 1; }

  std::unique_ptr<plugin::Device> device_open(size_t index) override {
    if (index != 0) {
      throw plugin::Error(RM_NOT_FOUND,
                          "[device_open] expected device 0, got " + std::to_string(index));
    }
    return std::make_unique<CpuDevice>();
  }

  const void* extension(std::string_view name) noexcept override {
    if (name != RM_KERNELS_EXTENSION) return nullptr;
    // Never destroyed: at exit a thread that packs weights may still look at a row.
    static const std::vector<rm_kernel>& rows = *new std::vector<rm_kernel>(all_rows());
    static const rm_kernels table{sizeof(rm_kernels), rows.data(), rows.size(), sizeof(rm_kernel)};
    return &table;
  }
};

}  // namespace
}  // namespace rm::cpu

RM_EXPORT_BACKEND(rm::cpu::CpuBackend)
