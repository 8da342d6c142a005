// Times launches in graphs, as callers that care for time will run them; never inside a capture.
// Candidates take turns and medians count: who is timed first finds the card cool.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

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

/// Operands of more bytes than this are rarely in the cache when a model comes to them: what is
/// overwritten before each launch to be timed, or nothing.
inline Workspace cold_for(std::int64_t operand_bytes, Workspace scratch) {
  return operand_bytes < (6 << 20) ? Workspace{} : scratch;
}

/// A graph of a few launches, or of one where that is long: a card under load for longer than its
/// callers will keep it runs slower, and not the same way with every kernel.
class TimedGraph {
 public:
  explicit TimedGraph(double about_us) : launches_(about_us > 100 ? 1 : 4) {}
  TimedGraph(const TimedGraph&) = delete;
  TimedGraph& operator=(const TimedGraph&) = delete;
  ~TimedGraph() {
    if (exec_) cudaGraphExecDestroy(exec_);
    if (graph_) cudaGraphDestroy(graph_);
    if (start_) cudaEventDestroy(start_);
    if (stop_) cudaEventDestroy(stop_);
    if (side_) cudaStreamDestroy(side_);
  }

  /// run(stream) launches what is timed; it runs once at once. `cold`: memory that may be
  /// overwritten, and is before each launch, so that little of the operands is left in the cache.
  template <class Run>
  Status make(Stream stream, Workspace cold, Run&& run) {
    if (Status warm = run(stream); !warm) return warm;
    if (cudaStreamCreateWithFlags(&side_, cudaStreamNonBlocking) != cudaSuccess ||
        cudaEventCreate(&start_) != cudaSuccess || cudaEventCreate(&stop_) != cudaSuccess ||
        cudaStreamBeginCapture(side_, cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
      return launch_status("gemm");
    }
    Status status;
    for (int i = 0; status && i < launches_; ++i) {
      if (cold.bytes) cudaMemsetAsync(cold.data, 0, cold.bytes, side_);
      status = run(side_);
    }
    const cudaError_t ended = cudaStreamEndCapture(side_, &graph_);
    if (!status) return status;
    if (ended != cudaSuccess || cudaGraphInstantiate(&exec_, graph_, 0) != cudaSuccess) {
      return launch_status("gemm");
    }
    return {};
  }

  /// One more sample; where launches are short a turn before the timed one hides the host's part.
  Status turn(Stream stream) {
    if (launches_ > 1) cudaGraphLaunch(exec_, stream);
    cudaEventRecord(start_, stream);
    cudaGraphLaunch(exec_, stream);
    cudaEventRecord(stop_, stream);
    Status status =
        cuda_status("gemm", cudaEventSynchronize(stop_), "a timed launch without errors");
    float ms = 0;
    if (status && cudaEventElapsedTime(&ms, start_, stop_) == cudaSuccess) {
      samples_.push_back(ms * 1000.0f / static_cast<float>(launches_));
    }
    return status;
  }

  /// Microseconds a launch, what made the operands cold included.
  float median() const {
    std::vector<float> sorted = samples_;
    std::sort(sorted.begin(), sorted.end());
    return sorted.empty() ? 1e30f : sorted[sorted.size() / 2];
  }

 private:
  int launches_;
  cudaStream_t side_{};
  cudaEvent_t start_{}, stop_{};
  cudaGraph_t graph_{};
  cudaGraphExec_t exec_{};
  std::vector<float> samples_;
};

/// Candidates, each under a number of the caller's, until the fastest is known.
class TimedChoice {
 public:
  /// about_us: what a launch may take, roughly.
  TimedChoice(Stream stream, Workspace cold, double about_us)
      : stream_(stream), cold_(cold), about_us_(about_us) {}

  /// A candidate that refuses is left out; only a device error comes back.
  template <class Run>
  Status add(int number, Run&& run) {
    auto graph = std::make_unique<TimedGraph>(about_us_);
    Status s = graph->make(stream_, cold_, run);
    if (s) s = graph->turn(stream_);
    if (s) entries_.push_back({number, std::move(graph)});
    return s.code == Code::device_error ? s : Status{};
  }

  /// The fastest candidate's number, -1 without any. Fewer take part in later, longer rounds.
  Status fastest(int* out) {
    struct Round {
      std::size_t most;
      float within;
      int turns;
    };
    for (const Round& round : {Round{12, 1.5f, 2}, Round{6, 1.15f, 4}, Round{3, 1.06f, 8}}) {
      keep(round.most, round.within);
      for (int turn = 0; entries_.size() > 1 && turn < round.turns; ++turn) {
        for (Entry& e : entries_) {
          if (Status s = e.graph->turn(stream_); !s) return s;
        }
      }
    }
    keep(1, 1.0f);
    *out = entries_.empty() ? -1 : entries_.front().number;
    return {};
  }

 private:
  struct Entry {
    int number;
    std::unique_ptr<TimedGraph> graph;
  };

  void keep(std::size_t most, float within) {
    std::sort(entries_.begin(), entries_.end(),
              [](const Entry& a, const Entry& b) { return a.graph->median() < b.graph->median(); });
    std::size_t kept = 0;
    while (kept < entries_.size() && kept < most &&
           entries_[kept].graph->median() <= within * entries_.front().graph->median()) {
      ++kept;
    }
    entries_.resize(kept);
  }

  Stream stream_;
  Workspace cold_;
  double about_us_;
  std::vector<Entry> entries_;
};

}  // namespace rm::cuda_ops
