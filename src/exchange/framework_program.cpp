#include "exchange/framework_program.hpp"

#include <utility>

namespace rm::exchange {

FrameworkProgram::FrameworkProgram(const DLPackExchangeAPI* api, ir::Graph graph,
                                   std::shared_ptr<const select::KernelTable> kernels,
                                   std::string forced_kernel, engine::Packing packing,
                                   runtime::DevicePtr device)
    : api_(api),
      program_(std::move(graph), std::move(kernels), std::move(forced_kernel), packing,
               std::move(device)),
      device_(program_.device().id()) {}

pybind11::list FrameworkProgram::run(const std::vector<engine::TensorView>& inputs,
                                     bool only_accepted) {
  void* stream = current_stream(api_, device_);
  FrameworkOutputs outputs(api_, device_);
  {
    pybind11::gil_scoped_release release;
    program_.run(inputs, outputs, only_accepted, stream);
  }
  return outputs.take();
}

void FrameworkProgram::write(void* to, const void* from, size_t bytes) {
  program_.write(to, from, bytes, current_stream(api_, device_));
}

}  // namespace rm::exchange
