// Parser of the text form. Foreign bytes: every index and size is checked, nothing recurses deeper
// than a dim expression, and a failure names its line.
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <unordered_map>

#include "base/error.hpp"
#include "ir/text.hpp"

namespace rm::ir {

namespace {
constexpr size_t kMaxRelations = 4096;
}

class TextParser {
 public:
  explicit TextParser(std::string_view text) : text_(text) {}

  Graph run() {
    if (!next_line() || line_ != "rmir 1") fail("'rmir 1'");
    bool returned = false;
    while (next_line()) {
      if (returned) fail("nothing after 'return'");
      if (head_line()) {
      } else if (accept("weight ")) {
        weight();
      } else if (accept("literal ")) {
        literal();
      } else if (accept("return")) {
        return_line();
        returned = true;
      } else {
        node();
      }
      if (pos_ != line_.size()) fail("the end of the line");
    }
    if (!returned) fail("a 'return' line");
    return std::move(graph_);
  }

  Graph run_head() {
    if (!next_line() || line_ != "rmir 1") fail("'rmir 1'");
    while (next_line() && head_line()) {
      if (pos_ != line_.size()) fail("the end of the line");
    }
    return std::move(graph_);
  }

 private:
  bool head_line() {
    if (accept("sym ")) {
      symbol();
    } else if (accept("input ")) {
      input();
    } else if (accept("where ")) {
      relation();
    } else {
      return false;
    }
    return true;
  }

  [[noreturn]] void fail(const std::string& expected) const {
    throw_invalid("[rmir] expected " + expected + " at line " + std::to_string(line_number_) +
                  ", column " + std::to_string(pos_ + 1));
  }

  bool next_line() {
    if (offset_ >= text_.size()) return false;
    size_t end = text_.find('\n', offset_);
    if (end == std::string_view::npos) end = text_.size();
    line_ = text_.substr(offset_, end - offset_);
    offset_ = end + 1;
    pos_ = 0;
    ++line_number_;
    return true;
  }
  bool accept(std::string_view token) {
    if (line_.substr(pos_, token.size()) != token) return false;
    pos_ += token.size();
    return true;
  }
  void expect(std::string_view token) {
    if (!accept(token)) fail("'" + std::string(token) + "'");
  }
  char peek() const { return pos_ < line_.size() ? line_[pos_] : '\0'; }

  std::string word() {
    size_t start = pos_;
    while (std::isalnum(static_cast<unsigned char>(peek())) != 0 || peek() == '_' ||
           peek() == '.') {
      ++pos_;
    }
    if (pos_ == start) fail("a name");
    return std::string(line_.substr(start, pos_ - start));
  }
  int64_t integer() {
    int64_t v = 0;
    auto [end, ec] = std::from_chars(line_.data() + pos_, line_.data() + line_.size(), v);
    if (ec != std::errc()) fail("an integer");
    pos_ = static_cast<size_t>(end - line_.data());
    return v;
  }
  double floating() {
    size_t start = pos_;
    while (std::isalnum(static_cast<unsigned char>(peek())) != 0 || peek() == '.' ||
           peek() == '+' || peek() == '-') {
      ++pos_;
    }
    std::string copy(line_.substr(start, pos_ - start));
    char* end = nullptr;
    double v = std::strtod(copy.c_str(), &end);
    if (copy.empty() || *end != '\0') fail("a float");
    return v;
  }
  std::string quoted() {
    expect("\"");
    std::string out;
    while (peek() != '"') {
      if (pos_ >= line_.size()) fail("'\"'");
      char c = line_[pos_++];
      if (c == '\\') {
        c = peek();
        ++pos_;
        if (c == 'x') {
          c = static_cast<char>((hex_digit() << 4) | 0);
          c = static_cast<char>(c | hex_digit());
        } else if (c != '"' && c != '\\') {
          fail("an escape");
        }
      }
      out += c;
    }
    ++pos_;
    return out;
  }
  int hex_digit() {
    char c = peek();
    ++pos_;
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    --pos_;
    fail("a hexadecimal digit");
  }

