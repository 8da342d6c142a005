#include "ir/relation.hpp"

#include <array>

#include "base/error.hpp"

namespace rm::ir {
namespace {

using Order = Relation::Order;

// In the order of the enumeration; two characters before one, so that the first match is right.
constexpr std::array<std::string_view, 6> kSigns = {"==", "!=", "<=", ">=", "<", ">"};

}  // namespace

Relation Relation::parse(std::string_view text) {
  for (size_t i = 0; i < kSigns.size(); ++i) {
    const size_t at = text.find(kSigns[i]);
    if (at == std::string_view::npos) continue;
    return {Dim::parse(text.substr(0, at)), static_cast<Order>(i),
            Dim::parse(text.substr(at + kSigns[i].size()))};
  }
  throw_invalid("[relation] expected one of == != <= >= < > between two sizes, got '" +
                std::string(text.substr(0, 200)) + "'");
}

std::string Relation::str() const {
  return left.str() + std::string(kSigns[static_cast<size_t>(order)]) + right.str();
}

bool Relation::holds(int64_t a, int64_t b) const {
  switch (order) {
    case Order::kEqual: return a == b;
    case Order::kNotEqual: return a != b;
    case Order::kLessEqual: return a <= b;
    case Order::kGreaterEqual: return a >= b;
    case Order::kLess: return a < b;
    case Order::kGreater: return a > b;
  }
  return false;
}

void Relation::for_each_symbol(const std::function<void(const std::string&)>& f) const {
  left.for_each_symbol(f);
  right.for_each_symbol(f);
}

Relation Relation::substitute(const Bindings& bindings) const {
  return {left.substitute(bindings), order, right.substitute(bindings)};
}

}  // namespace rm::ir
