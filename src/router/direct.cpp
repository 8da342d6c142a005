#include "router/direct.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "exchange/core_error.hpp"

namespace rm::router {

namespace py = pybind11;

namespace {

/// As torch says it of a tensor of four axes: strides of axes of size 1 do not matter.
bool is_channels_last(const ir::Layout& layout) {
  std::int64_t expected = 1;
  for (const std::size_t axis : {1, 3, 2, 0}) {
    if (layout.dims[axis] == 1) continue;
    if (layout.strides[axis] != expected) return false;
    expected *= layout.dims[axis];
  }
  return true;
}

void add_pattern(const ir::Layout& layout, SizePattern* out) {
  for (const std::int64_t size : layout.dims) {
    out->push_back(static_cast<std::uint8_t>(std::min<std::int64_t>(size, 2)));
  }
  if (layout.dims.size() != 4) return;
  out->push_back(layout.is_contiguous() ? 0 : is_channels_last(layout) ? 1 : 2);
}

bool accepts(const ir::Signature::Test& test, const std::vector<engine::TensorView>& views) {
  std::vector<std::int64_t> sizes;
  sizes.reserve(16);
  for (const auto& [number, rank] : test.inputs()) {
    if (number >= views.size() || views[number].layout.dims.size() != rank) return false;
    const ir::Ints& dims = views[number].layout.dims;
    sizes.insert(sizes.end(), dims.begin(), dims.end());
  }
  return test.accepts(sizes);
}

template <typename T>
T* cpp_object(PyObject* self) {
  auto* const instance = reinterpret_cast<py::detail::instance*>(self);
  const auto held = instance->get_value_and_holder();
  return held.holder_constructed() ? held.template value_ptr<T>() : nullptr;  // null in __init__
}

/// Lets the garbage collector see what an object of T refers to.
template <typename T>
void make_collectable(PyHeapTypeObject* heap_type) {
  PyTypeObject& type = heap_type->ht_type;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    const T* const found = cpp_object<T>(self);
    return found == nullptr ? 0 : found->traverse(visit, arg);
  };
  type.tp_clear = [](PyObject* self) {
    if (T* const found = cpp_object<T>(self)) found->clear();
    return 0;
  };
}

/// An error of the call and not of the program: the original judges it.
bool is_of_call(const Error& error) {
  return error.code() == RM_INVALID_ARGUMENT || error.code() == RM_OUT_OF_RANGE;
}

}  // namespace

DirectProgram::DirectProgram(std::shared_ptr<exchange::FrameworkProgram> program,
                             ir::Signature::Test test, const py::sequence& example, int result,
                             py::object build, bool only_compared, std::int64_t until_sample_of,
                             py::object unless)
    : until_sample(until_sample_of),
      program_(std::move(program)),
      test_(std::move(test)),
      result_(result),
      build_(PyRef::borrow(build.ptr())),
      unless_(unless.is_none() ? PyRef() : PyRef::borrow(unless.ptr())),
      only_compared_(only_compared) {
  for (const auto& tensor : example) add_pattern(program_->view(tensor.ptr()).layout, &pattern_);
}

std::int64_t DirectProgram::take_calls() { return std::exchange(calls_, 0); }

int DirectProgram::traverse(visitproc visit, void* arg) const {
  Py_VISIT(build_.get());
  Py_VISIT(unless_.get());
  return 0;
}

void DirectPrograms::add(py::object program) {
  auto held = program.cast<std::shared_ptr<DirectProgram>>();
  programs_.push_back({PyRef::borrow(program.ptr()), std::move(held)});
}

void DirectPrograms::remove(const std::shared_ptr<DirectProgram>& program) {
  const auto is_it = [&](const Held& held) { return held.program == program; };
  const auto found = std::find_if(programs_.begin(), programs_.end(), is_it);
  if (found == programs_.end()) return;
  const Held dropped = std::move(*found);  // last: this may run anything
  programs_.erase(found);
}

