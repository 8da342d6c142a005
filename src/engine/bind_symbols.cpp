// Plain symbols bind directly; an expression linear in one unbound symbol is solved for it.
#include "engine/bind_symbols.hpp"

#include <set>

#include "base/error.hpp"

namespace rm::engine {
namespace {

[[noreturn]] void mismatch(const ir::Value& input, const ir::Layout& got) {
  std::string dims;
  for (int64_t d : got.dims) dims += (dims.empty() ? "" : ",") + std::to_string(d);
  throw Error(RM_INVALID_ARGUMENT,
              "[bind] expected '" + input.name + "' to fit " + input.type.str() + ", got " +
                  std::string(ir::name(got.dtype)) + "[" + dims + "]",
              "RM105");
}

bool solve_linear(const ir::Dim& expr, int64_t actual, ir::Bindings& bindings) {
  std::set<std::string> unbound;
  expr.for_each_symbol([&](const std::string& s) {
    if (bindings.find(s) == bindings.end()) unbound.insert(s);
  });
  if (unbound.size() != 1) return false;
  auto at = [&](int64_t x) {
    ir::Bindings trial = bindings;
    trial[*unbound.begin()] = x;
    return expr.substitute(trial).value();
  };
  int64_t base = at(0), slope = 0, distance = 0;
  if (__builtin_sub_overflow(at(1), base, &slope) ||
      __builtin_sub_overflow(actual, base, &distance)) {
    return false;
  }
  if (slope == 0 || (slope != -1 && distance % slope != 0)) return false;
  int64_t x = 0;
  if (slope != -1) {
    x = distance / slope;
  } else if (__builtin_sub_overflow(int64_t{0}, distance, &x)) {
    return false;
  }
  if (at(x) != actual) return false;
  bindings[*unbound.begin()] = x;
  return true;
}

}  // namespace

ir::Bindings bind_symbols(const ir::Graph& graph, const std::vector<ir::Layout>& inputs) {
  const auto& ids = graph.inputs();
  if (ids.size() != inputs.size()) {
    throw Error(RM_INVALID_ARGUMENT,
                "[bind] expected " + std::to_string(ids.size()) + " inputs, got " +
                    std::to_string(inputs.size()),
                "RM105");
  }
  ir::Bindings bindings;
  std::vector<std::pair<size_t, size_t>> expressions;  // (input, axis) not bound directly
  for (size_t i = 0; i < ids.size(); ++i) {
    const ir::Value& value = graph.value(ids[i]);
    if (value.type.dtype != inputs[i].dtype || value.type.rank() != inputs[i].dims.size()) {
      mismatch(value, inputs[i]);
    }
    for (size_t a = 0; a < inputs[i].dims.size(); ++a) {
      const ir::Dim& d = value.type.dims[a];
      if (d.is_static()) {
        if (d.value() != inputs[i].dims[a]) mismatch(value, inputs[i]);
      } else if (graph.symbols.find(d.str()) != graph.symbols.end()) {
        auto [it, fresh] = bindings.emplace(d.str(), inputs[i].dims[a]);
        if (!fresh && it->second != inputs[i].dims[a]) mismatch(value, inputs[i]);
      } else {
        expressions.emplace_back(i, a);
      }
    }
  }
  for (bool progress = true; progress;) {
    progress = false;
    for (auto [i, a] : expressions) {
      const ir::Dim& d = graph.value(ids[i]).type.dims[a];
      progress = solve_linear(d, inputs[i].dims[a], bindings) || progress;
    }
  }
  for (auto [i, a] : expressions) {
    const ir::Value& value = graph.value(ids[i]);
    ir::Dim d = value.type.dims[a].substitute(bindings);
    if (!d.is_static() || d.value() != inputs[i].dims[a]) mismatch(value, inputs[i]);
  }
  for (const auto& [name, range] : graph.symbols) {
    auto it = bindings.find(name);
    if (it == bindings.end()) continue;  // bound by nothing: only legal when nothing uses it
    if (it->second < range.lo || it->second > range.hi) {
      throw Error(RM_INVALID_ARGUMENT,
                  "[bind] expected " + name + " in [" + std::to_string(range.lo) + "," +
                      std::to_string(range.hi) + "], got " + std::to_string(it->second),
                  "RM105");
    }
  }
  for (const ir::Relation& relation : graph.relations) {
    const ir::Relation now = relation.substitute(bindings);
    if (now.is_static() && !now.order_holds()) {
      throw Error(RM_INVALID_ARGUMENT,
                  "[bind] expected sizes with " + relation.str() + ", got " + now.str(), "RM105");
    }
  }
  return bindings;
}

}  // namespace rm::engine
