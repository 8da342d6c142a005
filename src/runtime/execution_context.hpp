// One runnable copy of a plan: the flat table of kernel calls. Not thread safe; a plan may have any
// number of contexts. run() allocates nothing.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "plan/plan.hpp"
#include "runtime/constant_store.hpp"
#include "runtime/device.hpp"

namespace rm::runtime {

/// Data of the constants of a plan, by constant index, and the packed copies its steps use.
struct BoundConstants {
  std::vector<ConstantPtr> constants;
  std::vector<std::vector<PackedPtr>> packed;  // [step][input], null: used as it is
};

/// Asks every kernel how it wants its constant operands and packs them; `run_copy` runs each copy
/// and may throw to stop.
BoundConstants bind_constants(const plan::Plan& plan, std::vector<ConstantPtr> constants,
                              ConstantStore& store, const RunCopy& run_copy = {});

class ExecutionContext {
 public:
  ExecutionContext(std::shared_ptr<const plan::Plan> plan,
                   std::shared_ptr<const BoundConstants> constants);

  /// Memory for temporaries, at least `plan.arena_bytes`; before the first run, and then only when
  /// it is another one. It must stay valid, as must all other data, until run() has returned.
  void bind_arena(std::byte* base);
  /// `data` is the first byte of the buffer.
  void bind_input(size_t index, const void* data) { bind(inputs_, index, data); }
  void bind_output(size_t index, void* data) { bind(outputs_, index, data); }
  /// Launches all steps in order on `stream`, null on the host, where they have run when this
  /// returns. Throws the first kernel error (outputs are then undefined).
  void run(rm_stream* stream = nullptr) { run(stream, 0, launches_.size()); }
  /// The same for steps `first` up to the one before `behind`.
  void run(rm_stream* stream, size_t first, size_t behind);
  /// run() with the clock read around every step; adds the nanoseconds of step i to step_ns[i].
  /// Waits for every step where `device` is none of the host's.
  void run_timed(std::vector<int64_t>& step_ns, Device& device = *host(),
                 rm_stream* stream = nullptr);

 private:
  void launch(size_t step);
  void bind_stream(rm_stream* stream);
  struct Patch {
    size_t slot;           // into pointers_
    ptrdiff_t byte_offset;
  };
  void bind(const std::vector<std::vector<Patch>>& table, size_t index, const void* data);

  std::shared_ptr<const plan::Plan> plan_;
  std::shared_ptr<const BoundConstants> constants_;
  std::byte* arena_ = nullptr;
  rm_stream* stream_ = nullptr;
  std::vector<const void*> pointers_;  // operands of all steps, back to back
  std::vector<rm_launch> launches_;
  std::vector<Patch> temporaries_;  // byte_offset: in the arena
  std::vector<std::vector<Patch>> inputs_, outputs_;
};

}  // namespace rm::runtime
