#include "training/settled_step.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "engine/instance.hpp"
#include "ir/type.hpp"

namespace py = pybind11;

namespace rm::training {
namespace {

/// Whether the dict's entry is this very object.
bool holds(PyObject* dict, PyObject* key, PyObject* value) noexcept {
  PyObject* found = PyDict_GetItemWithError(dict, key);
  if (found == nullptr) PyErr_Clear();
  return found == value;
}

bool is_none(PyObject* object, PyObject* name) noexcept {
  const PyRef found = PyRef::steal(PyObject_GetAttr(object, name));
  if (!found) PyErr_Clear();
  return found.get() == Py_None;
}

}  // namespace

SettledStep::SettledStep(std::shared_ptr<router::TorchFacts> facts,
                         std::shared_ptr<exchange::FrameworkProgram> program, py::object tree,
                         WatchedOptimizer optimizer, const py::list& batch, py::object hyper,
                         const py::list& trained, const py::list& buffers, const py::list& frozen,
                         const py::list& hooks, const py::list& quiet, const py::list& still)
    : facts_(std::move(facts)),
      program_(std::move(program)),
      tree_(std::move(tree)),
      guard_(tree_.cast<router::TrainedTree&>()),
      optimizer_(std::move(optimizer)),
      counters_(optimizer_.groups()) {
  const auto view = [&](PyObject* t) { views_.push_back(program_->view(t)); };
  for (const py::handle t : batch) {
    view(t.ptr());
    batch_.push_back({views_.back().layout.dtype, views_.back().layout.dims});
  }
  hyper_ = PyRef::borrow(hyper.ptr());
  view(hyper.ptr());
  hyper_memory_ = const_cast<void*>(views_.back().data);
  numbers_.resize(static_cast<size_t>(views_.back().layout.num_elements()));
  if (views_.back().layout.dtype != ir::DType::kF64 || !views_.back().layout.is_contiguous() ||
      numbers_.size() % optimizer_.groups() != 0) {
    throw py::value_error("[settled_step] expected a row of numbers for each group");
  }
  py::list written, counters;
  for (const py::handle row : trained) {
    const auto [parameter, group, states, counter] =
        row.cast<std::tuple<py::object, size_t, py::dict, py::object>>();
    Trained t{PyRef::borrow(parameter.ptr()), PyRef::borrow(counter.ptr()), facts_->use_count(parameter.ptr()),
              group, {}, {}, {}};
    const bool stateless = states.empty() && counter.is_none();  // asking for its state would make one
    const auto all = py::reinterpret_borrow<py::object>(optimizer_.states());
    t.held = PyRef::borrow(stateless ? Py_None : py::object(all[parameter]).ptr());
    hold(parameter.ptr());
    written.append(parameter);
    for (const auto& [name, state] : states) {
      t.names.push_back(PyRef::borrow(name.ptr()));
      t.states.push_back(PyRef::borrow(state.ptr()));
      hold(state.ptr());
      written.append(state);
    }
    if (!counter.is_none()) {
      counters_.at(group).push_back(counter_of(counter.ptr()));
      counters.append(counter);
    }
    trained_.push_back(std::move(t));
  }
  for (const py::handle t : buffers) {
    hold(t.ptr());
    written.append(t);
  }
  for (const py::handle t : written) view(t.ptr());
  find_spans();
  size_t bytes = 0;
  for (size_t i = views_.size() - buffers.size(); i < views_.size(); ++i) {
    if (views_[i].layout.is_empty() || views_[i].device.device_type != kDLCPU) continue;
    buffers_.push_back(span_of(views_[i]));
    bytes += static_cast<size_t>(buffers_.back().last - buffers_.back().first);
  }
  kept_.resize(bytes);
  for (const py::handle t : frozen) {
    hold(t.ptr());
    view(t.ptr());
    frozen_.push_back({PyRef::borrow(t.ptr()), facts_->requires_grad(t.ptr()), facts_->is_parameter(t.ptr())});
  }
  for (const py::handle t : counters) written.append(t);
  written_ = PyRef::borrow(written.ptr());
  increment_ = PyRef::borrow(py::object(py::module_::import("torch._C").attr("_increment_version")).ptr());
  for (const py::handle dict : hooks) hooks_.push_back(PyRef::borrow(py::cast<py::dict>(dict).ptr()));
  for (const py::handle function : quiet) quiet_.push_back(PyRef::borrow(function.ptr()));
  for (const py::handle row : still) {
    const auto [dict, name, value] = row.cast<std::tuple<py::dict, py::str, py::object>>();
    still_.push_back({PyRef::borrow(dict.ptr()), PyRef::borrow(name.ptr()), PyRef::borrow(value.ptr())});
  }
}

void SettledStep::hold(PyObject* tensor) {
  Tensor t{PyRef::borrow(tensor), {}};
  const bool plain = facts_->is_plain_tensor(tensor) && !facts_->is_lazy_view(tensor);
  if (!plain || !facts_->remember(tensor, &t.raw)) {
    throw py::value_error("[settled_step] expected a tensor whose fields can be compared");
  }
  tensors_.push_back(std::move(t));
}

float* SettledStep::counter_of(PyObject* counter) {
  DLTensor seen{};
  const bool plain = facts_->view(counter, &seen) && seen.device.device_type == kDLCPU && seen.ndim == 0 &&
                     seen.dtype.code == kDLFloat && seen.dtype.bits == 32;
  if (!plain) throw py::value_error("[settled_step] expected a counter of steps that is a float32 of the host");
  hold(counter);
  return reinterpret_cast<float*>(static_cast<char*>(seen.data) + seen.byte_offset);
}

SettledStep::Span SettledStep::span_of(const engine::TensorView& view) {
  const auto* first = static_cast<const char*>(view.data);
  return {first, first + engine::extent_bytes(view.layout)};
}

// Behind the batch and the numbers all views are of what the step writes.
void SettledStep::find_spans() {
  for (size_t i = batch_.size() + 1; i < views_.size(); ++i) {
    if (!views_[i].layout.is_empty()) updated_.push_back(span_of(views_[i]));
  }
  std::sort(updated_.begin(), updated_.end(), [](const Span& a, const Span& b) { return a.first < b.first; });
}

bool SettledStep::is_quiet() const noexcept {
  const char* detail = nullptr;
  if (facts_->modes(&detail) != router::Reason::kNone || !facts_->grad_enabled()) return false;
  for (const PyRef& function : quiet_) {
    const PyRef answer = PyRef::steal(PyObject_CallNoArgs(function.get()));
    if (!answer) PyErr_Clear();
    if (answer.get() != Py_False && answer.get() != Py_None) return false;
  }
  for (const Entry& e : still_) {
    if (!holds(e.dict.get(), e.name.get(), e.value.get())) return false;
  }
  return std::all_of(hooks_.begin(), hooks_.end(), [](const PyRef& d) { return PyDict_GET_SIZE(d.get()) == 0; });
}

bool SettledStep::tensors_unchanged() const noexcept {
  return std::all_of(tensors_.begin(), tensors_.end(),
                     [&](const Tensor& t) {
                       PyObject* tensor = t.object.get();
                       return facts_->is_plain_tensor(tensor) && facts_->same_place(tensor, t.raw);
                     });
}

// What wants a gradient now is trained, or gets a `grad`; one that was set by hand is for the optimizer to clear.
bool SettledStep::frozen_unchanged() const noexcept {
  static PyObject* const grad = PyUnicode_InternFromString("grad");
  return std::all_of(frozen_.begin(), frozen_.end(), [&](const Frozen& f) {
    PyObject* t = f.tensor.get();
    return facts_->requires_grad(t) == f.wants_gradient && (!f.is_parameter || is_none(t, grad));
  });
}

// The forward writes running means before a loss may refuse its targets; whoever makes the step again begins
// with what they were.
void SettledStep::keep_buffers() {
  char* to = kept_.data();
  for (const Span& b : buffers_) to = std::copy(b.first, b.last, to);
}

void SettledStep::restore_buffers() noexcept {
  const char* from = kept_.data();
  for (const Span& b : buffers_) {
    const auto bytes = b.last - b.first;
    std::copy(from, from + bytes, const_cast<char*>(b.first));
    from += bytes;
  }
}

bool SettledStep::states_unchanged() noexcept {
  static PyObject* const grad = PyUnicode_InternFromString("grad");
  static PyObject* const hooks = PyUnicode_InternFromString("_backward_hooks");
  static PyObject* const behind = PyUnicode_InternFromString("_post_accumulate_grad_hooks");
  static PyObject* const step = PyUnicode_InternFromString("step");
  for (const Trained& t : trained_) {
    PyObject* p = t.parameter.get();
    const std::uint32_t uses = facts_->use_count(p);
    if (uses != 1 && uses != t.uses) return false;
    if (!facts_->requires_grad(p) || !is_none(p, grad) || !is_none(p, hooks) || !is_none(p, behind)) return false;
    PyObject* held = t.held.get();
    if (held == Py_None) continue;
    if (!holds(optimizer_.states(), p, held)) return false;
    for (size_t i = 0; i < t.names.size(); ++i) {
      if (!holds(held, t.names[i].get(), t.states[i].get())) return false;
    }
    if (t.counter.get() != Py_None && !holds(held, step, t.counter.get())) return false;
  }
  return true;
}

bool SettledStep::add_input(PyObject* tensor, size_t index) {
  if (facts_->is_parameter(tensor) || !facts_->is_plain_tensor(tensor) || facts_->requires_grad(tensor)) return false;
  DLTensor seen{};
  if (!facts_->view(tensor, &seen) || facts_->is_lazy_view(tensor)) return false;
  if (facts_->version(tensor) < 0) return false;  // made in inference mode: eager may not keep it for a gradient
  engine::TensorView& view = views_[index];
  const Input& wanted = batch_[index];
  ir::DType dtype{};
  const bool same = seen.device.device_type == view.device.device_type && seen.device.device_id == view.device.device_id &&
                    ir::from_dlpack(seen.dtype, &dtype) && dtype == wanted.dtype &&
                    seen.ndim == static_cast<int32_t>(wanted.dims.size()) &&
                    std::equal(wanted.dims.begin(), wanted.dims.end(), seen.shape);
  if (!same) return false;
  try {
    view = program_->view(tensor);
  } catch (const Error&) {
    return false;  // the long way says what is wrong with it
  }
  if (view.layout.is_empty()) return true;
  const Span mine = span_of(view);
  // The last span that begins in front of its end.
  auto span = std::lower_bound(updated_.begin(), updated_.end(), mine.last,
                               [](const Span& s, const char* at) { return s.first < at; });
  return span == updated_.begin() || std::prev(span)->last <= mine.first;
}

bool SettledStep::batch_fits(py::handle inputs, const py::tuple& targets) {
  if (targets.size() + 1 != batch_.size() || !add_input(inputs.ptr(), 0)) return false;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!add_input(PyTuple_GET_ITEM(targets.ptr(), static_cast<Py_ssize_t>(i)), i + 1)) return false;
  }
  return true;
}

