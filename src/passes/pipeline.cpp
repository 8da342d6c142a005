// The pipelines as literal lists, and what runs around every pass: time, statistics, dump, verify.
#include <chrono>
#include <cstdio>
#include <fstream>

#include "base/error.hpp"
#include "ir/text.hpp"
#include "ir/verify.hpp"
#include "ops/registry.hpp"
#include "passes/passes.hpp"
#include "passes/quantize.hpp"

namespace rm::passes {
namespace {

constexpr NamedPass kInference[] = {
    {"infer", infer, 0},
    {"canonicalise", canonicalise, 0},
    {"fold", fold, 0},
    {"canonicalise", canonicalise, 0},
    {"cse", cse, 0},
    {"fuse_norm", fuse_norm, 1},
    {"fuse_activation", fuse_activation, 1},
    {"fuse_rope", fuse_rope, 1},
    {"fuse_sdpa", fuse_sdpa, 1},
    {"merge_linear", merge_linear, 1},
    {"fuse_gemm", fuse_gemm, 1},
    {"fuse_conv", fuse_conv, 1},
    {"fuse_residual_norm", fuse_residual_norm, 1},
    {"fuse_ewise", fuse_ewise, 1},
    {"quantize", quantize, 0},
    {"canonicalise", canonicalise, 1},
    {"cse", cse, 0},
    {"dce", dce, 0},
};

// Before differentiation: formulas that have an operator of their own also have a gradient of their
// own, and fewer values to keep for it. What is not kept is computed again, which on a CPU pays for
// losses alone.
constexpr NamedPass kForward[] = {
    {"infer", infer, 0},
    {"fuse_loss", fuse_loss, 1},
};
constexpr NamedPass kForwardOnGpu[] = {
    {"infer", infer, 0},
    {"canonicalise", canonicalise, 0},
    {"cse", cse, 0},
    {"fuse_norm", fuse_norm, 1},
    {"fuse_activation", fuse_activation, 1},
    {"fuse_sdpa", fuse_sdpa, 1},
    {"fuse_loss", fuse_loss, 1},
};

void dump(const ir::Graph& graph, size_t index, std::string_view pass, const std::string& dir) {
  char number[8];
  std::snprintf(number, sizeof number, "%02zu", index);
  std::string path = dir + "/" + number + "_" + std::string(pass) + ".rmir";
  std::ofstream file(path, std::ios::binary);
  file << ir::print(graph);
  if (!file.flush()) {
    throw Error(RM_NOT_FOUND,
                "[dump_ir] expected a directory that can be written, got a failure "
                "writing " +
                    path + "; try creating it first");
  }
}

void check(const ir::Graph& graph) {
  ir::verify(graph);
  ops::infer_and_check(graph);
}

}  // namespace

PassContext context_from(const Options& options, bool for_gpu) {
  PassContext context;
  context.for_gpu = for_gpu;
  context.optimization_level = static_cast<int>(options.integer("optimization_level"));
  context.dump_dir = options.text("dump_ir");
  const std::string& precision = options.text("precision");
  if (precision == "int8" || precision == "int4") {
    const std::string& group = options.text("group_size");
    context.weight_bits = precision == "int8" ? 8 : 4;
    context.weight_group =
        group == "auto" ? auto_group(context.weight_bits, for_gpu) : std::stoll(group);
    const std::string& activations = options.text("activations");
    if (for_gpu) return context;
    context.activation_bits = activations == "auto"   ? auto_activations(context.weight_bits)
                              : activations == "int8" ? 8
                                                      : 16;
  }
  return context;
}

std::span<const NamedPass> inference_pipeline() { return kInference; }
std::span<const NamedPass> forward_pipeline(bool gpu) {
  if (gpu) return kForwardOnGpu;
  return kForward;
}

std::vector<PassRecord> run_pipeline(ir::Graph& graph, std::span<const NamedPass> pipeline,
                                     const PassContext& context) {
  using Clock = std::chrono::steady_clock;
  std::vector<PassRecord> records;
  for (const NamedPass& pass : pipeline) {
    if (pass.level > context.optimization_level) continue;
    PassRecord record{pass.name, 0, graph.nodes.size(), 0};
    auto start = Clock::now();
    pass.run(graph, context);
    record.ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    record.nodes_after = graph.nodes.size();
    records.push_back(record);
    if (!context.dump_dir.empty()) dump(graph, records.size(), pass.name, context.dump_dir);
    if (context.verify) check(graph);
  }
  check(graph);
  return records;
}

}  // namespace rm::passes
