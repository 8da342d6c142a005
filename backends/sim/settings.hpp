// What the simulated NPU pretends to be, from RM_SIM_* variables; read when asked, so that a worker
// sees what it was started with.
//
// RM_SIM_DEVICES      how many devices (1)
// RM_SIM_TARGET       architecture artefacts are made for (sim-1; sim-2)
// RM_SIM_COMPILER     version of the pretended compiler (1.0)
// RM_SIM_COMPILE_S    how long a compilation takes (0.3)
// RM_SIM_MEMORY       device memory in bytes (2 GiB)
// RM_SIM_NUMERICS     fp32, or bf16: every result is rounded to bfloat16
// RM_SIM_EMBED        1: weights become part of the artefact
// RM_SIM_UNSUPPORTED  more operators to refuse, comma separated
// RM_SIM_FAULT        what goes wrong, comma separated: compile_error compile_crash compile_hang
//                     wrong_numbers corrupt_artefact run_error run_crash run_hang device_lost
//                     version_skew out_of_memory start_crash
// RM_SIM_FAULT_ONCE   a path: faults happen only while it does not exist, and create it
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace rm::sim {

struct Settings {
  size_t devices = 1;
  std::string target, compiler;
  double compile_seconds = 0.3;
  uint64_t memory_bytes = uint64_t{2} << 30;
  bool bf16 = false, embed = false;
  std::vector<std::string> unsupported;
};
Settings settings();

/// True when this fault is switched on and (with RM_SIM_FAULT_ONCE) has not happened yet.
bool fault(std::string_view name);

}  // namespace rm::sim
