// A relation between sizes that a program relies on: "s0<=512", "s1==s0+1", "mod(s0,8)==0".
//
// A capture is right for the calls whose sizes fulfil its relations, so they are a part of the
// program: they are printed, hashed and cached with it, and whoever runs it checks them.
#pragma once

#include <string>
#include <string_view>

#include "ir/dim.hpp"

namespace rm::ir {

struct Relation {
  enum class Order : uint8_t { kEqual, kNotEqual, kLessEqual, kGreaterEqual, kLess, kGreater };

  Dim left;
  Order order = Order::kEqual;
  Dim right;

  /// Parses "s0+1<=s1". Throws rm::Error(RM_INVALID_ARGUMENT).
  static Relation parse(std::string_view text);
  std::string str() const;
  /// Whether two values stand in this order.
  bool holds(int64_t a, int64_t b) const;
  void for_each_symbol(const std::function<void(const std::string&)>& f) const;
  /// Replaces bound symbols; unbound ones stay.
  Relation substitute(const Bindings& bindings) const;
  bool is_static() const { return left.is_static() && right.is_static(); }
  /// Of a static one: whether it holds.
  bool order_holds() const { return holds(left.value(), right.value()); }
};

}  // namespace rm::ir