bool SettledStep::fill_numbers() noexcept {
  const size_t width = numbers_.size() / optimizer_.groups();
  for (size_t g = 0; g < optimizer_.groups(); ++g) {
    const std::vector<float*>& counters = counters_[g];
    const float count = counters.empty() ? 0.0F : *counters[0];
    const bool same = std::all_of(counters.begin(), counters.end(), [&](const float* c) { return *c == count; });
    if (!same || !optimizer_.numbers(g, count, &numbers_[g * width])) return false;
  }
  return true;
}

void SettledStep::count_step() {
  for (std::vector<float*>& counters : counters_) {
    for (float* counter : counters) *counter += 1.0F;
  }
  const PyRef done = PyRef::steal(PyObject_CallOneArg(increment_.get(), written_.get()));
  if (!done) throw py::error_already_set();
}

py::object SettledStep::run(py::handle inputs, const py::tuple& targets) {
  const bool same = is_quiet() && guard_.check() == router::Reason::kNone && optimizer_.unchanged() &&
                    tensors_unchanged() && frozen_unchanged() && states_unchanged() && batch_fits(inputs, targets) && fill_numbers();
  if (!same) return py::none();
  program_->write(hyper_memory_, numbers_.data(), numbers_.size() * sizeof(double));
  keep_buffers();
  py::list results;
  try {
    results = program_->run(views_, false);
  } catch (const Error&) {
    restore_buffers();
    throw;
  }
  count_step();
  return results[0];
}

}  // namespace rm::training
