// Tensors of the caller's: inputs, which it keeps valid during a run, and weights, which it gives.
#pragma once

#include <memory>

#include "ir/layout.hpp"
#include "rm/backend.h"

namespace rm::engine {

/// First element and layout (offset 0).
struct TensorView {
  const void* data = nullptr;
  ir::Layout layout;
  DLDevice device{kDLCPU, 0};
};

/// A tensor that stays valid and unchanged for as long as somebody has its `owner`. The last one to
/// drop the owner may do so on any thread, with none of the engine's locks held.
struct OwnedTensor {
  TensorView view;
  std::shared_ptr<const void> owner;
};

}  // namespace rm::engine
