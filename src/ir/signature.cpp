#include "ir/signature.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <map>
#include <optional>

#include "base/error.hpp"
#include "ir/text.hpp"

namespace rm::ir {

/// Turns the text of a size into postfix. The text is a Dim's own: its grammar was checked.
class Signature::Test::Compiler {
 public:
  explicit Compiler(const std::map<std::string, int64_t, std::less<>>& numbers)
      : numbers_(numbers) {}

  /// Nothing when a symbol of it has no value.
  std::optional<Expression> operator()(const Dim& dim) {
    const std::string text = dim.str();  // outlives the walk over it
    text_ = text, at_ = 0, bound_ = true, out_.clear();
    sum();
    if (!bound_) return std::nullopt;
    return std::move(out_);
  }

 private:
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void emit(Op op, int64_t value = 0) { out_.push_back({op, value}); }

  void sum() {
    if (peek() == '-') {
      emit(Op::kConstant, 0);
    } else {
      product();
    }
    while (peek() == '+' || peek() == '-') {
      const Op op = text_[at_++] == '+' ? Op::kAdd : Op::kSub;
      product();
      emit(op);
    }
  }
  void product() {
    factor();
    while (peek() == '*') {
      ++at_;
      factor();
      emit(Op::kMul);
    }
  }
  void factor() {
    if (std::isdigit(static_cast<unsigned char>(peek())) != 0) {
      int64_t value = 0;
      const char* end = text_.data() + text_.size();
      at_ = static_cast<size_t>(std::from_chars(text_.data() + at_, end, value).ptr - text_.data());
      return emit(Op::kConstant, value);
    }
    const size_t start = at_;
    while (std::isalnum(static_cast<unsigned char>(peek())) != 0 || peek() == '_') ++at_;
    const std::string_view word = text_.substr(start, at_ - start);
    if (peek() != '(') return symbol(word);
    ++at_;  // (
    sum();
    ++at_;  // ,
    sum();
    ++at_;  // )
    emit(word == "floordiv" ? Op::kFloorDiv
         : word == "mod"    ? Op::kMod
         : word == "min"    ? Op::kMin
                            : Op::kMax);
  }
  void symbol(std::string_view name) {
    const auto found = numbers_.find(name);
    bound_ = bound_ && found != numbers_.end();
    emit(Op::kSymbol, found != numbers_.end() ? found->second : 0);
  }

  const std::map<std::string, int64_t, std::less<>>& numbers_;
  std::string_view text_;
  size_t at_ = 0;
  bool bound_ = true;
  Expression out_;
};

/// False when a value leaves 64 bits or something is divided by zero: no call has such sizes.
bool Signature::Test::evaluate(const Expression& steps, const std::vector<int64_t>& symbols,
                               int64_t& out) {
  if (steps.size() == 1) {
    out = steps[0].op == Op::kConstant ? steps[0].value
                                       : symbols[static_cast<size_t>(steps[0].value)];
    return true;
  }
  std::vector<int64_t> stack;
  stack.reserve(steps.size());
  for (const Step& step : steps) {
    if (step.op == Op::kConstant || step.op == Op::kSymbol) {
      stack.push_back(step.op == Op::kConstant ? step.value
                                               : symbols[static_cast<size_t>(step.value)]);
      continue;
    }
    const int64_t b = stack.back();
    stack.pop_back();
    int64_t& a = stack.back();
    bool bad = false;
    switch (step.op) {
      case Op::kAdd: bad = __builtin_add_overflow(a, b, &a); break;
      case Op::kSub: bad = __builtin_sub_overflow(a, b, &a); break;
      case Op::kMul: bad = __builtin_mul_overflow(a, b, &a); break;
      case Op::kMin: a = std::min(a, b); break;
      case Op::kMax: a = std::max(a, b); break;
      default: {
        if (b == 0 || (a == INT64_MIN && b == -1)) return false;
        const int64_t rest = a % b;
        const bool down = rest != 0 && ((rest < 0) != (b < 0));
        a = step.op == Op::kFloorDiv ? a / b - (down ? 1 : 0) : rest + (down ? b : 0);
      }
    }
    if (bad) return false;
  }
  out = stack.back();
  return true;
}

bool Signature::Test::accepts(const std::vector<int64_t>& sizes) const {
  std::vector<int64_t> symbols;
  symbols.reserve(given_.size());
  for (size_t i = 0; i < given_.size(); ++i) {
    const int64_t size = sizes[given_[i]];
    if (size < ranges_[i].lo || size > ranges_[i].hi) return false;
    symbols.push_back(size);
  }
  int64_t left = 0, right = 0;
  for (const Equal& one : equal_) {
    if (!evaluate(one.expected, symbols, right) || sizes[one.at] != right) return false;
  }
  for (const Compared& one : compared_) {
    if (!evaluate(one.left, symbols, left) || !evaluate(one.right, symbols, right) ||
        !one.relation.holds(left, right)) {
      return false;
    }
  }
  return true;
}

Signature::Signature(std::string_view text) {
  const Graph head = parse_head(text);
  for (const ValueId input : head.inputs()) inputs_.push_back(head.type(input).dims);
  symbols_ = head.symbols;
  relations_ = head.relations;
}

Signature::Test Signature::test(const std::vector<bool>& skip) const {
  Test made;
  std::map<std::string, int64_t, std::less<>> numbers;
  std::vector<std::pair<size_t, const Dim*>> others;
  size_t at = 0;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if ((i < skip.size() && skip[i]) || inputs_[i].empty()) continue;
    made.looked_at_.push_back({i, inputs_[i].size()});
    for (const Dim& dim : inputs_[i]) {
      const std::string text = dim.str();
      const auto plain = symbols_.find(text);
      const auto number = static_cast<int64_t>(made.given_.size());
      if (plain != symbols_.end() && numbers.emplace(text, number).second) {
        made.given_.push_back(at);
        made.ranges_.push_back(plain->second);
      } else {
        others.emplace_back(at, &dim);
      }
      ++at;
    }
  }
  Test::Compiler compile(numbers);
  for (const auto& [place, dim] : others) {
    if (auto expected = compile(*dim)) made.equal_.push_back({place, std::move(*expected)});
  }
  for (const Relation& relation : relations_) {
    auto left = compile(relation.left), right = compile(relation.right);
    if (left && right) made.compared_.push_back({std::move(*left), std::move(*right), relation});
  }
  return made;
}

}  // namespace rm::ir
