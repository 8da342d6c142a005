// An ONNX graph becomes a program in the IR: the state of one import, and the tables of converters.
//
// A value of ONNX is a tensor of the graph, or sizes: integers computed from shapes, which stay
// expressions over symbols until an operator needs them as a tensor.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "ir/graph.hpp"
#include "onnx/model.hpp"

namespace rm::onnx {

using ir::Dim;
using ir::Dims;
using ir::ValueId;

/// A weight of the program: bytes of the file, bytes decoded from typed fields, or another file's.
struct Weight {
  std::string name;
  ir::TensorType type;
  std::string_view in_file;
  std::string decoded;
  std::string location;  // external data, relative to the model's folder
  int64_t offset = 0;
};

struct Imported {
  ir::Graph graph;
  std::vector<std::string> inputs, outputs;
  std::vector<Weight> weights;
};

/// Throws rm::Error: RM340 for a file that is damaged or contradicts itself, RM341 for an operator,
/// element type or form that programs do not have; the message names the node.
Imported import_model(std::string_view bytes);

class Importer {
 public:
  explicit Importer(const Model& model) : model_(model) {}
  Imported run();

  // ---- what converters use ----------------------------------------------------------------------
  int64_t opset() const { return model_.opset; }
  bool has(size_t input) const;
  ValueId in(size_t input);  // throws when it is absent
  ValueId in_or_none(size_t input) { return has(input) ? in(input) : ir::kNoValue; }
  /// The value as sizes, when it is known without the values of tensors.
  std::optional<Dims> sizes(size_t input);
  /// The same; throws when it is not known.
  Dims known(size_t input, const char* what);
  Ints integers(size_t input, const char* what);
  void out(ValueId value, size_t output = 0);
  void out_sizes(Dims sizes, bool is_scalar, size_t output = 0);
  bool is_scalar(size_t input);

  int64_t i(std::string_view name, int64_t otherwise) const;
  double f(std::string_view name, double otherwise) const;
  std::string s(std::string_view name, std::string_view otherwise) const;
  std::optional<Ints> ints(std::string_view name) const;
  const Attribute* attribute(std::string_view name) const;
  const Node& node() const { return *node_; }
  /// Axes of the attribute, or of an input where newer opsets have them; none: not given.
  std::optional<Ints> axes(size_t input, size_t rank);
  int64_t axis(int64_t axis, size_t rank) const;
  [[noreturn]] void refuse(const std::string& expected, const std::string& got) const;

  // ---- what they build ---------------------------------------------------------------------------
  ir::Graph& graph() { return out_.graph; }
  ir::TensorType type(ValueId v) const { return out_.graph.type(v); }
  Dims dims(ValueId v) const { return type(v).dims; }
  size_t rank(ValueId v) const { return type(v).rank(); }
  ValueId op(std::string name, std::vector<ValueId> operands, ir::Attrs attrs = {});
  ValueId typed(std::string name, std::vector<ValueId> operands, ir::Attrs attrs, ir::TensorType t);
  ValueId number(ValueId like, double value);
  ValueId cast(ValueId v, ir::DType to);
  ValueId reshape(ValueId v, Dims shape);
  ValueId permute(ValueId v, Ints axes);
  ValueId reduce(std::string kind, ValueId v, const Ints& axes, bool keepdim);
  ValueId slice(ValueId v, int64_t axis, Dim start, Dim stop, int64_t step);
  ValueId literal(const Tensor& tensor);

 private:
  struct Entry {
    ValueId id = ir::kNoValue;
    std::optional<Dims> sizes;
    bool is_scalar = false;
  };
  void add_inputs();
  void add_initializers();
  void convert(const Node& node);
  Entry& entry(size_t input);
  ValueId tensor(Entry& entry);
  ValueId folded(ValueId value);

  const Model& model_;
  const Node* node_ = nullptr;
  Imported out_;
  std::map<std::string, Entry, std::less<>> values_;
  std::map<std::string, std::string> symbols_;
};

using Converter = std::function<void(Importer&)>;
using Table = std::map<std::string, Converter, std::less<>>;
void add_elementwise(Table* table);
void add_shapes(Table* table);
void add_layouts(Table* table);
void add_layers(Table* table);

}  // namespace rm::onnx
