// The driver's encoder of tensor maps, asked for through the runtime: no module links the driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace rm::cuda_ops {

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

using Im2colMapEncoder = decltype(&cuTensorMapEncodeIm2col);

/// A function of the driver of CUDA 12, null without it.
inline void* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
  if (error == cudaSuccess && result == cudaDriverEntryPointSuccess) return function;
  cudaGetLastError();
  return nullptr;
}

inline TensorMapEncoder tensor_map_encoder() {
  static const auto found =
      reinterpret_cast<TensorMapEncoder>(driver_function("cuTensorMapEncodeTiled"));
  return found;
}
inline Im2colMapEncoder im2col_map_encoder() {
  static const auto found =
      reinterpret_cast<Im2colMapEncoder>(driver_function("cuTensorMapEncodeIm2col"));
  return found;
}

}  // namespace rm::cuda_ops
