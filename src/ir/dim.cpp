// Dim arithmetic through a polynomial normal form: map from monomial (sorted atom names) to
// coefficient. Graphs hold a few thousand dims, so clarity wins over speed here.
#include "ir/dim.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>

#include "base/error.hpp"

namespace rm::ir {
namespace {

__extension__ typedef __int128 Wide;

// Text may come from anywhere: what expands beyond this is refused.
constexpr size_t kMaxTerms = 256, kMaxFactors = 64;

// INT64_MIN is refused too: its magnitude could not be written back.
int64_t checked(Wide v) {
  if (v > INT64_MAX || v < -Wide{INT64_MAX}) {
    throw_invalid("[dim] expected a dimension below 2^63, got an overflow");
  }
  return static_cast<int64_t>(v);
}

[[noreturn]] void too_large() {
  throw_invalid("[dim] expected an expression of at most 256 terms of 64 factors, got a larger one");
}

}  // namespace

struct Poly {
  using Monomial = std::vector<std::string>;
  std::map<Monomial, int64_t> terms;

  static Poly constant(int64_t v) {
    Poly p;
    if (v != 0) p.terms[{}] = v;
    return p;
  }
  static Poly atom(std::string name) {
    Poly p;
    p.terms[{std::move(name)}] = 1;
    return p;
  }
  static Poly of(const Dim& d);
  Dim to_dim() const;

  Poly& add(const Poly& other, int64_t scale) {
    for (const auto& [m, c] : other.terms) {
      int64_t& slot = terms[m];
      slot = checked(Wide{slot} + Wide{c} * scale);
      if (slot == 0) terms.erase(m);
    }
    if (terms.size() > kMaxTerms) too_large();
    return *this;
  }
  Poly times(const Poly& other) const {
    if (terms.size() * other.terms.size() > kMaxTerms * 4) too_large();
    Poly out;
    for (const auto& [ma, ca] : terms) {
      for (const auto& [mb, cb] : other.terms) {
        Monomial m = ma;
        m.insert(m.end(), mb.begin(), mb.end());
        std::sort(m.begin(), m.end());
        if (m.size() > kMaxFactors) too_large();
        Poly one;
        one.terms[m] = checked(Wide{ca} * cb);
        out.add(one, 1);
      }
    }
    return out;
  }
};

namespace {

int64_t floor_division(int64_t a, int64_t b) {
  if (b == 0) throw_invalid("[dim] expected a non-zero divisor, got 0");
  if (b == -1) return checked(-Wide{a});
  int64_t q = a / b;
  return (a % b != 0 && ((a < 0) != (b < 0))) ? q - 1 : q;
}

int64_t apply_static(std::string_view fn, int64_t a, int64_t b) {
  if (fn == "floordiv") return floor_division(a, b);
  if (fn == "mod") return checked(Wide{a} - Wide{floor_division(a, b)} * b);
  return fn == "min" ? std::min(a, b) : std::max(a, b);
}

Dim call(const char* fn, const Dim& a, const Dim& b);

// Recursive descent over the grammar  expr = term (('+'|'-') term)*; term = factor ('*' factor)*;
// factor = integer | name | name '(' expr ',' expr ')' | '(' expr ')' | '-' factor.
class Parser {
 public:
  Parser(std::string_view text, const Bindings* bindings) : text_(text), bindings_(bindings) {}

  Dim run() {
    Dim d = expr();
    if (pos_ != text_.size()) fail("the end");
    return d;
  }