  Dim dim() {
    size_t start = pos_;
    int depth = 0;
    while (pos_ < line_.size()) {
      char c = line_[pos_];
      if (depth == 0 && (c == ',' || c == ']' || c == '>')) break;
      if (c == '(') ++depth;
      if (c == ')') --depth;
      ++pos_;
    }
    return Dim::parse(line_.substr(start, pos_ - start));
  }
  template <typename F>
  void list(std::string_view close, F&& item) {
    if (accept(close)) return;
    do {
      item();
    } while (accept(","));
    expect(close);
  }
  TensorType type() {
    TensorType t;
    t.dtype = parse_dtype(word());
    expect("[");
    list("]", [&] {
      t.dims.push_back(dim());
      if (t.dims.back().is_static() && t.dims.back().value() < 0) fail("dimensions >= 0");
    });
    if (t.dims.size() > 64) fail("at most 64 dimensions");
    return t;
  }

  int64_t fresh_number() {
    expect("%");
    int64_t n = integer();
    if (ids_.count(n) != 0) fail("an id not used before, got %" + std::to_string(n));
    return n;
  }
  ValueId use() {
    if (accept("_")) return kNoValue;
    expect("%");
    auto it = ids_.find(integer());
    if (it == ids_.end()) fail("a value defined above");
    return it->second;
  }

  void symbol() {
    std::string name = word();
    SymbolRange range;
    expect(" [");
    range.lo = integer();
    expect(",");
    range.hi = integer();
    expect("]");
    graph_.symbols[name] = range;
  }
  void input() {
    int64_t n = fresh_number();
    expect(" ");
    std::string name = quoted();
    expect(" : ");
    TensorType t = type();
    ids_[n] = graph_.add_input(std::move(name), std::move(t), accept(" donated"));
  }
  void relation() {
    if (graph_.relations.size() == kMaxRelations) fail("at most 4096 relations");
    graph_.relations.push_back(Relation::parse(line_.substr(pos_)));
    pos_ = line_.size();
  }
  void weight() {
    int64_t n = fresh_number();
    expect(" ");
    std::string name = quoted();
    expect(" : ");
    ids_[n] = graph_.add_weight(std::move(name), type());
  }
  void literal() {
    int64_t n = fresh_number();
    expect(" : ");
    TensorType t = type();
    expect(" = ");
    std::string bytes;
    while (pos_ < line_.size()) {
      int high = hex_digit();
      bytes += static_cast<char>((high << 4) | hex_digit());
    }
    ids_[n] = graph_.add_literal(std::move(t), std::move(bytes));
  }
  void return_line() {
    while (pos_ < line_.size()) {
      expect(graph_.outputs.empty() ? " " : ", ");
      graph_.outputs.push_back(use());
      if (graph_.outputs.back() == kNoValue) fail("a value");
    }
  }
  Attr attribute() {
    char c = peek();
    if (c == '"') return quoted();
    if (accept("<")) {
      Dims d;
      list(">", [&] { d.push_back(dim()); });
      return d;
    }
    if (accept("[")) {
      std::vector<int64_t> v;
      list("]", [&] { v.push_back(integer()); });
      return v;
    }
    if (accept("f[")) {
      std::vector<double> v;
      list("]", [&] { v.push_back(floating()); });
      return v;
    }
    // An integer is digits only; anything with x, p, '.', inf or nan is a float.
    size_t end = pos_ + (c == '-' ? 1 : 0);
    while (end < line_.size() && std::isdigit(static_cast<unsigned char>(line_[end])) != 0) ++end;
    bool is_int = end >= line_.size() || line_[end] == ',' || line_[end] == '}';
    if (is_int) return integer();
    return floating();
  }
  void node() {
    Node node;
    std::vector<int64_t> numbers;
    do {
      numbers.push_back(fresh_number());
    } while (accept(", "));
    expect(" = ");
    node.op = word();
    expect("(");
    if (!accept(")")) {
      do {
        node.operands.push_back(use());
      } while (accept(", "));
      expect(")");
    }
    if (accept(" {")) {
      do {
        std::string name = word();
        expect("=");
        if (!node.attrs.emplace(std::move(name), attribute()).second) fail("an attribute once");
      } while (accept(", "));
      expect("}");
    }
    expect(" : ");
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (i != 0) expect(", ");
      ValueId v = graph_.add_result(type());
      if (!ids_.emplace(numbers[i], v).second) fail("distinct results");
      node.results.push_back(v);
    }
    graph_.nodes.push_back(std::move(node));
  }

  std::string_view text_, line_;
  size_t offset_ = 0, pos_ = 0;
  int line_number_ = 0;
  std::unordered_map<int64_t, ValueId> ids_;
  Graph graph_;
};

Graph parse(std::string_view text) { return TextParser(text).run(); }
Graph parse_head(std::string_view text) { return TextParser(text).run_head(); }

}  // namespace rm::ir
