// A plan recorded once, in parts around the steps that cannot be. On memory of its own: a run copies inputs in, launches once and copies outputs
// out; inputs that are updated in place are not copied, they are part of the recording. Or in place:
// all inputs and outputs are, for callers whose tensors lie where they lay before.
#pragma once

#include <memory>
#include <vector>

#include "engine/instance.hpp"
#include "engine/tensor_view.hpp"
#include "runtime/device.hpp"

namespace rm::engine {

/// Not thread safe: one run at a time, all on one stream.
class RecordedRun {
 public:
  /// Throws rm::Error when a kernel cannot be recorded or there is no memory.
  /// `ticket` is dropped with the recording. `outputs`: in place, as `run` is given them; null: on
  /// memory of its own.
  RecordedRun(const Instance& instance, const std::vector<TensorView>& inputs,
              const std::vector<void*>* outputs, runtime::Device& device,
              std::shared_ptr<void> ticket);

  /// The inputs of a plan that are updated in place, as a run was given them.
  static std::vector<const void*> updated(const Instance& instance,
                                          const std::vector<TensorView>& inputs);

  /// Whether every step of the plan may be recorded.
  static bool whole(const Instance& instance);
  /// Whether so many may that parts are worth it.
  static bool possible(const Instance& instance);
  /// The memory that a recording takes.
  static int64_t bytes(const Instance& instance);

  /// Everything that is used where it lies lies where it was recorded.
  bool takes(const std::vector<TensorView>& inputs, const std::vector<void*>& outputs) const;
  bool in_place() const { return in_place_; }
  /// `outputs`: memory of each output, null for one that is an input. Throws the error of a step that
  /// is launched by itself.
  void run(const std::vector<TensorView>& inputs, const std::vector<void*>& outputs,
           rm_stream* stream);

 private:
  struct Staged {
    std::byte* memory;  // null: used where it lies
    const void* given;  // of what is used where it lies
    size_t bytes;
  };

  runtime::Device& device_;
  const std::shared_ptr<void> ticket_;
  const bool in_place_;
  std::shared_ptr<void> memory_;
  std::vector<Staged> inputs_, outputs_;
  std::unique_ptr<runtime::ExecutionContext> context_;
  struct Part {
    std::unique_ptr<runtime::Recording> recording;  // null: these steps are launched
    size_t first, behind;
  };
  std::vector<Part> parts_;
};

}  // namespace rm::engine
