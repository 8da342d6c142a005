// An optimiser of torch's as one program knows it: its groups and hooks, read through CPython alone.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "autograd/optimizers.hpp"
#include "router/torch.hpp"

namespace rm::training {

using router::PyRef;

/// Nothing in it changes what a step computes but the numbers of its groups: those are read anew.
class WatchedOptimizer {
 public:
  /// `rules`: by group. `global_hooks`: dicts of hooks of all optimizers, in which what is there
  /// now is known to be harmless.
  WatchedOptimizer(pybind11::object optimizer, std::vector<autograd::GroupRule> rules,
                   const pybind11::list& global_hooks);

  /// Groups with the same members, settings and hooks as when it was made; a Python error is never
  /// left set.
  bool unchanged() const noexcept;

  size_t groups() const { return groups_.size(); }
  /// Whether a group's row of `hyper` could be read: its numbers are Python's, those that were not
  /// zero are not, and eager would not divide by zero. `count`: the steps it took.
  bool numbers(size_t group, double count, double* out) const noexcept;
  /// The dict of states by parameter.
  PyObject* states() const noexcept { return states_.get(); }

 private:
  struct Group {
    PyRef dict, members;         // `params`, a list
    std::vector<PyRef> items;    // of it
    std::vector<PyRef> settings;  // that choose the formula, in the order of their names
    autograd::GroupRule rule;
  };
  struct Hooks {
    PyRef dict;
    std::vector<PyRef> values;
  };
  bool same_group(const Group& group) const noexcept;

  PyRef optimizer_, attributes_, list_, states_;
  PyTypeObject* type_;  // kept by the optimizer
  std::vector<PyRef> functions_;  // what a step calls of the optimizer: of it, or empty, then of its class
  std::vector<Group> groups_;
  std::vector<Hooks> hooks_;
};

}  // namespace rm::training
