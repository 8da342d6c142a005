// Interval arithmetic over the text of a dim (its grammar is in ir/dim.cpp).
#include "passes/dim_bounds.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>

namespace rm::passes {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

double times(double a, double b) { return a == 0 || b == 0 ? 0 : a * b; }  // 0 * inf is 0 here

DimBounds multiply(DimBounds a, DimBounds b) {
  double p[4] = {times(a.lo, b.lo), times(a.lo, b.hi), times(a.hi, b.lo), times(a.hi, b.hi)};
  return {*std::min_element(p, p + 4), *std::max_element(p, p + 4)};
}

class Evaluator {
 public:
  Evaluator(std::string text, const ir::Graph& graph) : text_(std::move(text)), graph_(graph) {}

  DimBounds run() { return sum(); }

 private:
  char peek() const { return pos_ < text_.size() ? text_[pos_] : '\0'; }

  DimBounds sum() {
    DimBounds total{0, 0};
    do {
      bool negative = peek() == '-';
      if (peek() == '+' || peek() == '-') ++pos_;
      DimBounds t = product();
      total = negative ? DimBounds{total.lo - t.hi, total.hi - t.lo}
                       : DimBounds{total.lo + t.lo, total.hi + t.hi};
    } while (peek() == '+' || peek() == '-');
    return total;
  }
  DimBounds product() {
    DimBounds p = atom();
    while (peek() == '*') {
      ++pos_;
      p = multiply(p, atom());
    }
    return p;
  }
  DimBounds atom() {
    size_t start = pos_;
    while (std::isalnum(static_cast<unsigned char>(peek())) != 0 || peek() == '_') ++pos_;
    std::string word = text_.substr(start, pos_ - start);
    if (!word.empty() && std::isdigit(static_cast<unsigned char>(word[0])) != 0) {
      double v = std::stod(word);
      return {v, v};
    }
    if (peek() == '(') return call(word);
    auto it = graph_.symbols.find(word);
    if (it == graph_.symbols.end()) return {-kInf, kInf};
    return {static_cast<double>(it->second.lo),
            it->second.hi == INT64_MAX ? kInf : static_cast<double>(it->second.hi)};
  }
  DimBounds call(const std::string& function) {
    ++pos_;  // '('
    DimBounds a = sum();
    ++pos_;  // ','
    DimBounds b = sum();
    ++pos_;  // ')'
    if (function == "min") return {std::min(a.lo, b.lo), std::min(a.hi, b.hi)};
    if (function == "max") return {std::max(a.lo, b.lo), std::max(a.hi, b.hi)};
    if (b.lo <= 0) return {-kInf, kInf};
    if (function == "mod") return {0, b.hi - 1};
    // floordiv by a positive divisor grows with a.
    return {std::floor(std::min(a.lo / b.lo, a.lo / b.hi)),
            std::floor(std::max(a.hi / b.lo, a.hi / b.hi))};
  }

  std::string text_;
  const ir::Graph& graph_;
  size_t pos_ = 0;
};

}  // namespace

DimBounds bounds(const ir::Dim& dim, const ir::Graph& graph) {
  if (dim.is_static()) {
    auto v = static_cast<double>(dim.value());
    return {v, v};
  }
  DimBounds out = Evaluator(dim.str(), graph).run();
  if (std::isnan(out.lo) || std::isnan(out.hi)) return {-kInf, kInf};
  return out;
}

}  // namespace rm::passes
