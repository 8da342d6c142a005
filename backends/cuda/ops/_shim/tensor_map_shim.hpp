// The driver's encoder of tensor maps, asked for through the runtime: no module links the driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace rm::cuda_ops {

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

/// Null without a driver that has it.
inline TensorMapEncoder tensor_map_encoder() {
  static const TensorMapEncoder found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
      cudaGetLastError();
      function = nullptr;
    }
    return reinterpret_cast<TensorMapEncoder>(function);
  }();
  return found;
}

}  // namespace rm::cuda_ops
