// Printer of the text form; see text.hpp for the grammar.
#include <cmath>
#include <cstdio>

#include "ir/text.hpp"

namespace rm::ir {
namespace {

std::string quote(std::string_view s) {
  std::string out = "\"";
  for (char c : s) {
    auto u = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (u < 0x20 || u == 0x7f) {
      char buffer[8];
      std::snprintf(buffer, sizeof buffer, "\\x%02x", u);
      out += buffer;
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string float_text(double v) {
  if (std::isnan(v)) return "nan";
  if (std::isinf(v)) return v < 0 ? "-inf" : "inf";
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%a", v);
  return buffer;
}

template <typename T, typename F>
std::string list(const std::vector<T>& items, const char* open, const char* close, F&& text) {
  std::string out = open;
  for (size_t i = 0; i < items.size(); ++i) {
    if (i != 0) out += ',';
    out += text(items[i]);
  }
  return out + close;
}

struct AttrText {
  std::string operator()(int64_t v) const { return std::to_string(v); }
  std::string operator()(double v) const { return float_text(v); }
  std::string operator()(const std::string& v) const { return quote(v); }
  std::string operator()(const std::vector<int64_t>& v) const {
    return list(v, "[", "]", [](int64_t x) { return std::to_string(x); });
  }
  std::string operator()(const std::vector<double>& v) const {
    return list(v, "f[", "]", float_text);
  }
  std::string operator()(const Dims& v) const {
    return list(v, "<", ">", [](const Dim& d) { return d.str(); });
  }
};

std::string id(ValueId v) { return v == kNoValue ? "_" : "%" + std::to_string(v); }

void print_node(const Graph& graph, const Node& node, std::string& out) {
  for (size_t i = 0; i < node.results.size(); ++i) {
    out += (i != 0 ? ", " : "") + id(node.results[i]);
  }
  out += " = " + node.op + "(";
  for (size_t i = 0; i < node.operands.size(); ++i) {
    out += (i != 0 ? ", " : "") + id(node.operands[i]);
  }
  out += ')';
  if (!node.attrs.empty()) out += " {" + print(node.attrs) + '}';
  out += " :";
  for (size_t i = 0; i < node.results.size(); ++i) {
    out += (i != 0 ? ", " : " ") + graph.type(node.results[i]).str();
  }
  out += '\n';
}

std::string hex(std::string_view bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  out.reserve(bytes.size() * 2);
  for (char c : bytes) {
    auto u = static_cast<unsigned char>(c);
    out += kDigits[u >> 4];
    out += kDigits[u & 15];
  }
  return out;
}

}  // namespace

std::string print(const Attrs& attrs) {
  std::string out;
  for (const auto& [name, attr] : attrs) {
    out += (out.empty() ? "" : ", ") + name + "=" + std::visit(AttrText{}, attr);
  }
  return out;
}

std::string print(const Graph& graph) {
  std::string out = "rmir 1\n";
  for (const auto& [name, range] : graph.symbols) {
    out += "sym " + name + " [" + std::to_string(range.lo) + "," + std::to_string(range.hi) + "]\n";
  }
  for (ValueId v : graph.inputs()) {
    const Value& value = graph.value(v);
    out += "input " + id(v) + " " + quote(value.name) + " : " + value.type.str() +
           (value.donated ? " donated" : "") + "\n";
  }
  for (const Relation& relation : graph.relations) out += "where " + relation.str() + "\n";
  for (size_t i = 0; i < graph.num_values(); ++i) {
    auto v = static_cast<ValueId>(i);
    const Value& value = graph.value(v);
    if (value.kind == ValueKind::kWeight) {
      out += "weight " + id(v) + " " + quote(value.name) + " : " + value.type.str() + "\n";
    } else if (value.kind == ValueKind::kLiteral) {
      out += "literal " + id(v) + " : " + value.type.str() + " = " + hex(value.literal) + "\n";
    }
  }
  for (const auto& node : graph.nodes) print_node(graph, node, out);
  out += "return";
  for (size_t i = 0; i < graph.outputs.size(); ++i) {
    out += (i != 0 ? ", " : " ") + id(graph.outputs[i]);
  }
  return out + "\n";
}

}  // namespace rm::ir