 private:
  [[noreturn]] void fail(const char* expected) const {
    throw_invalid("[dim] expected " + std::string(expected) + " at offset " +
                  std::to_string(pos_) + " of '" + std::string(text_.substr(0, 200)) + "'");
  }
  char peek() {
    while (pos_ < text_.size() && text_[pos_] == ' ') ++pos_;
    return pos_ < text_.size() ? text_[pos_] : '\0';
  }
  bool accept(char c) {
    if (peek() != c) return false;
    ++pos_;
    return true;
  }
  void expect(char c, const char* what) {
    if (!accept(c)) fail(what);
  }
  Dim expr() {
    Dim d = term();
    for (;;) {
      if (accept('+')) {
        d = d + term();
      } else if (accept('-')) {
        d = d - term();
      } else {
        return d;
      }
    }
  }
  Dim term() {
    Dim d = factor();
    while (accept('*')) d = d * factor();
    return d;
  }
  Dim factor() {
    if (++depth_ > 200) fail("an expression less deep");
    Dim d = factor_body();
    --depth_;
    return d;
  }
  Dim factor_body() {
    char c = peek();
    if (accept('-')) return Dim(0) - factor();
    if (accept('(')) {
      Dim d = expr();
      expect(')', "')'");
      return d;
    }
    if (std::isdigit(static_cast<unsigned char>(c)) != 0) return integer();
    if (std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_') return name();
    fail("a number, a symbol or '('");
  }
  Dim integer() {
    int64_t v = 0;
    auto [end, ec] = std::from_chars(text_.data() + pos_, text_.data() + text_.size(), v);
    if (ec != std::errc()) fail("an integer below 2^63");
    pos_ = static_cast<size_t>(end - text_.data());
    return v;
  }
  Dim name() {
    size_t start = pos_;
    while (pos_ < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(text_[pos_])) != 0 || text_[pos_] == '_')) {
      ++pos_;
    }
    std::string_view word = text_.substr(start, pos_ - start);
    if (word == "floordiv" || word == "mod" || word == "min" || word == "max") {
      expect('(', "'('");
      Dim a = expr();
      expect(',', "','");
      Dim b = expr();
      expect(')', "')'");
      return call(std::string(word).c_str(), a, b);
    }
    if (bindings_ != nullptr) {
      auto it = bindings_->find(word);
      if (it != bindings_->end()) return it->second;
    }
    return Dim::symbol(word);
  }

  std::string_view text_;
  const Bindings* bindings_;
  size_t pos_ = 0;
  int depth_ = 0;
};

Dim call(const char* fn, const Dim& a, const Dim& b) {
  if (a.is_static() && b.is_static()) return apply_static(fn, a.value(), b.value());
  std::string_view name = fn;
  if (name == "floordiv" && b == Dim(1)) return a;
  if (name == "mod" && b == Dim(1)) return 0;
  if (a == b) {
    if (name == "floordiv") return 1;
    if (name == "mod") return 0;
    return a;
  }
  return Dim::symbol(std::string(fn) + "(" + a.str() + "," + b.str() + ")");
}

}  // namespace

namespace {

int64_t coefficient(const std::string& digits) {
  int64_t v = 0;
  auto [end, ec] = std::from_chars(digits.data(), digits.data() + digits.size(), v);
  if (ec != std::errc()) {
    throw_invalid("[dim] expected an integer below 2^63, got " + digits.substr(0, 40));
  }
  return v;
}

}  // namespace

Poly Poly::of(const Dim& d) {
  if (d.is_static()) return constant(d.value_);
  // The canonical text is split back into its terms; atoms keep their text (calls included).
  Poly p;
  const std::string& s = d.expr_;
  size_t i = 0;
  while (i < s.size()) {
    int64_t sign = 1;
    if (s[i] == '+' || s[i] == '-') sign = s[i++] == '-' ? -1 : 1;
    Monomial m;
    int64_t coeff = 1;
    for (;;) {
      size_t start = i;
      int depth = 0;
      while (i < s.size() && (depth > 0 || (s[i] != '*' && s[i] != '+' && s[i] != '-'))) {
        if (s[i] == '(') ++depth;
        if (s[i] == ')') --depth;
        ++i;
      }
      std::string piece = s.substr(start, i - start);
      if (std::isdigit(static_cast<unsigned char>(piece[0])) != 0) {
        coeff = coefficient(piece);
      } else {
        m.push_back(std::move(piece));
      }
      if (i >= s.size() || s[i] != '*') break;
      ++i;
    }
    Poly one;
    one.terms[m] = coeff;
    p.add(one, sign);
  }
  return p;
}

