// The current device of the thread, for the length of a scope.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "rm/plugin.hpp"

namespace rm::cuda {

/// Throws plugin::Error for a failed call of the CUDA runtime; `what` was expected.
inline void check_cuda(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  cudaGetLastError();  // reported here: not once more by the next launch
  const bool captures = e >= cudaErrorStreamCaptureUnsupported && e <= cudaErrorStreamCaptureWrongThread;
  const rm_code code = e == cudaErrorMemoryAllocation ? RM_RESOURCE_EXHAUSTED
                       : captures                      ? RM_FAILED_PRECONDITION
                                                       : RM_UNAVAILABLE;
  throw plugin::Error(code, std::string("[cuda] expected ") + what + ", got " +
                                cudaGetErrorName(e) + ": " + cudaGetErrorString(e));
}

/// What this thread does beside its own recordings neither fails for another thread's recording of a
/// graph nor ends it: memory, streams, waits, kernels that are loaded when they are first launched.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check_cuda(cudaGetDevice(&before_), "a current device");
    if (before_ == device) {
      before_ = -1;
    } else {
      check_cuda(cudaSetDevice(device), "the device");
    }
  }
  ~DeviceScope() {
    if (before_ >= 0) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = -1;
};

}  // namespace rm::cuda
