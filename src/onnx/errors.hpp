// How messages of an import name a node, and the error for a file that contradicts itself.
#pragma once

#include <string>

#include "base/error.hpp"
#include "onnx/model.hpp"

namespace rm::onnx {

inline std::string label(const Node& node) {
  std::string out = node.domain.empty() ? "" : node.domain + ".";
  out += node.op;
  const std::string& name =
      node.name.empty() && !node.outputs.empty() ? node.outputs[0] : node.name;
  return out + " '" + name + "'";
}

[[noreturn]] inline void damaged(const std::string& message) {
  throw Error(RM_INVALID_ARGUMENT, "[onnx] expected " + message + "; try checking the file",
              "RM340");
}

}  // namespace rm::onnx
