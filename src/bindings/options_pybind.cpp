// _core.options: the options table and its resolution for Python, which only parses the toml file.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/log.hpp"
#include "base/options.hpp"
#include "bindings/bind.hpp"

namespace py = pybind11;

namespace rm::bindings {
namespace {

using Texts = std::map<std::string, std::string>;

Options::Settings settings_of(const Texts& texts) { return {texts.begin(), texts.end()}; }

py::dict resolve(const Texts& arguments, const Texts& file, const std::string& file_name) {
  py::dict out;
  const Options options = Options::resolve(settings_of(arguments), settings_of(file), file_name);
  for (const auto& [name, value] : options.values()) {
    out[py::str(name)] = py::make_tuple(value.text, value.source);
  }
  return out;
}

py::list table() {
  py::list out;
  for (const OptionSpec& spec : option_table()) {
    py::dict row;
    row["name"] = spec.name;
    row["env"] = spec.env;
    row["group"] = option_group_name(spec.group);
    row["type"] = option_type_name(spec.type);
    row["default"] = spec.default_text;
    row["accepted"] = accepted_values(spec);
    row["affects_artefact"] = spec.affects_artefact;
    row["help"] = spec.help;
    row["unbuilt"] = spec.unbuilt;
    out.append(row);
  }
  return out;
}

}  // namespace

void bind_options(py::module_& m) {
  py::module_ options = m.def_submodule("options", "The one options table.");
  options.def("table", &table, "Every option as a dict, in documentation order.");
  options.def("resolve", &resolve, py::arg("arguments"), py::arg("file") = Texts(),
              py::arg("file_name") = "rm_abstract.toml",
              "Argument > environment > file > default: {name: (canonical text, source)}.");
  options.def(
      "artefact_bytes",
      [](const Texts& values) {
        return py::bytes(Options::resolve(settings_of(values)).artefact_bytes());
      },
      py::arg("values"),
      "The options field of a cache key. Give every resolved value: what is left out comes from "
      "the "
      "environment.");
  options.def(
      "configure_log", [](const std::string& spec) { configure_log(spec); }, py::arg("spec"),
      "Levels by topic, as the option `log` gives them.");
}

}  // namespace rm::bindings
