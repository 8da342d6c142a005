// A compiled program over a framework's tensors: what bindings offer to Python and the router runs
// itself.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/program.hpp"
#include "exchange/tensor_exchange.hpp"
#include "runtime/device.hpp"
#include "select/kernel_table.hpp"

namespace rm::exchange {

class FrameworkProgram {
 public:
  FrameworkProgram(const DLPackExchangeAPI* api, ir::Graph graph,
                   std::shared_ptr<const select::KernelTable> kernels, std::string forced_kernel,
                   engine::Packing packing, runtime::DevicePtr device);

  /// Throws rm::Error for anything but a dense tensor on the program's device. Needs the GIL.
  engine::TensorView view(PyObject* tensor) const { return view_of(api_, tensor, "an input", device_); }

  /// The results in order; called with the GIL, which is given up while the program runs. Throws as
  /// engine::Program::run does.
  pybind11::list run(const std::vector<engine::TensorView>& inputs, bool only_accepted);

  /// Copies from the host into memory of the program's device, ahead of what is launched next on the
  /// framework's current stream; `from` may change at once.
  void write(void* to, const void* from, size_t bytes);

 protected:
  const DLPackExchangeAPI* api_;
  engine::Program program_;
  const DLDevice device_;
};

}  // namespace rm::exchange
