// A plugin's buffers as the states of a worker: zeroed, copied in parts, handed to execute by name.
//
// Invariant: a copy stays inside both tensors, whatever the region says.
#pragma once

#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "worker/server.hpp"

namespace rm::device {

/// One tensor in memory of the device; contiguous.
struct StateTensor {
  worker::TensorSlot slot;
  backend::Buffer buffer;
};

class BackendStates final : public worker::States {
 public:
  BackendStates(Backend& backend, size_t device, const worker::Slots& slots);
  /// The handles of these tensors, in their order. Throws when a name or a type is not among them.
  std::vector<rm_state_handle> handles(const worker::Slots& wanted) const;

  Backend& backend() const { return backend_; }
  size_t device() const { return device_; }
  const std::vector<StateTensor>& tensors() const { return tensors_; }

 private:
  Backend& backend_;
  const size_t device_;
  std::vector<StateTensor> tensors_;
};

void copy_states(const worker::CopyJob& job);

}  // namespace rm::device
