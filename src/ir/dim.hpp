// A tensor dimension: an integer, or an expression over symbols.
//
// Expressions are kept in one canonical text form (a sum of products, sorted), so equality of text
// is equality of expressions up to what the normal form can see. Atoms that are not polynomial
// (floordiv, mod, min, max) stay as calls: "floordiv(s0,2)".
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace rm::ir {

/// Values of symbols, by name ("s0" -> 128).
using Bindings = std::map<std::string, int64_t, std::less<>>;

class Dim {
 public:
  Dim(int64_t value = 0) : value_(value) {}  // NOLINT: integers are dims
  static Dim symbol(std::string_view name);
  /// Parses "2*s0+floordiv(s1,2)+3". Throws rm::Error(RM_INVALID_ARGUMENT).
  static Dim parse(std::string_view text);

  bool is_static() const { return expr_.empty(); }
  /// The integer; throws rm::Error when symbolic.
  int64_t value() const;
  int64_t value_or(int64_t otherwise) const { return is_static() ? value_ : otherwise; }
  std::string str() const;

  /// Replaces bound symbols; unbound ones stay. Throws on division by zero.
  Dim substitute(const Bindings& bindings) const;
  /// Calls `f` for every symbol name in the expression (repeats possible).
  void for_each_symbol(const std::function<void(const std::string&)>& f) const;

  friend bool operator==(const Dim& a, const Dim& b) {
    return a.value_ == b.value_ && a.expr_ == b.expr_;
  }
  friend Dim operator+(const Dim& a, const Dim& b);
  friend Dim operator-(const Dim& a, const Dim& b);
  friend Dim operator*(const Dim& a, const Dim& b);
  static Dim floordiv(const Dim& a, const Dim& b);
  static Dim mod(const Dim& a, const Dim& b);
  static Dim min(const Dim& a, const Dim& b);
  static Dim max(const Dim& a, const Dim& b);

 private:
  friend struct Poly;
  int64_t value_ = 0;  // 0 when symbolic, so that the defaulted comparison holds
  std::string expr_;   // canonical text, empty when static
};

using Dims = std::vector<Dim>;

/// Product of all dims; 1 for none.
Dim product(const Dims& dims);

}  // namespace rm::ir
