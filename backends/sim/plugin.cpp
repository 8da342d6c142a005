// The simulated NPU: the template of docs/plugin_guide.md. A whole-program backend that compiles
// programs of static shapes into artefacts, loads and executes them; used by name (sim:0), or as
// the last npu:N with RM_SIM_NPU=1.
#include "rm/plugin.hpp"

#include "device.hpp"

namespace rm::sim {
namespace {

class SimBackend final : public plugin::Backend {
 public:
  std::string_view name() const override { return "sim"; }
  std::string_view version() const override { return "1.0.0"; }
  std::string_view build_id() const override { return ""; }  // the host digests the file
  int probe_score() noexcept override { return 1; }
  void initialize(rm_options) override {
    if (std::getenv("RM_WORKER") != nullptr && fault("start_crash")) std::abort();
  }
  size_t device_count() override { return settings().devices; }
  std::unique_ptr<plugin::Device> device_open(size_t index) override {
    if (index >= device_count()) {
      throw plugin::Error(RM_NOT_FOUND, "[sim] expected a device below " +
                                            std::to_string(device_count()) + ", got " +
                                            std::to_string(index));
    }
    return std::make_unique<SimDevice>(index);
  }
};

}  // namespace
}  // namespace rm::sim

RM_EXPORT_BACKEND(rm::sim::SimBackend)
