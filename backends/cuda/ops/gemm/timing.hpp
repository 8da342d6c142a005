// Times launches in a graph, as callers that care for time will run them; never inside a capture.
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

/// What a timing holds; destroyed whatever happens.
struct TimingTools {
  cudaStream_t side{};
  cudaEvent_t start{}, stop{};
  cudaGraph_t graph{};
  cudaGraphExec_t exec{};
  TimingTools() = default;
  TimingTools(const TimingTools&) = delete;
  TimingTools& operator=(const TimingTools&) = delete;
  ~TimingTools() {
    if (exec) cudaGraphExecDestroy(exec);
    if (graph) cudaGraphDestroy(graph);
    if (start) cudaEventDestroy(start);
    if (stop) cudaEventDestroy(stop);
    if (side) cudaStreamDestroy(side);
  }
  bool make() {
    return cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking) == cudaSuccess &&
           cudaEventCreate(&start) == cudaSuccess && cudaEventCreate(&stop) == cudaSuccess;
  }
};

/// run(stream) launches what is timed. The best of five turns of four launches, in microseconds a
/// launch; a graph before the timed one hides the host's part.
template <class Run>
Status time_launches(Stream stream, Run&& run, float* us) {
  constexpr int kLaunches = 4, kTurns = 5;
  TimingTools t;
  if (!t.make()) return launch_status("gemm");
  if (Status warm = run(stream); !warm) return warm;
  if (cudaStreamBeginCapture(t.side, cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
    return launch_status("gemm");
  }
  Status status;
  for (int i = 0; status && i < kLaunches; ++i) status = run(t.side);
  const cudaError_t ended = cudaStreamEndCapture(t.side, &t.graph);
  if (!status) return status;
  if (ended != cudaSuccess || cudaGraphInstantiate(&t.exec, t.graph, 0) != cudaSuccess) {
    return launch_status("gemm");
  }
  *us = 1e30f;
  for (int turn = 0; status && turn < kTurns; ++turn) {
    cudaGraphLaunch(t.exec, stream);
    cudaEventRecord(t.start, stream);
    cudaGraphLaunch(t.exec, stream);
    cudaEventRecord(t.stop, stream);
    status = cuda_status("gemm", cudaEventSynchronize(t.stop), "a timed launch without errors");
    float ms = 0;
    if (status && cudaEventElapsedTime(&ms, t.start, t.stop) == cudaSuccess) {
      *us = std::min(*us, ms * 1000.0f / kLaunches);
    }
  }
  return status;
}

}  // namespace rm::cuda_ops
