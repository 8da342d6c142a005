// The worker's side: serves one client over the socket it was started with, until that end closes.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/file.hpp"
#include "worker/channel.hpp"
#include "worker/protocol.hpp"

namespace rm::worker {

/// A tensor in memory this process has mapped; constants are read-only.
struct MappedTensor {
  const TensorSlot* slot = nullptr;
  void* data = nullptr;
};
using MappedTensors = std::vector<MappedTensor>;

/// Tensors on the device that outlive a run.
class States {
 public:
  virtual ~States() = default;
};

/// A program ready to run on the tensors it was loaded with.
class Runnable {
 public:
  virtual ~Runnable() = default;
  /// `states` (or nullptr) are updated in place.
  virtual void run(States* states) = 0;
};

struct CopyJob {
  States* from = nullptr;  // one of the two is nullptr: that side is `host`
  States* to = nullptr;
  StatesRegion region;
  MappedTensors host;
};

struct CompileJob {
  uint64_t device = 0;
  const std::string& program;
  const std::vector<std::pair<std::string, std::string>>& options;
  MappedTensors constants;
  std::function<void(double fraction, std::string_view stage)> progress;
  std::function<bool()> cancelled;
};

struct LoadJob {
  uint64_t device = 0;
  std::string_view artefact;  // in a file it stays mapped only during load()
  MappedTensors constants, inputs, outputs;  // stay mapped as long as the Runnable lives
  const Slots& states;
};

/// What a backend does in its worker. Runs come from `executions()` threads, never two of one
/// Runnable at once; everything else comes from another thread. The client makes and copies states
/// only while nothing runs.
class Service {
 public:
  virtual ~Service() = default;
  virtual Ready describe() = 0;
  /// How many runs may be under way at once. Asked after describe().
  virtual size_t executions() { return 1; }
  virtual Bytes compile(const CompileJob& job) = 0;
  virtual std::unique_ptr<Runnable> load(const LoadJob& job) = 0;
  /// Zeros of these types. `slots` may go after the call.
  virtual std::unique_ptr<States> make_states(uint64_t device, const Slots& slots) = 0;
  virtual void copy_states(const CopyJob& job) = 0;
};

/// Returns when the client is done. The process ends by itself, with everything it started, when
/// the client is gone and the service does not return.
void serve(Fd socket, Service& service);

}  // namespace rm::worker
