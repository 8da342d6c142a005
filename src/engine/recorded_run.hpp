// A plan recorded once, on memory of its own: a run copies inputs in, launches once and copies
// outputs out. Inputs that are updated in place are not copied: they are part of the recording.
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
  /// `ticket` is dropped with the recording.
  RecordedRun(const Instance& instance, const std::vector<TensorView>& inputs,
              runtime::Device& device, std::shared_ptr<void> ticket);

  /// The inputs of a plan that are updated in place, as a run was given them.
  static std::vector<const void*> updated(const Instance& instance,
                                          const std::vector<TensorView>& inputs);

  /// Whether every step of the plan may be recorded.
  static bool possible(const Instance& instance);
  /// The memory that a recording takes.
  static int64_t bytes(const Instance& instance);

  /// Whether the inputs that are updated in place are those of the recording.
  bool takes(const std::vector<TensorView>& inputs) const;
  /// `outputs`: memory of each output, null for one that is an input.
  void run(const std::vector<TensorView>& inputs, const std::vector<void*>& outputs,
           rm_stream* stream);

 private:
  struct Staged {
    std::byte* memory;  // null: used where it lies
    const void* given;  // of an input that is used where it lies
    size_t bytes;
  };

  runtime::Device& device_;
  const std::shared_ptr<void> ticket_;
  std::shared_ptr<void> memory_;
  std::vector<Staged> inputs_, outputs_;
  std::unique_ptr<runtime::ExecutionContext> context_;
  std::unique_ptr<runtime::Recording> recording_;
};

}  // namespace rm::engine
