// One rule a family of operators; what it cannot say is bounded by the type alone.
#include "passes/value_bounds.hpp"

#include <algorithm>
#include <cmath>
#include <set>

#include "ir/scalar.hpp"
#include "passes/iota_form.hpp"

namespace rm::passes {
namespace {

using ir::DType;
using ir::Node;
using ir::ValueId;
using Bounds = std::optional<DimBounds>;

constexpr int kDepth = 24;               // nodes looked through
constexpr int64_t kLiteralElements = 4096;
constexpr double kExact = 0x1p53;        // beyond it: infinite

bool is_finite(const DimBounds& b) { return std::isfinite(b.lo) && std::isfinite(b.hi); }

Bounds by_type(DType type) {
  switch (type) {
    case DType::kBool: return DimBounds{0, 1};
    case DType::kU8: return DimBounds{0, 255};
    case DType::kI8: return DimBounds{-128, 127};
    case DType::kU16: return DimBounds{0, 65535};
    case DType::kI16: return DimBounds{-32768, 32767};
    case DType::kI32: return DimBounds{-0x1p31, 0x1p31 - 1};
    case DType::kU32: return DimBounds{0, 0x1p32 - 1};
    default: return std::nullopt;
  }
}

Bounds united(const Bounds& a, const Bounds& b) {
  if (!a || !b) return std::nullopt;
  return DimBounds{std::min(a->lo, b->lo), std::max(a->hi, b->hi)};
}

Bounds of_literal(const ir::Value& value) {
  const int64_t count = value.type.num_elements();
  if (count < 1 || count > kLiteralElements) return std::nullopt;
  Bounds out;
  for (int64_t i = 0; i < count; ++i) {
    const size_t at = static_cast<size_t>(i) * ir::size_bytes(value.type.dtype);
    const double x = ir::load_element(value.type.dtype, value.literal.data() + at);
    out = out ? united(out, DimBounds{x, x}) : DimBounds{x, x};
  }
  return out;
}

class Walk {
 public:
  explicit Walk(const Rewriter& rw) : rw_(rw) {}

  Bounds of(ValueId v, int depth) const {
    const DType type = rw_.dtype(v);
    if (ir::is_floating(type) || type == DType::kU64) return std::nullopt;
    Bounds found = depth > 0 ? made(v, depth) : std::nullopt;
    const Bounds held = by_type(type);
    // What leaves the type wraps around; no bound is exact where doubles are not.
    if (found && held && (found->lo < held->lo || found->hi > held->hi)) found = std::nullopt;
    if (!found) return held;
    return DimBounds{found->lo <= -kExact ? -HUGE_VAL : found->lo, found->hi >= kExact ? HUGE_VAL : found->hi};
  }

 private:
  Bounds made(ValueId v, int depth) const {
    if (rw_.graph().value(v).kind == ir::ValueKind::kLiteral) return of_literal(rw_.graph().value(v));
    if (const std::optional<double> all = rw_.splat(v)) return DimBounds{*all, *all};
    if (const std::optional<IotaForm> form = iota_form(rw_, v)) {
      const IotaRange r = range(*form, rw_.dims(v));
      return DimBounds{bounds(r.lo, rw_.graph()).lo, bounds(r.hi, rw_.graph()).hi};
    }
    const Node* node = rw_.def(v);
    return node == nullptr ? std::nullopt : of_node(*node, v, depth - 1);
  }

  Bounds of_node(const Node& node, ValueId v, int depth) const {
    static const std::set<std::string_view> kChoosing{"reshape", "permute", "expand", "slice",
                                                      "gather",  "index",   "embedding"};
    const auto operand = [&](size_t i) { return of(node.operands[i], depth); };
    if (kChoosing.count(node.op) != 0) return operand(0);
    if (node.op == "cast") {
      return ir::is_floating(rw_.dtype(node.operands[0])) ? std::nullopt : operand(0);
    }
    if (node.op == "where") return united(operand(1), operand(2));
    if (node.op == "sort") {
      return v == node.results[0] ? operand(0) : places(node, {node.i("axis")});
    }
    if (node.op == "concat") {
      Bounds out = operand(0);
      for (size_t i = 1; i < node.operands.size(); ++i) out = united(out, operand(i));
      return out;
    }
    if (node.op == "reduce") {
      const std::string& kind = node.s("kind");
      if (kind == "argmax" || kind == "argmin") return places(node, node.ints("axes"));
      return kind == "max" || kind == "min" ? operand(0) : std::nullopt;
    }
    if (node.op == "dim_value") {
      return bounds(node.dims("value")[0], rw_.graph());
    }
    return node.operands.size() == 2 ? arithmetic(node.op, operand(0), operand(1)) : std::nullopt;
  }

  /// Of a place among the elements along axes of the first operand.
  Bounds places(const Node& node, const std::vector<int64_t>& axes) const {
    ir::Dim count = 1;
    for (int64_t a : axes) count = count * rw_.dims(node.operands[0])[static_cast<size_t>(a)];
    return DimBounds{0, std::max(0.0, bounds(count, rw_.graph()).hi - 1)};
  }

  static Bounds arithmetic(std::string_view op, const Bounds& a, const Bounds& b) {
    if (op == "remainder") {  // sign of the divisor
      if (b && b->lo > 0) return DimBounds{0, b->hi - 1};
      return std::nullopt;
    }
    // One side bounds these: 64-bit integers have no bound of their own.
    if (op == "minimum" || op == "maximum") {
      constexpr double kInf = HUGE_VAL;
      const DimBounds x = a.value_or(DimBounds{-kInf, kInf}), y = b.value_or(DimBounds{-kInf, kInf});
      return op == "minimum" ? DimBounds{std::min(x.lo, y.lo), std::min(x.hi, y.hi)}
                             : DimBounds{std::max(x.lo, y.lo), std::max(x.hi, y.hi)};
    }
    if (!a || !b || !is_finite(*a) || !is_finite(*b)) return std::nullopt;  // others may wrap around
    if (op == "add") return DimBounds{a->lo + b->lo, a->hi + b->hi};
    if (op == "sub") return DimBounds{a->lo - b->hi, a->hi - b->lo};
    if (op == "mul") {
      const auto [lo, hi] = std::minmax({a->lo * b->lo, a->lo * b->hi, a->hi * b->lo, a->hi * b->hi});
      return DimBounds{lo, hi};
    }
    return std::nullopt;
  }

  const Rewriter& rw_;
};

}  // namespace

Bounds value_bounds(const Rewriter& rw, ValueId v) { return Walk(rw).of(v, kDepth); }

}  // namespace rm::passes
