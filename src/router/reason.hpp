// Routing verdicts of one call.  The texts and remedies are the RM1xx rows of the reason table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace rm::router {

enum class Reason : std::uint8_t {
  kNone,       // nothing speaks against routing
  kTraining,   // RM101 a module is in training mode
  kHooks,      // RM102 hooks or a replaced forward: they would not run
  kTracing,    // RM103 tracing, compiling, exporting, functorch, a mode is active
  kArgument,   // RM104 an argument that cannot be described
  kShape,      // RM105 too many signatures
  kAutocast,   // RM106 torch.autocast is on
  kWeights,    // RM107 weights changed since the guard's snapshot
  kDisabled,   // RM108 disabled()
  kForeign,    // RM109 the slot serves somebody else
  kDevices,    // RM110 weights on several devices
  kStructure,  // RM118 something else that forward reads changed since
  kGradients,  // RM117 gradients are enabled, and a weight or an input requires them
  kCompiling,  // RM112 another thread compiles this call
  kModule,     // RM113 a module or weight that cannot be described
  kOwn,        // no reason: a call made by ourselves, which nobody counts
  kCount,
};

constexpr std::array<const char*, static_cast<std::size_t>(Reason::kCount)> kReasonCodes = {
    "",      "RM101", "RM102", "RM103", "RM104", "RM105",
    "RM106", "RM107", "RM108", "RM109", "RM110", "RM118", "RM117", "RM112", "RM113", ""};

constexpr const char* code_of(Reason reason) {
  return kReasonCodes[static_cast<std::size_t>(reason)];
}

}  // namespace rm::router
