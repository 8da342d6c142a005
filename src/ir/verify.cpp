// The rules: single definition, definition before use, declared symbols, legal literals.
#include "ir/verify.hpp"

#include "base/error.hpp"

namespace rm::ir {
namespace {

[[noreturn]] void broken(const char* rule, const std::string& where) {
  throw Error(RM_INTERNAL, std::string("[verify] expected ") + rule + ", got " + where);
}

std::string at(const Graph& graph, size_t n) {
  return "node " + std::to_string(n) + " (" + graph.nodes[n].op + ")";
}

void ids_are_in_range(const Graph& graph) {
  auto ok = [&](ValueId v) { return v >= 0 && static_cast<size_t>(v) < graph.num_values(); };
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    for (ValueId v : graph.nodes[n].operands) {
      if (v != kNoValue && !ok(v)) broken("operand ids in range", at(graph, n));
    }
    if (graph.nodes[n].results.empty()) broken("at least one result", at(graph, n));
    for (ValueId v : graph.nodes[n].results) {
      if (!ok(v) || graph.value(v).kind != ValueKind::kResult) {
        broken("results that are result values", at(graph, n));
      }
    }
  }
  for (ValueId v : graph.outputs) {
    if (!ok(v)) broken("output ids in range", std::to_string(v));
  }
}

void values_are_defined_once_before_use(const Graph& graph) {
  std::vector<char> defined(graph.num_values(), 0);
  for (size_t v = 0; v < graph.num_values(); ++v) {
    if (graph.value(static_cast<ValueId>(v)).kind != ValueKind::kResult) defined[v] = 1;
  }
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    for (ValueId v : graph.nodes[n].operands) {
      if (v != kNoValue && defined[static_cast<size_t>(v)] == 0) {
        broken("operands defined above their use", at(graph, n) + ", %" + std::to_string(v));
      }
    }
    for (ValueId v : graph.nodes[n].results) {
      if (defined[static_cast<size_t>(v)]++ != 0) {
        broken("one definition a value", at(graph, n) + ", %" + std::to_string(v));
      }
    }
  }
  for (ValueId v : graph.outputs) {
    if (defined[static_cast<size_t>(v)] == 0) broken("defined outputs", "%" + std::to_string(v));
  }
}

void symbols_are_declared(const Graph& graph) {
  auto check = [&](const Dims& dims, const std::string& where) {
    for (const auto& d : dims) {
      d.for_each_symbol([&](const std::string& s) {
        if (graph.symbols.find(s) == graph.symbols.end()) {
          broken("declared symbols", s + " in " + where);
        }
      });
    }
  };
  for (size_t v = 0; v < graph.num_values(); ++v) {
    check(graph.type(static_cast<ValueId>(v)).dims, "the type of %" + std::to_string(v));
  }
  for (const Relation& relation : graph.relations) {
    check({relation.left, relation.right}, "where " + relation.str());
  }
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    for (const auto& [name, attr] : graph.nodes[n].attrs) {
      if (const auto* dims = std::get_if<Dims>(&attr)) check(*dims, at(graph, n));
    }
  }
}

void literals_fit_their_type(const Graph& graph) {
  for (size_t i = 0; i < graph.num_values(); ++i) {
    const Value& v = graph.value(static_cast<ValueId>(i));
    if (v.kind != ValueKind::kLiteral) continue;
    if (!v.type.is_static() || v.type.num_bytes() != static_cast<int64_t>(v.literal.size())) {
      broken("literal bytes that fit the type", v.type.str());
    }
  }
}

constexpr void (*kRules[])(const Graph&) = {ids_are_in_range, values_are_defined_once_before_use,
                                            symbols_are_declared, literals_fit_their_type};

}  // namespace

void verify(const Graph& graph) {
  for (auto* rule : kRules) rule(graph);
}

}  // namespace rm::ir
