// _core.onnx: ONNX files as programs in their text form.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <string_view>

#include "bindings/bind.hpp"
#include "ir/text.hpp"
#include "onnx/importer.hpp"

namespace rm::bindings {

namespace py = pybind11;

namespace {

onnx::GivenInputs given_inputs(const py::dict& rows) {
  onnx::GivenInputs out;
  for (const auto& [name, row] : rows) {
    const auto [sizes, bytes] = row.cast<std::pair<onnx::Ints, std::optional<py::bytes>>>();
    onnx::Given& made = out[name.cast<std::string>()];
    made.sizes = sizes;
    if (bytes) made.bytes = std::string(*bytes);
  }
  return out;
}

py::dict import_model(const py::buffer& file, const py::dict& known) {
  const onnx::GivenInputs given = given_inputs(known);
  const py::buffer_info info = file.request();
  const std::string_view bytes(static_cast<const char*>(info.ptr),
                               static_cast<size_t>(info.size * info.itemsize));
  onnx::Imported made;
  std::string text;
  {
    py::gil_scoped_release release;
    made = onnx::import_model(bytes, given);
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
  py::list ports;
  for (const onnx::Port& port : made.ports) {
    std::vector<int64_t> sizes;
    for (const onnx::Size& size : port.dims) sizes.push_back(size.name.empty() ? size.value : -1);
    py::object shape = port.has_shape ? py::cast(sizes) : py::none();
    const std::string dtype(ir::name(onnx::dtype_of(port.dtype, "'" + port.name + "'")));
    ports.append(py::make_tuple(dtype, shape));
  }
  out["ports"] = ports;
  out["needed_values"] =
      std::vector<std::string>(made.needed_values.begin(), made.needed_values.end());
  out["needs_sizes"] = made.needs_sizes;
  return out;
}

}  // namespace

void bind_onnx(py::module_& m) {
  py::module_ o = m.def_submodule("onnx", "ONNX files as programs.");
  o.def(
      "import_model", &import_model, py::arg("file"), py::arg("given") = py::dict(),
      "text, inputs and outputs (their names in order), ports: element type and sizes (-1: any) of "
      "each input, weights: rows of name, dtype, shape and where the bytes are: in `decoded`, else "
      "at `offset` of the file or of `location`. `given`: by input, its sizes and None or the bytes "
      "of its values. What else an import needs to be told is in needed_values (inputs) and "
      "needs_sizes; there is no program then.");
}

}  // namespace rm::bindings
