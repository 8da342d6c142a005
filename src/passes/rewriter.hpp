// Pattern rewriting in one ordered sweep: rules look at a node and at the definitions above it,
// emit new nodes before it and replace its results.
//
// Rules never touch a node that is already emitted: what they replace becomes dead and is dropped
// by the compaction that ends a sweep. References to nodes stay valid while rules emit.
#pragma once

#include <deque>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ir/graph.hpp"

namespace rm::passes {

class Rewriter {
 public:
  /// True when it replaced every used result of `node`.
  using Rule = bool (*)(Rewriter& rw, const ir::Node& node);

  /// Sweeps until no rule applies (at most `max_sweeps` times), then compacts the graph.
  static void run(ir::Graph& graph, std::initializer_list<Rule> rules, int max_sweeps = 16);

  ir::Graph& graph() { return graph_; }
  const ir::Graph& graph() const { return graph_; }
  const ir::TensorType& type(ir::ValueId v) const { return graph_.type(v); }
  const ir::Dims& dims(ir::ValueId v) const { return graph_.type(v).dims; }
  ir::DType dtype(ir::ValueId v) const { return graph_.type(v).dtype; }

  /// The node that defines `v`: null for inputs, weights, literals and absent operands.
  const ir::Node* def(ir::ValueId v) const;
  /// The same, when it is an `op` node.
  const ir::Node* def(ir::ValueId v, std::string_view op) const;
  int uses(ir::ValueId v) const { return uses_[static_cast<size_t>(v)]; }
  bool single_use(ir::ValueId v) const { return uses(v) == 1; }
  /// True when something uses a result of the node, or it is kept.
  bool is_live(const ir::Node& node) const;
  /// True when a live node emitted so far reads `v`.
  bool used_above(ir::ValueId v) const;

  /// The value every element of `v` has, when that is known: literals and `full` nodes.
  std::optional<double> splat(ir::ValueId v) const;
  /// splat(v) equals `value` as `v`'s dtype stores it.
  bool is_splat(ir::ValueId v, double value) const;
  /// Made of weights, literals and attributes alone.
  bool is_constant_expression(ir::ValueId v) const {
    return v == ir::kNoValue || constant_[static_cast<size_t>(v)] != 0;
  }

  ir::ValueId emit(std::string op, std::vector<ir::ValueId> operands, ir::Attrs attrs,
                   ir::TensorType type);
  std::vector<ir::ValueId> emit(std::string op, std::vector<ir::ValueId> operands, ir::Attrs attrs,
                                const std::vector<ir::TensorType>& types);
  /// A node like `node` with other operands and the same result types; returns its first result.
  ir::ValueId emit_like(const ir::Node& node, std::vector<ir::ValueId> operands);
  ir::ValueId reshape(ir::ValueId v, ir::Dims shape);
  ir::ValueId literal(ir::TensorType type, std::string bytes);

  /// Later uses of `from` read `to`. Always true, so that a rule can end with it. Throws
  /// rm::Error(RM_INTERNAL) when the types contradict each other.
  bool replace(ir::ValueId from, ir::ValueId to);
  /// Emits a node like `like`; later uses of all results of `node` read those of that one.
  bool replace_all(const ir::Node& node, const ir::Node& like, std::vector<ir::ValueId> operands);
  /// For a rule that replaces the current node, one of the readers of `from`: the other readers,
  /// all below, read `to` instead.
  void move_other_uses(ir::ValueId from, ir::ValueId to);

 private:
  explicit Rewriter(ir::Graph& graph);
  bool sweep(std::span<const Rule> rules);
  ir::ValueId resolve(ir::ValueId v) const;
  void grow();
  void place(ir::Node node);
  void release(ir::ValueId v);
  void release_operands(const ir::Node& node);

  ir::Graph& graph_;
  std::deque<ir::Node> emitted_;
  std::vector<int32_t> def_, uses_;
  std::vector<ir::ValueId> forward_;
  std::vector<char> constant_;  // by value, known when its node is placed
};

/// The operands of a binary node in both orders.
struct Ordered {
  ir::ValueId a, b;
};
inline constexpr int kBothOrders[] = {0, 1};
inline Ordered ordered(const ir::Node& node, int order) {
  return order == 0 ? Ordered{node.operands[0], node.operands[1]}
                    : Ordered{node.operands[1], node.operands[0]};
}

/// Operand `i` or kNoValue when absent or beyond the end.
inline ir::ValueId operand(const ir::Node& node, size_t i) {
  return i < node.operands.size() ? node.operands[i] : ir::kNoValue;
}

}  // namespace rm::passes
