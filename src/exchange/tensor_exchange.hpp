// Tensors in and out through the DLPack C exchange table: no libtorch, no Python call per tensor.
#pragma once

#include <dlpack/dlpack.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "engine/program.hpp"
#include "ir/layout.hpp"

namespace rm::exchange {

/// The exchange table of a tensor type (torch >= 2.10 has it on torch.Tensor). Throws rm::Error
/// when the type has none of our DLPack major version.
const DLPackExchangeAPI* exchange_api(pybind11::handle tensor_type);

/// A borrowed view of a dense tensor on `device`. Throws rm::Error naming `what` for anything else.
engine::TensorView view_of(const DLPackExchangeAPI* api, PyObject* tensor, const char* what,
                           DLDevice device = {kDLCPU, 0});

/// The framework's current stream for a device, in the device's own handle; null for the host.
void* current_stream(const DLPackExchangeAPI* api, DLDevice device);

/// The tensor as a weight: it shares the tensor's storage and keeps it. Writing to the tensor is seen;
/// giving the Python tensor another storage (`tensor.data = other`) is not. Needs the GIL; the owner
/// may be dropped without it. The tensor lies on the host or on `device`.
engine::OwnedTensor own(const DLPackExchangeAPI* api, PyObject* tensor, const char* what,
                        DLDevice device = {kDLCPU, 0});

/// Outputs made by the framework's own allocator; the GIL is needed by `take` only.
class FrameworkOutputs : public engine::OutputAllocator {
 public:
  explicit FrameworkOutputs(const DLPackExchangeAPI* api, DLDevice device = {kDLCPU, 0})
      : api_(api), device_(device) {}
  ~FrameworkOutputs() override;
  void* allocate(size_t index, const ir::Layout& layout) override;
  void reuse(size_t index, size_t input) override;
  /// The outputs in order as framework tensors; ownership moves to them. An output that is an
  /// input updated in place is None: the caller has it.
  pybind11::list take();

 private:
  const DLPackExchangeAPI* api_;
  const DLDevice device_;
  std::vector<DLManagedTensorVersioned*> tensors_;
};

}  // namespace rm::exchange
