// Writes that leave no trace in the parameter they change: through `parameter.data`, and by
// optimisers whose fused kernels do not count versions. Other tensors: contents.hpp.
//
// Invariant: whoever got `data` of a watched parameter may have written to it until that alias is
// gone; a guard that watches the tensor hears of both.  The GIL is held wherever this is used.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace rm::router {

class WriteTracker {
 public:
  WriteTracker() = default;
  WriteTracker(const WriteTracker&) = delete;
  WriteTracker& operator=(const WriteTracker&) = delete;
  ~WriteTracker();

  /// The tensor is kept alive by whoever watches it, and afterwards by its row as long as an alias
  /// lives: no other tensor may get its address meanwhile.
  void watch(PyObject* tensor);
  void unwatch(PyObject* tensor) noexcept;

  /// A watched tensor may have been written; `alias`, when there is one, may be as long as it
  /// lives.  Others cost one look-up.
  void note(PyObject* tensor, PyObject* alias) noexcept;

  /// Moves with every note: a guard compares this before it looks at single tensors.
  std::uint64_t clock() const noexcept { return clock_; }
  std::uint64_t last_write(PyObject* tensor) const noexcept;
  /// Somebody still holds an alias.
  bool has_alias(PyObject* tensor) noexcept;

 private:
  struct Row {
    std::uint32_t guards = 0;
    bool owned = false;              // no guard keeps the tensor alive any more: this row does
    std::uint64_t at = 0;            // the clock of the last note
    std::vector<PyObject*> aliases;  // weak references, owned
  };
  static void drop_dead(Row& row) noexcept;
  void drop_orphans() noexcept;

  std::unordered_map<PyObject*, Row> watched_;
  std::uint64_t clock_ = 0;
  std::vector<PyObject*> orphans_;  // tensors that their rows keep alive
};

void bind_write_tracker(pybind11::module_& router);

}  // namespace rm::router
