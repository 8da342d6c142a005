// Programs that serve the calls of one entry without Python between arguments and results: the
// router chooses among them by the sizes of a call and runs the one that fits.
//
// Python (engines/compiled_call.py) adds a program once nothing of a call is left to decide there:
// it was compared, timed and measured, and takes and gives nothing but tensors. What this table does
// not serve goes to the entry's `run`. Everything here needs the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/program.hpp"
#include "exchange/framework_program.hpp"
#include "ir/signature.hpp"
#include "router/torch.hpp"

namespace rm::router {

/// What torch specialises a capture on, of tensors whose ranks are known: for each axis whether its
/// size is 0, 1 or more, and for images whether they are row-major, channels last or neither.
/// Equal patterns here are equal ones of engines/call_parts.py: unfold.
using SizePattern = std::vector<std::uint8_t>;

class DirectProgram {
 public:
  /// `example`: tensors of a call that the program served. `result`: the number of the result that
  /// is the module's output, or -1: `build(results, tensors)` makes it. `only_compared`: a set of
  /// kernels that nobody compared is left to Python. `unless`: of a program that is not for the host,
  /// else None: where it returns true, and for tensors that lie elsewhere, Python decides.
  DirectProgram(std::shared_ptr<exchange::FrameworkProgram> program, ir::Signature::Test test,
                const pybind11::sequence& example, int result, pybind11::object build,
                bool only_compared, std::int64_t until_sample, pybind11::object unless);

  /// Served since this was asked last.
  std::int64_t take_calls();

  /// As tp_traverse and tp_clear of its Python object, which alone owns what is visited.
  int traverse(visitproc visit, void* arg) const;
  void clear() { build_ = unless_ = PyRef(); }

  std::int64_t until_sample;  // calls to serve before Python compares one with the original's

 private:
  friend class DirectPrograms;
  std::shared_ptr<exchange::FrameworkProgram> program_;
  ir::Signature::Test test_;
  SizePattern pattern_;
  int result_;
  PyRef build_, unless_;  // the latter may be empty
  bool only_compared_;
  std::int64_t calls_ = 0;
};

/// Those of one entry. It keeps the Python objects of its programs alive: an object is collected
/// when nobody holds it any more, whoever holds the program.
class DirectPrograms {
 public:
  /// `program`: a DirectProgram's object.
  void add(pybind11::object program);
  /// Calls that run it now go on.
  void remove(const std::shared_ptr<DirectProgram>& program);
  bool empty() const { return programs_.empty(); }

  /// What became of a call.
  enum class Served {
    kNo,        // Python decides
    kYes,       // the output is given, or Python's error indicator is set
    kDeclined,  // it is no call for the program: `code` and `detail` say why
  };
  /// `tensors`: the call's, a tuple. `core_error`: the type of the core's errors.
  Served serve(PyObject* tensors, PyObject* core_error, PyObject** output,
               std::string* code, std::string* detail);

  /// As tp_traverse and tp_clear of its Python object.
  int traverse(visitproc visit, void* arg) const;
  void clear() { const auto dropped = std::exchange(programs_, {}); }

 private:
  struct Held {
    PyRef object;
    std::shared_ptr<DirectProgram> program;
  };
  std::vector<Held> programs_;
};

void bind_direct(pybind11::module_& router);

}  // namespace rm::router
