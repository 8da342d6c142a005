// The high-level IR: a functional graph in one vector of nodes, in topological order.
//
// Values are integers. A value is an input, a weight (external, by name), a literal (small bytes
// held in the graph) or the result of a node. Rewrites mutate a node in place (its results keep
// their ids) or insert nodes; dead nodes are removed by `compact`.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "ir/relation.hpp"
#include "ir/type.hpp"

namespace rm::ir {

using ValueId = int32_t;
inline constexpr ValueId kNoValue = -1;  // an absent optional operand

using Attr = std::variant<int64_t, double, std::string, std::vector<int64_t>, std::vector<double>,
                          Dims>;
using Attrs = std::map<std::string, Attr, std::less<>>;  // sorted: the printed form is canonical

struct Node {
  std::string op;
  std::vector<ValueId> operands;  // kNoValue: absent
  std::vector<ValueId> results;
  Attrs attrs;

  ValueId result() const { return results[0]; }
  bool has(std::string_view attr) const { return attrs.find(attr) != attrs.end(); }
  /// Typed access; throws rm::Error naming the op and the attribute when absent or of another kind.
  int64_t i(std::string_view attr) const;
  double f(std::string_view attr) const;
  const std::string& s(std::string_view attr) const;
  const std::vector<int64_t>& ints(std::string_view attr) const;
  const std::vector<double>& floats(std::string_view attr) const;
  const Dims& dims(std::string_view attr) const;
  int64_t i_or(std::string_view attr, int64_t otherwise) const;
  double f_or(std::string_view attr, double otherwise) const;
  std::string s_or(std::string_view attr, std::string_view otherwise) const;
};

/// True for a node that is there for what it does: it stays although nothing uses its results.
inline bool is_kept(const Node& node) { return node.op == "check"; }

enum class ValueKind : uint8_t { kInput, kWeight, kLiteral, kResult };

struct Value {
  TensorType type;
  ValueKind kind = ValueKind::kResult;
  bool donated = false;       // inputs: the buffer may become an output's
  std::string name;           // inputs and weights
  std::string literal;        // literals: contiguous little-endian bytes
};

struct SymbolRange {
  int64_t lo = 0, hi = INT64_MAX;
};

class Graph {
 public:
  std::vector<Node> nodes;
  std::vector<ValueId> outputs;
  std::map<std::string, SymbolRange, std::less<>> symbols;
  std::vector<Relation> relations;  // between sizes of inputs: what the program is right for

  ValueId add_input(std::string name, TensorType type, bool donated = false);
  ValueId add_weight(std::string name, TensorType type);
  ValueId add_literal(TensorType type, std::string bytes);
  ValueId add_result(TensorType type);
  /// Appends (or inserts before node `at`) a node with one result of `type`; returns that result.
  ValueId append(std::string op, std::vector<ValueId> operands, Attrs attrs, TensorType type);
  ValueId insert(size_t at, std::string op, std::vector<ValueId> operands, Attrs attrs,
                 TensorType type);

  const Value& value(ValueId id) const { return values_.at(static_cast<size_t>(id)); }
  Value& value(ValueId id) { return values_.at(static_cast<size_t>(id)); }
  const TensorType& type(ValueId id) const { return value(id).type; }
  size_t num_values() const { return values_.size(); }
  const std::vector<ValueId>& inputs() const { return inputs_; }
  std::vector<ValueId> weights() const;

  bool is_constant(ValueId id) const {
    return value(id).kind == ValueKind::kWeight || value(id).kind == ValueKind::kLiteral;
  }
  void replace_all_uses(ValueId from, ValueId to);

  /// node index that defines each value, -1 for inputs, weights and literals.
  std::vector<int32_t> definitions() const;
  /// number of uses of each value, graph outputs included.
  std::vector<int32_t> use_counts() const;

  /// Drops unused nodes but those that are kept, weights and literals and renumbers values in order of appearance.
  void compact();

 private:
  friend class TextParser;
  std::vector<Value> values_;
  std::vector<ValueId> inputs_;
};

/// A scalar or small constant as a literal of `dtype`; shape [] (rank 0).
ValueId add_scalar(Graph& graph, DType dtype, double value);
/// Reads element `index` of a literal as double. Throws when `id` is no literal.
double literal_element(const Graph& graph, ValueId id, int64_t index = 0);

/// Replaces symbols by values in every type and attribute. Throws when a dim becomes negative.
Graph substitute(const Graph& graph, const Bindings& bindings);

}  // namespace rm::ir
