// A training step about which Python has nothing left to decide (decision 0220).
//
// A step that ran compiled and was compared is remembered with all that the long way looked at:
// modes, module tree, optimiser, tensors. Where all of it is as it was, the step runs from here;
// where anything is not, it does nothing, and the long way, in Python, decides again.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "exchange/framework_program.hpp"
#include "router/torch.hpp"
#include "router/trained_tree.hpp"
#include "training/watched_optimizer.hpp"

namespace rm::training {

class SettledStep {
 public:
  /// What a program trains, by parameter: the parameter, its group, its states with their names, and
  /// its counter of steps (None where the optimiser counts none).
  struct Trained {
    PyRef parameter, counter;
    std::uint32_t uses = 0;  // by torch: one more may be a graph, on whose end somebody hangs a hook
    size_t group = 0;
    std::vector<PyRef> names, states;
    PyRef held;  // the dict that has them; None where there is no state
  };

  /// `batch`: what it was called with, tensors. `hyper`: the program's input of that name. `quiet`:
  /// functions that say whether a mode is on that the program does not have: False or None. `still`:
  /// (dict, name, value) of what must stay the same object. `hooks`: dicts of hooks on the way of
  /// gradients. Throws py::value_error for what cannot be remembered.
  SettledStep(std::shared_ptr<router::TorchFacts> facts,
              std::shared_ptr<exchange::FrameworkProgram> program, pybind11::object tree,
              WatchedOptimizer optimizer, const pybind11::list& batch, pybind11::object hyper,
              const pybind11::list& trained, const pybind11::list& buffers,
              const pybind11::list& frozen, const pybind11::list& hooks,
              const pybind11::list& quiet, const pybind11::list& still);

  /// The loss; None where something is not as it was: nothing has happened then. Throws rm::Error as
  /// the program does: nothing was updated.
  pybind11::object run(pybind11::handle inputs, const pybind11::tuple& targets);

 private:
  struct Tensor {
    PyRef object;
    router::RawTensor raw;
  };
  /// A weight that is only read; whether it wanted a gradient when the step was made.
  struct Frozen {
    PyRef tensor;
    bool wants_gradient, is_parameter;
  };
  struct Input {
    ir::DType dtype;
    ir::Ints dims;
  };
  struct Span {
    const char *first, *last;  // one behind it
  };
  struct Entry {
    PyRef dict, name, value;
  };

  void hold(PyObject* tensor);
  float* counter_of(PyObject* counter);
  static Span span_of(const engine::TensorView& view);  // of one that is not empty
  void find_spans();
  void keep_buffers();
  void restore_buffers() noexcept;
  bool is_quiet() const noexcept;
  bool tensors_unchanged() const noexcept;
  bool frozen_unchanged() const noexcept;
  bool states_unchanged() noexcept;
  bool batch_fits(pybind11::handle inputs, const pybind11::tuple& targets);
  bool add_input(PyObject* tensor, size_t index);
  bool fill_numbers() noexcept;
  void count_step();

  std::shared_ptr<router::TorchFacts> facts_;
  std::shared_ptr<exchange::FrameworkProgram> program_;
  pybind11::object tree_;
  router::TrainedTree& guard_;
  WatchedOptimizer optimizer_;
  std::vector<Trained> trained_;
  std::vector<Tensor> tensors_;   // parameters, states, buffers, frozen weights and counters
  std::vector<PyRef> hooks_, quiet_;
  std::vector<Entry> still_;
  std::vector<Input> batch_;
  std::vector<Frozen> frozen_;
  std::vector<Span> updated_;     // memory that the step writes, sorted
  std::vector<Span> buffers_;     // of the host, that the forward writes
  std::vector<char> kept_;        // what they held before the step
  std::vector<engine::TensorView> views_;  // the program's inputs; the batch comes first
  PyRef hyper_;
  void* hyper_memory_;
  std::vector<double> numbers_;
  std::vector<std::vector<float*>> counters_;  // by group
  PyRef increment_, written_;  // torch's function, and the tensors whose version a step moves
};

}  // namespace rm::training
