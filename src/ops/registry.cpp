// The list of operators (ops.def and the elementwise opcodes), sorted once, and the type check.
#include "ops/registry.hpp"

#include <algorithm>
#include <set>

#include "base/error.hpp"
#include "ops/elementwise/elementwise.hpp"
#include "ops/ewise_opcodes.hpp"
#include "ops/infer.hpp"

namespace rm::ops {

#define RM_OP(record) extern const OpDef record;
#include "ops/ops.def"
#undef RM_OP

namespace {

const std::vector<const OpDef*>& table() {
  static const std::vector<const OpDef*> sorted = [] {
    static const std::vector<OpDef> elementwise = elementwise_ops();
    std::vector<const OpDef*> all{
#define RM_OP(record) &record,
#include "ops/ops.def"
#undef RM_OP
    };
    for (const OpDef& def : elementwise) all.push_back(&def);
    std::sort(all.begin(), all.end(),
              [](const OpDef* a, const OpDef* b) { return a->name < b->name; });
    return all;
  }();
  return sorted;
}

void check_arity(const OpDef& def, const ir::Node& node) {
  auto given = static_cast<int>(node.operands.size());
  if (given < def.min_operands || given > def.max_operands) {
    std::string most =
        def.max_operands == kAnyNumber ? "any number of" : std::to_string(def.max_operands);
    throw_invalid("[" + node.op + "] expected " + std::to_string(def.min_operands) + " to " + most +
                  " operands, got " + std::to_string(given));
  }
  for (int i = 0; i < def.min_operands; ++i) {
    if (node.operands[static_cast<size_t>(i)] == ir::kNoValue) {
      throw_invalid("[" + node.op + "] expected operand " + std::to_string(i) +
                    " to be present, got none");
    }
  }
}

bool agrees(const ir::TensorType& written, const ir::TensorType& inferred) {
  if (written.dtype != inferred.dtype || written.rank() != inferred.rank()) return false;
  for (size_t i = 0; i < written.rank(); ++i) {
    if (compare(written.dims[i], inferred.dims[i]) == DimOrder::kDifferent) return false;
  }
  return true;
}

}  // namespace

std::span<const OpDef* const> all() { return table(); }

const OpDef* find(std::string_view op) {
  if (op.substr(0, 5) == "aten.") op = "aten";
  auto it =
      std::lower_bound(table().begin(), table().end(), op,
                       [](const OpDef* def, std::string_view name) { return def->name < name; });
  return it != table().end() && (*it)->name == op ? *it : nullptr;
}

const OpDef& get(std::string_view op) {
  const OpDef* def = find(op);
  if (def == nullptr) {
    throw Error(RM_UNIMPLEMENTED, "[" + std::string(op) +
                                      "] expected an operator of docs/operators.md, got an "
                                      "unknown name; try an aten.<name>.<overload> node");
  }
  return *def;
}

Effects effects(const ir::Node& node) {
  const OpDef* def = find(node.op);
  if (def == nullptr) return Effects::kIo;
  if (def->is(kOpaque) && node.has("pure") && node.i("pure") == 1) return Effects::kNone;
  return def->effects;
}

std::vector<char> constant_values(const ir::Graph& graph) {
  std::vector<char> constant(graph.num_values(), 0);
  for (size_t v = 0; v < constant.size(); ++v) {
    constant[v] = graph.is_constant(static_cast<ir::ValueId>(v)) ? 1 : 0;
  }
  for (const ir::Node& node : graph.nodes) {
    const bool all =
        is_constant(node, [&](ir::ValueId v) { return constant[static_cast<size_t>(v)] != 0; });
    for (ir::ValueId r : node.results) constant[static_cast<size_t>(r)] = all ? 1 : 0;
  }
  return constant;
}

namespace {

// Registers, references and folding hold integers as i64, where large u64 would be negative: these
// neither order nor divide them, or treat both alike.
bool keeps_u64(const ir::Node& node) {
  static const std::set<std::string_view> kOperators{
      "reshape", "permute", "expand",     "slice", "concat", "cast",   "bitcast", "full",
      "add",     "sub",     "mul",        "eq",    "ne",     "and",    "or",      "xor",
      "neg",     "where",   "index_copy", "index", "gather", "assign", "ewise"};
  return kOperators.count(node.op) != 0 || node.op.rfind("aten.", 0) == 0;
}

void check_u64(const ir::Graph& graph, const ir::Node& node) {
  for (ir::ValueId v : node.operands) {
    if (v == ir::kNoValue || graph.type(v).dtype != ir::DType::kU64 || keeps_u64(node)) continue;
    fail(node, "operands without u64", graph.type(v).str() + "; try a cast to i64 or f64");
  }
}

}  // namespace

std::vector<ir::TensorType> infer(const ir::Graph& graph, const ir::Node& node) {
  const OpDef& def = get(node.op);
  check_arity(def, node);
  check_u64(graph, node);
  return def.infer(graph, node);
}

void infer_and_check(const ir::Graph& graph) {
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const ir::Node& node = graph.nodes[n];
    std::vector<ir::TensorType> inferred = infer(graph, node);
    if (inferred.size() != node.results.size()) {
      throw_invalid("[" + node.op + "] expected " + std::to_string(inferred.size()) +
                    " results, got " + std::to_string(node.results.size()) + " at node " +
                    std::to_string(n));
    }
    for (size_t r = 0; r < inferred.size(); ++r) {
      const ir::TensorType& written = graph.type(node.results[r]);
      if (agrees(written, inferred[r])) continue;
      throw_invalid("[" + node.op + "] expected result " + std::to_string(r) + " of type " +
                    inferred[r].str() + ", got " + written.str() + " written at node " +
                    std::to_string(n) + " (%" + std::to_string(node.results[r]) + ")");
    }
  }
}

Cost cost(const ir::Graph& graph, const ir::Node& node) { return get(node.op).cost(graph, node); }

}  // namespace rm::ops
