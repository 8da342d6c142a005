// What an ONNX file says, as plain data: views into the file's bytes, which must outlive it.
//
// Subgraphs stay bytes until an operator is converted that runs them, so reading never nests.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ir/type.hpp"

namespace rm::onnx {

using Ints = std::vector<int64_t>;

struct Tensor {
  std::string name;
  int64_t dtype = 0;
  Ints dims;
  std::string_view raw;  // little endian
  Ints integers;         // the typed fields; float16 and bfloat16 as bits
  std::vector<double> reals;
  bool is_external = false;
  std::map<std::string, std::string, std::less<>> external;  // location, offset, length
};

struct Attribute {
  int64_t kind = 0;
  double real = 0;
  int64_t integer = 0;
  std::string text;
  Ints integers;
  std::vector<double> reals;
  Tensor tensor;
  bool has_graph = false;
  std::string_view graph;  // a subgraph, read by read_graph
  std::string reference;   // within a function: the attribute of the call that it stands for
};

struct Node {
  std::string name, op, domain;
  std::vector<std::string> inputs, outputs;
  std::map<std::string, Attribute, std::less<>> attributes;
};

struct Size {
  int64_t value = -1;  // -1: `name`, or unknown when that is empty
  std::string name;
};

struct Port {
  std::string name;
  int64_t dtype = 0;
  bool has_shape = false;
  std::vector<Size> dims;
};

struct Graph {
  std::vector<Node> nodes;
  std::vector<Tensor> initializers;
  std::vector<Port> inputs, outputs;
};

/// Nodes that stand for one operator; inputs and outputs are names.
struct Function {
  std::string name, domain;
  int64_t opset = 0;  // 0: the model's
  std::vector<std::string> inputs, outputs;
  std::map<std::string, Attribute, std::less<>> defaults;
  std::vector<Node> nodes;
};

struct Model {
  int64_t opset = 0;
  Graph graph;
  std::vector<Function> functions;
};

/// Throws rm::Error RM340 for bytes that are no ONNX file.
Model read_model(std::string_view bytes);
/// A subgraph of an attribute.
Graph read_graph(std::string_view bytes);

/// The IR's element type. Throws RM341 naming `where` for a type that it has not.
ir::DType dtype_of(int64_t onnx_dtype, const std::string& where);
/// Its elements as contiguous bytes, held in the file or appended to `storage`. Throws RM340 unless
/// there are exactly as many as its shape says.
std::string_view tensor_bytes(const Tensor& tensor, std::string* storage);
/// Bytes that its shape asks for. Throws RM340 when they are more than an address space holds.
int64_t tensor_size(const Tensor& tensor);

}  // namespace rm::onnx
