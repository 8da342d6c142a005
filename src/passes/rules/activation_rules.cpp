// Activations written out by their formula.
#include <cmath>

#include "passes/rules/rules.hpp"

namespace rm::passes {
namespace {

using ir::Node;
using ir::ValueId;

bool is_half(ir::DType dtype) { return dtype == ir::DType::kBF16 || dtype == ir::DType::kF16; }

// Autocast's arithmetic goes to f32 and back. Going there changes no value; within a formula of half
// precision coming back is storage (decision 0010). What `v` is but for such casts.
ValueId bare(const Rewriter& rw, ValueId v, bool half) {
  for (const Node* cast = rw.def(v, "cast"); cast != nullptr; cast = rw.def(v, "cast")) {
    const ir::DType from = rw.dtype(cast->operands[0]), to = rw.dtype(v);
    const bool widens = is_half(from) && to == ir::DType::kF32;
    const bool stores = half && is_half(to) && (is_half(from) || from == ir::DType::kF32);
    if (!widens && !stores) break;
    v = cast->operands[0];
  }
  return v;
}

// A formula's values, whose casts are looked through in half precision.
class Formula {
 public:
  Formula(const Rewriter& rw, const Node& root) : rw_(rw), half_(is_half(rw.dtype(root.result()))) {}

  const Node* def(ValueId v, std::string_view op) const { return rw_.def(bare(v), op); }
  ValueId bare(ValueId v) const { return passes::bare(rw_, v, half_); }
  bool is_splat(ValueId v, double value) const { return rw_.is_splat(v, value); }
  bool same(ValueId a, ValueId b) const {
    return a != ir::kNoValue && b != ir::kNoValue && bare(a) == bare(b);
  }

 private:
  const Rewriter& rw_;
  bool half_;
};

// If `v` is op(other, constant) with that constant (either order when it commutes): other.
ValueId with_constant(const Formula& f, ValueId v, std::string_view op, double constant) {
  const Node* node = f.def(v, op);
  if (node == nullptr) return ir::kNoValue;
  bool commutes = op == "add" || op == "mul";
  for (int order : kBothOrders) {
    auto [x, c] = ordered(*node, order);
    if (order == 1 && !commutes) break;
    if (f.is_splat(c, constant)) return x;
  }
  return ir::kNoValue;
}

// 1 + f(u) -> u
ValueId one_plus(const Formula& f, ValueId v, std::string_view function) {
  const Node* inner = f.def(with_constant(f, v, "add", 1.0), function);
  return inner == nullptr ? ir::kNoValue : inner->operands[0];
}

bool is_cube(const Formula& f, ValueId v, ValueId x) {
  if (f.same(with_constant(f, v, "pow", 3.0), x)) return true;
  const Node* product = f.def(v, "mul");
  if (product == nullptr) return false;
  for (int order : kBothOrders) {
    auto [square, factor] = ordered(*product, order);
    const Node* inner = f.def(square, "mul");
    if (inner == nullptr || !f.same(factor, x)) continue;
    if (f.same(inner->operands[0], x) && f.same(inner->operands[1], x)) return true;
  }
  return false;
}

// sqrt(2/pi) * (x + 0.044715 * x^3)
bool is_tanh_argument(const Formula& f, ValueId v, ValueId x) {
  const Node* sum = f.def(with_constant(f, v, "mul", std::sqrt(2.0 / M_PI)), "add");
  if (sum == nullptr) return false;
  for (int order : kBothOrders) {
    auto [linear, cubic] = ordered(*sum, order);
    ValueId cube = with_constant(f, cubic, "mul", 0.044715);
    if (f.same(linear, x) && cube != ir::kNoValue && is_cube(f, cube, x)) return true;
  }
  return false;
}

bool is_erf_argument(const Formula& f, ValueId v, ValueId x) {
  return f.same(with_constant(f, v, "div", std::sqrt(2.0)), x) ||
         f.same(with_constant(f, v, "mul", std::sqrt(0.5)), x);
}

// The factors of 0.5 * x * g in any grouping: calls `matches(x, g)` for each reading.
template <typename F>
ValueId half_product(const Formula& f, const Node& node, F&& matches) {
  if (node.op != "mul") return ir::kNoValue;
  for (int order : kBothOrders) {
    auto [a, b] = ordered(node, order);
    ValueId x = with_constant(f, a, "mul", 0.5);  // (0.5 x) g
    if (x != ir::kNoValue && matches(x, b)) return x;
    x = with_constant(f, b, "mul", 0.5);  // x (0.5 g)
    if (x != ir::kNoValue && matches(a, x)) return a;
    const Node* product = f.is_splat(b, 0.5) ? f.def(a, "mul") : nullptr;  // (x g) 0.5
    for (int inner : kBothOrders) {
      if (product == nullptr) break;
      auto [left, right] = ordered(*product, inner);
      if (matches(left, right)) return left;
    }
  }
  return ir::kNoValue;
}

bool replace_by_unary(Rewriter& rw, const Node& node, const char* op, ValueId x) {
  const ir::TensorType type = rw.type(node.result());
  if (x == ir::kNoValue) return false;
  if (rw.type(x) != type) x = bare(rw, x, is_half(type.dtype));
  if (is_half(rw.dtype(x)) && type.dtype == ir::DType::kF32 && rw.dims(x) == type.dims) {
    x = rw.emit("cast", {x}, {}, type);
  }
  if (rw.type(x) != type) return false;
  return rw.replace(node.result(), rw.emit(op, {x}, {}, rw.type(x)));
}

}  // namespace

bool gelu_tanh_of_parts(Rewriter& rw, const Node& node) {
  const Formula f(rw, node);
  ValueId x = half_product(f, node, [&](ValueId v, ValueId g) {
    ValueId argument = one_plus(f, g, "tanh");
    return argument != ir::kNoValue && is_tanh_argument(f, argument, v);
  });
  return replace_by_unary(rw, node, "gelu_tanh", x);
}

bool gelu_of_parts(Rewriter& rw, const Node& node) {
  const Formula f(rw, node);
  ValueId x = half_product(f, node, [&](ValueId v, ValueId g) {
    ValueId argument = one_plus(f, g, "erf");
    return argument != ir::kNoValue && is_erf_argument(f, argument, v);
  });
  return replace_by_unary(rw, node, "gelu", x);
}

bool silu_of_parts(Rewriter& rw, const Node& node) {
  if (node.op != "mul") return false;
  const Formula f(rw, node);
  for (int order : kBothOrders) {
    auto [x, gate] = ordered(node, order);
    const Node* sigmoid = f.def(gate, "sigmoid");
    if (sigmoid != nullptr && f.same(sigmoid->operands[0], x))
      return replace_by_unary(rw, node, "silu", x);
  }
  return false;
}

}  // namespace rm::passes
