// The pipeline on captured language models (data/*.rmir, one layer each), and what runs around it.
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/error.hpp"
#include "support.hpp"

using namespace rm;
using namespace rm::test;

namespace {

ir::Graph captured(const std::string& name) {
  std::ifstream file(std::string(RM_TEST_DATA) + "/" + name + ".rmir");
  REQUIRE(file.good());
  std::stringstream text;
  text << file.rdbuf();
  ir::Graph graph = ir::parse(text.str());
  ir::verify(graph);
  ops::infer_and_check(graph);
  return graph;
}

ir::Graph optimised(const ir::Graph& graph) {
  ir::Graph out = graph;
  passes::PassContext context;
  context.verify = true;
  passes::run_pipeline(out, passes::inference_pipeline(), context);
  return out;
}

// The operators in order, without views and without what is computed from constants alone.
std::string skeleton(const ir::Graph& graph) {
  std::vector<char> constant(graph.num_values(), 0);
  for (size_t v = 0; v < constant.size(); ++v)
    constant[v] = graph.is_constant(static_cast<ir::ValueId>(v));
  std::string out;
  for (const auto& node : graph.nodes) {
    bool all = true;
    for (ir::ValueId v : node.operands)
      all = all && (v == ir::kNoValue || constant[static_cast<size_t>(v)] != 0);
    for (ir::ValueId r : node.results) constant[static_cast<size_t>(r)] = all;
    if (all || ops::get(node.op).is(ops::kView)) continue;
    out += (out.empty() ? "" : " ") + node.op;
    if (node.op == "gemm" && node.s("activation") != "none") out += ":" + node.s("activation");
    if (node.op == "gemm" && node.operands[3] != ir::kNoValue) out += "+r";
  }
  return out;
}

}  // namespace

TEST_CASE("captured models keep their numbers through the pipeline") {
  for (const char* name : {"bert", "gpt2_prefill", "gpt2_decode", "llama_prefill", "llama_decode",
                           "llama_nomask", "t5", "llama_bf16"}) {
    CAPTURE(name);
    ir::Graph before = captured(name), after = optimised(before);
    double tolerance = std::string(name) == "llama_bf16" ? 0.1 : 2e-4;
    check_same_numbers(before, after, {{"s0", 2}, {"s1", 5}}, tolerance);
    check_same_numbers(before, after, {{"s0", 3}, {"s1", 2}}, tolerance);
  }
}

TEST_CASE("an encoder layer is two attention products, two feed-forward products and two norms") {
  CHECK(skeleton(optimised(captured("bert"))) ==
        "embedding embedding ewise layer_norm cast gemm sdpa gemm+r layer_norm gemm:gelu gemm+r "
        "layer_norm gemm:tanh");
  CHECK(skeleton(optimised(captured("t5"))) ==
        "embedding cast rms_norm gemm where sdpa gemm+r rms_norm gemm:relu gemm+r rms_norm");
}

TEST_CASE("a decoder layer is fused down to products, norms, rope and attention") {
  CHECK(skeleton(optimised(captured("llama_nomask"))) ==
        "embedding rms_norm gemm rope rope sdpa gemm+r rms_norm gemm ewise gemm+r rms_norm gemm");
  CHECK(skeleton(optimised(captured("llama_bf16"))) ==
        "embedding cast and rms_norm gemm rope rope sdpa gemm+r rms_norm gemm ewise gemm+r "
        "rms_norm gemm");
  CHECK(
      skeleton(optimised(captured("llama_decode"))) ==
      "embedding cast rms_norm gemm rope rope concat concat sdpa gemm+r rms_norm gemm ewise gemm+r "
      "rms_norm gemm");
  CHECK(skeleton(optimised(captured("gpt2_decode"))) ==
        "embedding add cast layer_norm gemm concat concat sdpa gemm+r layer_norm gemm:gelu_tanh "
        "gemm+r "
        "layer_norm gemm");
}

TEST_CASE("level 0 fuses nothing") {
  ir::Graph graph = captured("bert");
  passes::PassContext context;
  context.optimization_level = 0;
  passes::run_pipeline(graph, passes::inference_pipeline(), context);
  CHECK(count(graph, "gemm") == 0);
  CHECK(count(graph, "linear") == 7);
}

TEST_CASE("the pipeline records every pass and writes the graph after each") {
  auto dir = std::filesystem::temp_directory_path() / "rm_passes_test_dump";
  std::filesystem::remove_all(dir);
  std::filesystem::create_directories(dir);
  passes::PassContext context;
  context.dump_dir = dir.string();
  ir::Graph graph = captured("bert");
  size_t nodes = graph.nodes.size();
  auto records = passes::run_pipeline(graph, passes::inference_pipeline(), context);
  REQUIRE(records.size() == passes::inference_pipeline().size());
  CHECK(records.front().nodes_before == nodes);
  CHECK(records.back().nodes_after == graph.nodes.size());
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    std::ifstream file(entry.path());
    std::stringstream text;
    text << file.rdbuf();
    CHECK_NOTHROW(ir::parse(text.str()));
    ++files;
  }
  CHECK(files == records.size());
  std::filesystem::remove_all(dir);
  CHECK_THROWS_AS(passes::run_pipeline(graph, passes::inference_pipeline(), context), Error);
}

TEST_CASE("a contradiction in the written types stops the pipeline at its first pass") {
  ir::Graph graph =
      ir::parse("rmir 1\ninput %0 \"x\" : f32[2]\n%1 = exp(%0) : f32[3]\nreturn %1\n");
  CHECK_THROWS_AS(passes::run_pipeline(graph, passes::inference_pipeline(), passes::PassContext{}),
                  Error);
}
