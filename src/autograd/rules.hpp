// One vector-Jacobian product a differentiable operator, by name.
//
// A rule gets the gradient of each result (kNoValue: nothing depends on it) and gives that of each
// operand it is asked for, in the operand's own type. Every other operator of the registry is
// listed with the reason why it has none: gradients end there, or meeting it is an error.
#pragma once

#include <string_view>
#include <vector>

#include "autograd/builder.hpp"

namespace rm::autograd {

struct Adjoint {
  Builder& b;
  const ir::Node& node;              // a copy: building moves the graph's own
  const std::vector<ValueId>& dout;  // by result
  const std::vector<char>& wanted;   // by operand
  std::vector<ValueId>& din;         // by operand: what the rule gives

  ValueId x(size_t i = 0) const { return node.operands[i]; }
  ValueId y() const { return node.result(); }
  ValueId dy() const { return dout[0]; }
  bool wants(size_t i) const { return i < wanted.size() && wanted[i] != 0; }
  bool has(size_t i) const { return i < node.operands.size() && x(i) != ir::kNoValue; }
  /// Gives operand `i` a gradient of the broadcast shape.
  void give(size_t i, ValueId gradient) { din[i] = b.sum_to(gradient, b.dims(x(i))); }
};

using Rule = void (*)(Adjoint&);

/// Whether sdpa's gradient becomes an operator of its own, sdpa_backward, which rounds as sdpa does.
bool is_attention_whole(const Builder& b, const ir::Node& node, const std::vector<char>& wanted);

struct NamedRule {
  std::string_view op;
  Rule rule = nullptr;
  /// Without a rule: why. Operators that are flat (comparisons, ids) let gradients end silently;
  /// `refused` ones have a slope that nobody wrote down, and throw RM702.
  std::string_view why = {};
  bool refused = false;

  bool flat() const { return rule == nullptr && !refused; }
};

/// nullptr when the operator is in no table, which no operator of the registry is.
const NamedRule* find_rule(std::string_view op);
std::vector<std::string_view> differentiable_operators();

// The tables, one a family.
std::vector<NamedRule> elementwise_rules();
std::vector<NamedRule> shape_rules();
std::vector<NamedRule> product_rules();
std::vector<NamedRule> norm_rules();
std::vector<NamedRule> indexing_rules();
std::vector<NamedRule> image_rules();
std::vector<NamedRule> pool_rules();
std::vector<NamedRule> resize_rules();
std::vector<NamedRule> refused_operators();

}  // namespace rm::autograd