Dim Poly::to_dim() const {
  if (terms.empty()) return 0;
  if (terms.size() == 1 && terms.begin()->first.empty()) return terms.begin()->second;
  std::string out;
  auto append = [&](const Monomial& m, int64_t c) {
    out += c < 0 ? "-" : (out.empty() ? "" : "+");
    uint64_t mag = c < 0 ? 0 - static_cast<uint64_t>(c) : static_cast<uint64_t>(c);
    bool wrote = false;
    if (mag != 1 || m.empty()) {
      out += std::to_string(mag);
      wrote = true;
    }
    for (const auto& a : m) {
      if (wrote) out += '*';
      out += a;
      wrote = true;
    }
  };
  for (const auto& [m, c] : terms) {
    if (!m.empty()) append(m, c);
  }
  if (auto it = terms.find({}); it != terms.end()) append({}, it->second);
  Dim d;
  d.expr_ = std::move(out);
  return d;
}

Dim Dim::symbol(std::string_view name) {
  Dim d;
  d.expr_ = std::string(name);
  return d;
}

Dim Dim::parse(std::string_view text) { return Parser(text, nullptr).run(); }

int64_t Dim::value() const {
  if (!is_static()) throw_invalid("[dim] expected a static dimension, got " + expr_);
  return value_;
}

std::string Dim::str() const { return is_static() ? std::to_string(value_) : expr_; }

Dim Dim::substitute(const Bindings& bindings) const {
  return is_static() ? *this : Parser(expr_, &bindings).run();
}

void Dim::for_each_symbol(const std::function<void(const std::string&)>& f) const {
  size_t i = 0;
  while (i < expr_.size()) {
    if (std::isalpha(static_cast<unsigned char>(expr_[i])) == 0 && expr_[i] != '_') {
      ++i;
      continue;
    }
    size_t start = i;
    while (i < expr_.size() &&
           (std::isalnum(static_cast<unsigned char>(expr_[i])) != 0 || expr_[i] == '_')) {
      ++i;
    }
    if (i < expr_.size() && expr_[i] == '(') continue;  // a function name
    f(expr_.substr(start, i - start));
  }
}

Dim operator+(const Dim& a, const Dim& b) {
  return Poly::of(a).add(Poly::of(b), 1).to_dim();
}
Dim operator-(const Dim& a, const Dim& b) {
  return Poly::of(a).add(Poly::of(b), -1).to_dim();
}
Dim operator*(const Dim& a, const Dim& b) { return Poly::of(a).times(Poly::of(b)).to_dim(); }

Dim Dim::floordiv(const Dim& a, const Dim& b) {
  if (!b.is_static() || b.value() == 0) return call("floordiv", a, b);
  // Exact division of every coefficient keeps the polynomial form: floordiv(4*s0, 4) = s0.
  Poly p = Poly::of(a);
  for (auto& [m, c] : p.terms) {
    if (b.value() == -1) {
      c = -c;  // never INT64_MIN
      continue;
    }
    if (c % b.value() != 0) return call("floordiv", a, b);
    c /= b.value();
  }
  return p.to_dim();
}
Dim Dim::mod(const Dim& a, const Dim& b) { return call("mod", a, b); }
Dim Dim::min(const Dim& a, const Dim& b) { return call("min", a, b); }
Dim Dim::max(const Dim& a, const Dim& b) { return call("max", a, b); }

Dim product(const Dims& dims) {
  Dim out = 1;
  for (const auto& d : dims) out = out * d;
  return out;
}

}  // namespace rm::ir
