// Activations written out by their formula.
#include <cmath>

#include "passes/rules/rules.hpp"

namespace rm::passes {
namespace {

using ir::Node;
using ir::ValueId;

// If `v` is op(other, constant) with that constant (either order when it commutes): other.
ValueId with_constant(const Rewriter& rw, ValueId v, std::string_view op, double constant) {
  const Node* node = rw.def(v, op);
  if (node == nullptr) return ir::kNoValue;
  bool commutes = op == "add" || op == "mul";
  for (int order : kBothOrders) {
    auto [x, c] = ordered(*node, order);
    if (order == 1 && !commutes) break;
    if (rw.is_splat(c, constant)) return x;
  }
  return ir::kNoValue;
}

// 1 + f(u) -> u
ValueId one_plus(const Rewriter& rw, ValueId v, std::string_view function) {
  const Node* inner = rw.def(with_constant(rw, v, "add", 1.0), function);
  return inner == nullptr ? ir::kNoValue : inner->operands[0];
}

bool is_cube(const Rewriter& rw, ValueId v, ValueId x) {
  if (with_constant(rw, v, "pow", 3.0) == x) return true;
  const Node* product = rw.def(v, "mul");
  if (product == nullptr) return false;
  for (int order : kBothOrders) {
    auto [square, factor] = ordered(*product, order);
    const Node* inner = rw.def(square, "mul");
    if (factor == x && inner != nullptr && inner->operands[0] == x && inner->operands[1] == x)
      return true;
  }
  return false;
}

// sqrt(2/pi) * (x + 0.044715 * x^3)
bool is_tanh_argument(const Rewriter& rw, ValueId v, ValueId x) {
  const Node* sum = rw.def(with_constant(rw, v, "mul", std::sqrt(2.0 / M_PI)), "add");
  if (sum == nullptr) return false;
  for (int order : kBothOrders) {
    auto [linear, cubic] = ordered(*sum, order);
    ValueId cube = with_constant(rw, cubic, "mul", 0.044715);
    if (linear == x && cube != ir::kNoValue && is_cube(rw, cube, x)) return true;
  }
  return false;
}

bool is_erf_argument(const Rewriter& rw, ValueId v, ValueId x) {
  return with_constant(rw, v, "div", std::sqrt(2.0)) == x ||
         with_constant(rw, v, "mul", std::sqrt(0.5)) == x;
}

// The factors of 0.5 * x * g in any grouping: calls `matches(x, g)` for each reading.
template <typename F>
ValueId half_product(const Rewriter& rw, const Node& node, F&& matches) {
  if (node.op != "mul") return ir::kNoValue;
  for (int order : kBothOrders) {
    auto [a, b] = ordered(node, order);
    ValueId x = with_constant(rw, a, "mul", 0.5);  // (0.5 x) g
    if (x != ir::kNoValue && matches(x, b)) return x;
    x = with_constant(rw, b, "mul", 0.5);  // x (0.5 g)
    if (x != ir::kNoValue && matches(a, x)) return a;
    const Node* product = rw.is_splat(b, 0.5) ? rw.def(a, "mul") : nullptr;  // (x g) 0.5
    for (int inner : kBothOrders) {
      if (product == nullptr) break;
      auto [left, right] = ordered(*product, inner);
      if (matches(left, right)) return left;
    }
  }
  return ir::kNoValue;
}

bool replace_by_unary(Rewriter& rw, const Node& node, const char* op, ValueId x) {
  if (x == ir::kNoValue || rw.type(x) != rw.type(node.result())) return false;
  return rw.replace(node.result(), rw.emit(op, {x}, {}, rw.type(x)));
}

}  // namespace

bool gelu_tanh_of_parts(Rewriter& rw, const Node& node) {
  ValueId x = half_product(rw, node, [&](ValueId v, ValueId g) {
    ValueId argument = one_plus(rw, g, "tanh");
    return argument != ir::kNoValue && is_tanh_argument(rw, argument, v);
  });
  return replace_by_unary(rw, node, "gelu_tanh", x);
}

bool gelu_of_parts(Rewriter& rw, const Node& node) {
  ValueId x = half_product(rw, node, [&](ValueId v, ValueId g) {
    ValueId argument = one_plus(rw, g, "erf");
    return argument != ir::kNoValue && is_erf_argument(rw, argument, v);
  });
  return replace_by_unary(rw, node, "gelu", x);
}

bool silu_of_parts(Rewriter& rw, const Node& node) {
  if (node.op != "mul") return false;
  for (int order : kBothOrders) {
    auto [x, gate] = ordered(node, order);
    const Node* sigmoid = rw.def(gate, "sigmoid");
    if (sigmoid != nullptr && sigmoid->operands[0] == x)
      return replace_by_unary(rw, node, "silu", x);
  }
  return false;
}

}  // namespace rm::passes
