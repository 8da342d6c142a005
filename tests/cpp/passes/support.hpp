// Golden and semantic checks of passes: the text after a pass is compared, and both graphs are
// evaluated by reference on the same random tensors.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "ir/text.hpp"
#include "ir/verify.hpp"
#include "ops/evaluate.hpp"
#include "ops/registry.hpp"
#include "passes/passes.hpp"

namespace rm::test {

inline ir::Graph parse_checked(const std::string& body) {
  ir::Graph graph = ir::parse("rmir 1\n" + body);
  ir::verify(graph);
  ops::infer_and_check(graph);
  return graph;
}

/// Floats are normal; integers are 0 or 1, so that they are masks and indices into any table.
inline ops::HostTensor random_tensor(const ir::TensorType& type, std::mt19937& rng) {
  std::normal_distribution<double> normal(0, 0.7);
  std::vector<double> values;
  for (int64_t i = 0; i < type.num_elements(); ++i) {
    values.push_back(ir::is_floating(type.dtype) ? normal(rng) : static_cast<double>(rng() & 1u));
  }
  return ops::from_doubles(type, values);
}

struct Data {
  std::vector<ops::HostTensor> inputs;
  ops::WeightMap weights;
};

inline Data random_data(const ir::Graph& graph, uint32_t seed) {
  std::mt19937 rng(seed);
  Data data;
  for (ir::ValueId v : graph.inputs()) data.inputs.push_back(random_tensor(graph.type(v), rng));
  for (ir::ValueId v : graph.weights()) {
    data.weights[graph.value(v).name] = random_tensor(graph.type(v), rng);
  }
  return data;
}

/// Largest |a - b| / (1 + |b|); NaN and infinities must be at the same places.
inline double distance(const ops::HostTensor& a, const ops::HostTensor& b) {
  REQUIRE(a.type == b.type);
  std::vector<double> x = ops::to_doubles(a), y = ops::to_doubles(b);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i]) && std::isnan(y[i])) continue;
    if (x[i] == y[i]) continue;
    double d = std::fabs(x[i] - y[i]) / (1 + std::fabs(y[i]));
    worst = std::isnan(d) ? INFINITY : std::max(worst, d);
  }
  return worst;
}

/// Both graphs, with the same symbols bound, give the same numbers on random tensors.
inline void check_same_numbers(const ir::Graph& before, const ir::Graph& after,
                               const ir::Bindings& bindings, double tolerance = 2e-5) {
  ir::Graph a = ir::substitute(before, bindings), b = ir::substitute(after, bindings);
  ops::infer_and_check(b);
  for (uint32_t seed : {1u, 2u}) {
    CAPTURE(seed);
    Data data = random_data(a, seed);
    auto x = ops::evaluate(a, data.inputs, data.weights);
    auto y = ops::evaluate(b, data.inputs, data.weights);
    REQUIRE(x.size() == y.size());
    for (size_t i = 0; i < x.size(); ++i) {
      CAPTURE(i);
      CHECK(distance(y[i], x[i]) <= tolerance);
    }
  }
}

/// Two bindings of the symbols s0, s1 (and s2): sizes above 1, all different.
inline std::vector<ir::Bindings> some_bindings() {
  return {{{"s0", 2}, {"s1", 5}, {"s2", 4}}, {{"s0", 3}, {"s1", 2}, {"s2", 7}}};
}

inline ir::Graph after(const std::string& body, std::initializer_list<passes::Pass> list) {
  ir::Graph graph = parse_checked(body);
  for (passes::Pass pass : list) {
    pass(graph, passes::PassContext{});
    ir::verify(graph);
    ops::infer_and_check(graph);
  }
  return graph;
}

/// Golden text, and the same numbers.
inline void check_rewrite(const std::string& body, std::initializer_list<passes::Pass> list,
                          const std::string& want, double tolerance = 2e-5) {
  ir::Graph graph = after(body, list);
  CHECK(ir::print(graph) == "rmir 1\n" + want);
  for (const auto& bindings : some_bindings()) {
    check_same_numbers(parse_checked(body), graph, bindings, tolerance);
  }
}

/// What must not be rewritten stays, up to numbering.
inline void check_kept(const std::string& body, std::initializer_list<passes::Pass> list) {
  ir::Graph before = parse_checked(body);
  before.compact();
  CHECK(ir::print(after(body, list)) == ir::print(before));
}

inline size_t count(const ir::Graph& graph, std::string_view op) {
  size_t n = 0;
  for (const auto& node : graph.nodes) n += node.op == op ? 1 : 0;
  return n;
}

}  // namespace rm::test
