// An ONNX graph becomes a program in the IR: the state of one import, and the tables of converters.
//
// A value of ONNX is a tensor of the graph, or sizes: integers computed from shapes, which stay
// expressions over symbols until an operator needs them as a tensor. Functions and subgraphs are
// converted in place of the node that runs them.
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
#include "ops/host_tensor.hpp"

namespace rm::onnx {

using ir::Dim;
using ir::Dims;
using ir::ValueId;

constexpr int64_t kMaxLiteralBytes = 4096;  // integers of shapes and indices, held in the program

/// A weight of the program: bytes of the file, bytes decoded from typed fields, or another file's.
struct Weight {
  std::string name;
  ir::TensorType type;
  std::string_view in_file;
  std::string decoded;
  std::string location;  // external data, relative to the model's folder
  int64_t offset = 0;
};

/// What is known of an input before the import: its sizes, or its values as well.
struct Given {
  Ints sizes;
  std::optional<std::string> bytes;  // contiguous elements
};
using GivenInputs = std::map<std::string, Given, std::less<>>;

struct Imported {
  ir::Graph graph;
  std::vector<std::string> inputs,
      outputs;  // inputs whose values were given are none of the graph's
  std::vector<Port> ports;  // of `inputs`
  std::vector<Weight> weights;
  /// What an import needs to be told: the values of these inputs, the sizes of all. There is no
  /// graph then.
  std::set<std::string> needed_values;
  bool needs_sizes = false;
};

/// Throws rm::Error: RM340 for a file that is damaged or contradicts itself, RM341 for an operator,
/// element type or form that programs do not have, RM342 where shapes depend on values that only a
/// run computes; the message names the node.
Imported import_model(std::string_view bytes, const GivenInputs& given = {});

/// An operator needs to know more of the inputs.
struct Missing {
  std::set<std::string> values;
  bool sizes = false;
};

class Importer {
 public:
  Importer(const Model& model, const GivenInputs& given);
  Imported run();

  // ---- what converters use ----------------------------------------------------------------------
  int64_t opset() const { return opset_; }
  bool has(size_t input) const;
  ValueId in(size_t input);  // throws when it is absent
  ValueId in_or_none(size_t input) { return has(input) ? in(input) : ir::kNoValue; }
  /// The value as sizes (i64), when it is known without the values of tensors.
  std::optional<Dims> sizes(size_t input);
  /// Integers of 32 or 64 bits; throws when they are not known.
  Dims known(size_t input, const char* what);
  Ints integers(size_t input, const char* what);
  int64_t integer(size_t input, const char* what);
  std::vector<double> reals(size_t input, const char* what);
  void out(ValueId value, size_t output = 0);
  void out_sizes(Dims sizes, bool is_scalar, size_t output = 0);
  bool is_scalar(size_t input);
  /// The result is asked for.
  bool wants(size_t output) const;

  int64_t i(std::string_view name, int64_t otherwise) const;
  double f(std::string_view name, double otherwise) const;
  std::string s(std::string_view name, std::string_view otherwise) const;
  std::optional<Ints> ints(std::string_view name) const;
  const Attribute* attribute(std::string_view name) const;
  const Node& node() const { return *node_; }
  /// Axes of the attribute, or of an input where newer opsets have them; none: not given.
  std::optional<Ints> axes(size_t input, size_t rank);
  int64_t axis(int64_t axis, size_t rank) const;
  /// The size as a number; asks for the sizes of inputs where it is an expression.
  int64_t fixed(const Dim& d) const;
  [[noreturn]] void refuse(const std::string& expected, const std::string& got) const;

  // ---- graphs within nodes
  // -----------------------------------------------------------------------
  struct Entry {
    ValueId id = ir::kNoValue;
    std::optional<Dims> sizes;
    bool is_scalar = false;
  };
  Entry& entry(size_t input);
  void out_entry(Entry value, size_t output);
  ValueId tensor(Entry& entry);
  /// Converts a subgraph here; returns the values of its outputs.
  std::vector<Entry> inlined(const Graph& graph, const std::vector<Entry>& inputs);
  /// A condition that is known; throws when it is not.
  bool condition(Entry& entry);

