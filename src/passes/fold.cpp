// Constant folding of small tensors by reference evaluation, and the type check pass.
#include <algorithm>

#include "ops/evaluate.hpp"
#include "ops/registry.hpp"
#include "passes/passes.hpp"
#include "passes/rewriter.hpp"

namespace rm::passes {
namespace {

// Larger results stay nodes: constant expressions are computed once, outside the plan.
constexpr double kMaxFoldedBytes = 4096;

bool is_static(const ir::Graph& graph, const ir::Node& node) {
  double bytes = 0;  // a view may repeat one element more often than memory could
  for (ir::ValueId r : node.results) {
    const ir::TensorType& type = graph.type(r);
    if (!type.is_static()) return false;
    double size = static_cast<double>(ir::size_bytes(type.dtype));
    for (const ir::Dim& d : type.dims) size *= static_cast<double>(d.value());
    bytes += size;
  }
  for (const auto& [name, attr] : node.attrs) {
    const auto* dims = std::get_if<ir::Dims>(&attr);
    if (dims == nullptr) continue;
    if (!std::all_of(dims->begin(), dims->end(), [](const ir::Dim& d) { return d.is_static(); }))
      return false;
  }
  return bytes <= kMaxFoldedBytes;
}

bool fold_node(Rewriter& rw, const ir::Node& node) {
  const ops::OpDef* def = ops::find(node.op);
  if (def == nullptr || def->is(ops::kOpaque) || !ops::is_pure(node)) return false;
  if (!is_static(rw.graph(), node)) return false;
  std::vector<ops::HostTensor> held;
  for (ir::ValueId v : node.operands) {
    if (v == ir::kNoValue) {
      held.emplace_back();
      continue;
    }
    const ir::Value& value = rw.graph().value(v);
    if (value.kind != ir::ValueKind::kLiteral) return false;
    held.push_back({value.type, value.literal});
  }
  std::vector<const ops::HostTensor*> operands;
  for (size_t i = 0; i < held.size(); ++i) {
    operands.push_back(node.operands[i] == ir::kNoValue ? nullptr : &held[i]);
  }
  std::vector<ops::HostTensor> results = ops::evaluate_node(rw.graph(), node, operands);
  for (size_t r = 0; r < results.size(); ++r) {
    rw.replace(node.results[r], rw.literal(results[r].type, std::move(results[r].bytes)));
  }
  return true;
}

}  // namespace

void infer(ir::Graph& graph, const PassContext&) { ops::infer_and_check(graph); }

void fold(ir::Graph& graph, const PassContext&) { Rewriter::run(graph, {fold_node}); }

void dce(ir::Graph& graph, const PassContext&) { graph.compact(); }

}  // namespace rm::passes