int DirectPrograms::traverse(visitproc visit, void* arg) const {
  for (const Held& held : programs_) Py_VISIT(held.object.get());
  return 0;
}

DirectPrograms::Served DirectPrograms::serve(PyObject* tensors, PyObject* core_error,
                                             PyObject** output, std::string* code,
                                             std::string* detail) {
  if (programs_.empty()) return Served::kNo;
  try {
    std::vector<engine::TensorView> views;
    const auto count = PyTuple_GET_SIZE(tensors);
    views.reserve(static_cast<std::size_t>(count));
    SizePattern pattern;
    pattern.reserve(16);
    const Held first = programs_.front();  // `unless` may be anything
    const py::handle unless(first.program->unless_.get());
    if (unless && py::cast<bool>(unless())) return Served::kNo;
    try {
      for (Py_ssize_t i = 0; i < count; ++i) {
        views.push_back(first.program->program_->view(PyTuple_GET_ITEM(tensors, i)));
        add_pattern(views.back().layout, &pattern);
      }
    } catch (const Error&) {
      if (unless) return Served::kNo;
      throw;
    }
    const auto fits = [&](const Held& known) {
      return known.program->pattern_ == pattern && accepts(known.program->test_, views);
    };
    const auto found = std::find_if(programs_.begin(), programs_.end(), fits);
    if (found == programs_.end() || found->program->until_sample <= 0) return Served::kNo;
    const Held running = *found;  // the table may change meanwhile
    DirectProgram* const chosen = running.program.get();
    py::list results;
    try {
      results = chosen->program_->run(views, chosen->only_compared_);
    } catch (const engine::NewKernels&) {  // nothing was executed
      return Served::kNo;
    }
    --chosen->until_sample;
    ++chosen->calls_;
    if (chosen->result_ >= 0) {
      *output = results[static_cast<std::size_t>(chosen->result_)].cast<py::object>().release().ptr();
    } else {
      const py::handle build(chosen->build_.get());  // not cleared: `running` holds its object
      *output = build(results, py::handle(tensors)).release().ptr();
    }
  } catch (const Error& error) {
    if (!is_of_call(error)) {
      exchange::set_core_error(core_error, error);
      return Served::kYes;
    }
    const char* const of_call = error.code() == RM_OUT_OF_RANGE ? "RM120" : "RM104";
    *code = error.reason().empty() ? of_call : error.reason();
    *detail = error.what();
    return Served::kDeclined;
  } catch (py::error_already_set& error) {
    error.restore();
  }
  return Served::kYes;
}

void bind_direct(py::module_& router) {
  py::class_<DirectProgram, std::shared_ptr<DirectProgram>>(
      router, "DirectProgram", py::custom_type_setup(make_collectable<DirectProgram>),
      "A program that serves calls without Python.")
      .def(py::init<std::shared_ptr<exchange::FrameworkProgram>, ir::Signature::Test,
                    const py::sequence&, int, py::object, bool, std::int64_t, py::object>(),
           py::arg("program"), py::arg("test"), py::arg("example"), py::arg("result"),
           py::arg("build"), py::arg("only_compared"), py::arg("until_sample"),
           py::arg("unless") = py::none(),
           "For calls whose sizes pass `test` and that look like `example`, the tensors of one that it "
           "served. The output is the result of number `result`, or, where that is -1, "
           "build(results, tensors). Python decides where `unless()`, if given, is true, or, then, a "
           "tensor lies elsewhere.")
      .def("take_calls", &DirectProgram::take_calls, "Calls served since this was asked last.")
      .def_readwrite("until_sample", &DirectProgram::until_sample,
                     "Calls to serve before Python compares one with the original's.");
  py::class_<DirectPrograms, std::shared_ptr<DirectPrograms>>(
      router, "DirectPrograms", py::custom_type_setup(make_collectable<DirectPrograms>),
      "The programs of one entry that serve calls without Python.")
      .def(py::init<>())
      .def("add", &DirectPrograms::add, py::arg("program"))
      .def("remove", &DirectPrograms::remove, py::arg("program"));
}

}  // namespace rm::router
