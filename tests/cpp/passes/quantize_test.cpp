// Which weights the pipeline quantises when it is asked to, and what is said about them.
#include "passes/quantize.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "support.hpp"

using namespace rm;
using namespace rm::test;

namespace {

ir::Graph parsed(const std::string& body) {
  ir::Graph graph = ir::parse("rmir 1\ninput %0 \"x\" : f32[4,128]\n" + body);
  ir::verify(graph);
  ops::infer_and_check(graph);
  return graph;
}

ir::Graph quantised(ir::Graph graph, int64_t bits) {
  passes::PassContext context;
  context.weight_bits = bits, context.weight_group = passes::auto_group(bits);
  passes::run_pipeline(graph, passes::inference_pipeline(), context);
  return graph;
}

int64_t nodes_of(const ir::Graph& graph, std::string_view op) {
  return std::count_if(graph.nodes.begin(), graph.nodes.end(),
                       [&](const ir::Node& node) { return node.op == op; });
}

}  // namespace

TEST_CASE("weights as they lie, across their rows and joined by rows are quantised and named") {
  const ir::Graph graph = quantised(parsed(R"(weight %1 "rows" : f32[128,128]
weight %2 "across" : f32[128,128]
weight %3 "joined" : f32[128,128]
%4 = linear(%0, %1) : f32[4,128]
%5 = matmul(%4, %2) : f32[4,128]
%6 = concat(%1, %3) {axis=0} : f32[256,128]
%7 = linear(%5, %6) : f32[4,256]
return %7
)"),
                                    8);
  CHECK(nodes_of(graph, "quant_linear") == 3);
  CHECK(nodes_of(graph, "quantize") == 3);
  const auto found = passes::quantised_weights(graph);
  REQUIRE(found.size() == 3);  // "rows" is in two products, in one form
  CHECK(found[0].name == "across");
  CHECK(found[0].transposed);
  CHECK(found[1].name == "joined");
  CHECK(found[2].name == "rows");
  CHECK(!found[2].transposed);
  for (const auto& weight : found) CHECK((weight.bits == 8 && weight.group == 128));
}

TEST_CASE("computed weights, joined inputs and small weights stay as they are") {
  const ir::Graph graph = quantised(parsed(R"(weight %1 "a" : f32[128,128]
weight %2 "b" : f32[128,64]
weight %3 "small" : f32[64,128]
%4 = exp(%1) : f32[128,128]
%5 = linear(%0, %4) : f32[4,128]
%6 = concat(%2, %2) {axis=1} : f32[128,128]
%7 = linear(%5, %6) : f32[4,128]
%8 = linear(%7, %3) : f32[4,64]
return %8
)"),
                                    4);
  CHECK(nodes_of(graph, "quant_linear") == 0);
  CHECK(passes::quantised_weights(graph).empty());
}

TEST_CASE("linears of one operand are merged, but not where weights are quantised") {
  const char* text = R"(weight %1 "q" : f32[128,128]
weight %2 "k" : f32[128,128]
%3 = linear(%0, %1) : f32[4,128]
%4 = linear(%0, %2) : f32[4,128]
return %3, %4
)";
  CHECK(nodes_of(quantised(parsed(text), 0), "concat") == 1);
  CHECK(nodes_of(quantised(parsed(text), 8), "concat") == 0);
  CHECK(nodes_of(quantised(parsed(text), 8), "quant_linear") == 2);
}

TEST_CASE("activations of 8 bits lay weights out in tiles, and can be kept on the same weights") {
  ir::Graph graph = parsed(R"(weight %1 "w" : f32[128,128]
%2 = linear(%0, %1) : f32[4,128]
return %2
)");
  passes::QuantizeOptions options;
  options.activation_bits = 8;
  CHECK(passes::quantize_linears(graph, options) == 1);
  const auto attributes = [&](std::string_view op) {
    for (const ir::Node& node : graph.nodes) {
      if (node.op == op) return std::pair{node.i_or("tile", 1), node.i_or("x_bits", 16)};
    }
    return std::pair<int64_t, int64_t>{0, 0};
  };
  CHECK(attributes("quantize").first == 8);
  CHECK(attributes("quant_linear") == std::pair<int64_t, int64_t>{8, 8});
  passes::keep_activations(graph);
  CHECK(attributes("quantize").first == 8);
  CHECK(attributes("quant_linear") == std::pair<int64_t, int64_t>{8, 16});
  options.symmetric = false;
  CHECK_THROWS_WITH_AS(passes::quantize_linears(graph, options), doctest::Contains("symmetric"),
                       Error);
}

TEST_CASE("groups the kernels do not have are refused") {
  ir::Graph graph = parsed("return %0\n");
  passes::QuantizeOptions options;
  options.group = 48;
  CHECK_THROWS_WITH_AS(passes::quantize_linears(graph, options), doctest::Contains("48"), Error);
}
