// _core.onnx: ONNX files as programs in their text form.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <string_view>

#include "bindings/bind.hpp"
#include "ir/text.hpp"
#include "onnx/importer.hpp"

namespace rm::bindings {

namespace py = pybind11;

namespace {

py::dict import_model(const py::buffer& file) {
  const py::buffer_info info = file.request();
  const std::string_view bytes(static_cast<const char*>(info.ptr),
                               static_cast<size_t>(info.size * info.itemsize));
  onnx::Imported made;
  std::string text;
  {
    py::gil_scoped_release release;
    made = onnx::import_model(bytes);
    text = ir::print(made.graph);
  }
  py::list weights;
  for (const onnx::Weight& w : made.weights) {
    py::dict row;
    std::vector<int64_t> shape;
    for (const ir::Dim& d : w.type.dims) shape.push_back(d.value());
    row["name"] = w.name;
    row["dtype"] = std::string(ir::name(w.type.dtype));
    row["shape"] = shape;
    row["location"] = w.location;
    row["decoded"] = py::bytes(w.decoded);
    row["offset"] = w.in_file.empty() ? w.offset : w.in_file.data() - bytes.data();
    weights.append(row);
  }
  py::dict out;
  out["text"] = text;
  out["inputs"] = made.inputs;
  out["outputs"] = made.outputs;
  out["weights"] = weights;
  return out;
}

}  // namespace

void bind_onnx(py::module_& m) {
  py::module_ o = m.def_submodule("onnx", "ONNX files as programs.");
  o.def("import_model", &import_model, py::arg("file"),
        "text, inputs and outputs (their names in order), weights: rows of name, dtype, shape and "
        "where the bytes are: in `decoded`, else at `offset` of the file or of `location`.");
}

}  // namespace rm::bindings
