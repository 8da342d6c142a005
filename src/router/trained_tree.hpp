// The guard of a step that trains a module, on its own.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "router/guard.hpp"
#include "router/torch.hpp"

namespace rm::router {

/// Is the tree still what the program was made from? A step asks before each run.
class TrainedTree {
 public:
  TrainedTree(std::shared_ptr<TorchFacts> facts, pybind11::object module,
              const pybind11::object& sources);

  /// What speaks against the program; kNone when nothing does.
  Reason check();
  /// The same with its detail, for Python: (reason code, detail), or None.
  pybind11::object why_not();

 private:
  std::shared_ptr<TorchFacts> facts_;
  pybind11::object module_;
  Guard guard_;
  Reason verdict_ = Reason::kNone;
};

}  // namespace rm::router
