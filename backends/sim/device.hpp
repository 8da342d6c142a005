// One simulated NPU: static shapes, fewer operators than the core has, memory of its own size.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "rm/plugin.hpp"
#include "settings.hpp"

namespace rm::sim {

struct SimWeight;

class SimDevice final : public plugin::Device {
 public:
  explicit SimDevice(size_t index);
  rm_device_info info() const override;
  std::string fingerprint() const override;
  void query_support(const rm_program& program, rm_node_support* out, size_t n) override;
  std::unique_ptr<plugin::Executable> compile(const rm_program& program,
                                              const rm_compile_options& options) override;
  rm_compat check_compat(rm_bytes artefact) override;
  std::unique_ptr<plugin::Executable> deserialize(rm_bytes artefact, rm_constants) override;
  std::unique_ptr<plugin::Buffer> alloc(uint32_t kind, size_t bytes, size_t align) override;
  std::unique_ptr<plugin::Stream> stream_create(uint32_t flags) override;

 private:
  /// Why an operator stays on the host; empty when the device has it. Static strings and members.
  std::string_view why_not(const std::string& op, const std::vector<struct Type>& results) const;

  const Settings settings_;
  const size_t index_;
  std::string name_, target_;
  std::vector<rm_option> properties_;
  plugin::SharedConstants<SimWeight> weights_;  // in the device's memory, for all loaded programs
};

}  // namespace rm::sim
