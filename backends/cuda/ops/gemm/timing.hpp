// Times launches by events on the caller's stream; never inside a capture.
#pragma once

#include <algorithm>

#include "_shim/dispatch_shim.hpp"

namespace rm::cuda_ops {

inline bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    cudaGetLastError();
    return true;  // nothing may be timed
  }
  return status != cudaStreamCaptureStatusNone;
}

/// The best of five turns of four launches, in microseconds a launch.
template <class Run>
Status time_launches(Stream stream, Run&& run, float* us) {
  cudaEvent_t start{}, stop{};
  if (cudaEventCreate(&start) != cudaSuccess) return launch_status("gemm");
  if (cudaEventCreate(&stop) != cudaSuccess) {
    cudaEventDestroy(start);
    return launch_status("gemm");
  }
  Status status = run();  // warm-up
  *us = 1e30f;
  for (int turn = 0; status && turn < 5; ++turn) {
    cudaEventRecord(start, stream);
    for (int i = 0; status && i < 4; ++i) status = run();
    cudaEventRecord(stop, stream);
    float ms = 0;
    if (status) {
      status = cuda_status("gemm", cudaEventSynchronize(stop), "a timed launch without errors");
    }
    if (status && cudaEventElapsedTime(&ms, start, stop) == cudaSuccess) {
      *us = std::min(*us, ms * 250.0f);
    }
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  return status;
}

}  // namespace rm::cuda_ops
