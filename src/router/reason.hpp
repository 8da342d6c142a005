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
  kShape,      // RM105 outside the shapes of the plan, or too many signatures
  kDtype,      // RM106 autocast or a dtype without a plan
  kWeights,    // RM107 weights changed since the plan was bound
  kDisabled,   // RM108 disabled(), or a call made by ourselves
  kForeign,    // RM109 the slot serves somebody else
  kDevices,    // RM110 weights on several devices
  kStructure,  // RM107 too, but the program itself changed and not only its weights
  kGradients,  // RM101 too: gradients are enabled, and a weight or an input requires them
  kCompiling,  // RM112 another thread compiles this call
  kModule,     // RM113 a module or weight that cannot be described
  kCount,
};

constexpr std::array<const char*, static_cast<std::size_t>(Reason::kCount)> kReasonCodes = {
    "",      "RM101", "RM102", "RM103", "RM104", "RM105",
    "RM106", "RM107", "RM108", "RM109", "RM110", "RM107", "RM101", "RM112", "RM113"};

}  // namespace rm::router
