// _core.SelfCheck: the judge of kernel rows that programs share.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind.hpp"
#include "cache/compile_cache.hpp"
#include "selfcheck/self_check.hpp"

namespace py = pybind11;

namespace rm::bindings {
namespace {

std::shared_ptr<selfcheck::SelfCheck> make(const std::string& mode, const cache::CompileCache* cache) {
  selfcheck::Settings settings;
  settings.mode = selfcheck::mode_from(mode);
  if (cache != nullptr) {
    settings.directory = cache->folder("kernels");
    settings.writable = cache->settings().mode != cache::Mode::kRead;
  }
  return std::make_shared<selfcheck::SelfCheck>(std::move(settings));
}

py::dict report_of(const selfcheck::SelfCheck& check) {
  const selfcheck::Report r = check.report();
  py::dict out;
  out["checked"] = r.checked;
  out["remembered"] = r.remembered;
  out["milliseconds"] = r.milliseconds;
  out["refused"] = r.refused;
  return out;
}

}  // namespace

void bind_selfcheck(py::module_& m) {
  py::class_<selfcheck::SelfCheck, std::shared_ptr<selfcheck::SelfCheck>>(
      m, "SelfCheck",
      "Runs a kernel row once before a machine uses it for a kind of problem, and compares it with "
      "the operator's reference. Verdicts are kept in the cache's folder.")
      .def(py::init(&make), py::arg("mode") = "auto", py::arg("cache") = nullptr,
           "`mode`: auto, off or always. Raises CoreError for another one.")
      .def("report", &report_of,
           "Rows checked here and remembered from other processes, milliseconds spent on the former, "
           "and a line for each row that was refused.");
}

}  // namespace rm::bindings