  // ---- what they build
  // ---------------------------------------------------------------------------
  ir::Graph& graph() { return out_.graph; }
  ir::TensorType type(ValueId v) const { return out_.graph.type(v); }
  ir::DType dtype(ValueId v) const { return out_.graph.type(v).dtype; }
  Dims dims(ValueId v) const { return type(v).dims; }
  size_t rank(ValueId v) const { return type(v).rank(); }
  ValueId op(std::string name, std::vector<ValueId> operands, ir::Attrs attrs = {});
  ValueId typed(std::string name, std::vector<ValueId> operands, ir::Attrs attrs, ir::TensorType t);
  ValueId number(ValueId like, double value);
  ValueId cast(ValueId v, ir::DType to);
  ValueId reshape(ValueId v, Dims shape);
  ValueId permute(ValueId v, Ints axes);
  ValueId expand(ValueId v, Dims shape);
  ValueId reduce(std::string kind, ValueId v, const Ints& axes, bool keepdim);
  ValueId slice(ValueId v, int64_t axis, Dim start, Dim stop, int64_t step);
  ValueId concat(const std::vector<ValueId>& parts, int64_t axis);
  /// start, start + step, ... as `[n]` i64.
  ValueId count(const Dim& n, const Dim& start = Dim(0), int64_t step = 1);
  /// A constant of integers, `[n]`.
  ValueId integers(const Ints& values);
  /// A constant matrix or vector of floats.
  ValueId floats(const std::vector<double>& values, Dims shape, ir::DType dtype);
  /// The elements of an axis whose numbers are given, in their order.
  ValueId take(ValueId v, int64_t axis, ValueId numbers);
  ValueId reversed(ValueId v, int64_t axis);
  struct Sorted {
    ValueId values, indices;
  };
  Sorted sorted(ValueId v, int64_t axis, bool descending, int64_t k);
  ValueId literal(const Tensor& tensor);

 private:
  struct Scope {
    std::map<std::string, Entry, std::less<>> values;
    Scope* outer = nullptr;  // whose values a subgraph sees; none: a function
    const std::map<std::string, Attribute, std::less<>>* attributes = nullptr;  // of the call
    const Function* function = nullptr;
  };
  struct Enter;
  void add_inputs();
  void add_initializers(const Graph& graph);
  void add_input(const Port& port, bool with_values);
  void convert(const Node& node);
  void convert_plain(const Node& node);
  void call(const Function& function, const Node& node);
  Entry* find(std::string_view name);
  std::optional<Dims> numbers(size_t input);
  std::optional<ops::HostTensor> constant(const Entry& entry) const;
  [[noreturn]] void ask(ValueId value, const char* what) const;
  ValueId folded(ValueId value);
  ValueId add_weight(Weight weight);
  /// Counts bytes of constants that the import itself makes; false when they are too many.
  bool has_room(int64_t elements);

  const Model& model_;
  const GivenInputs& given_;
  const Node* node_ = nullptr;
  Imported out_;
  Scope top_;
  Scope* scope_ = &top_;
  int64_t opset_ = 0;
  int depth_ = 0;
  int64_t converted_ = 0;
  int64_t made_ = 0;  // bytes of constants
  std::map<std::string, const Function*, std::less<>> functions_;
  std::map<ValueId, std::string> input_names_;
  std::map<std::string, Dim> symbols_;
  std::set<std::string> weight_names_;
  std::map<ValueId, size_t> weight_numbers_;
};

using Converter = std::function<void(Importer&)>;
using Table = std::map<std::string, Converter, std::less<>>;
void add_elementwise(Table* table);
void add_reductions(Table* table);
void add_shapes(Table* table);
void add_layouts(Table* table);
void add_layers(Table* table);
void add_pools(Table* table);
void add_norms(Table* table);
void add_control(Table* table);
void add_losses(Table* table);
void add_attention(Table* table);
void add_sampling(Table* table);
void add_scatter(Table* table);
void add_quantised(Table* table);
void add_recurrent(Table* table);
void add_einsum(Table* table);
void add_places(Table* table);
void add_selection(Table* table);
void add_ml(Table* table);

}  // namespace rm::onnx
