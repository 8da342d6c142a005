// uniform: random numbers as a function of a state. Drawing changes nothing; whoever draws assigns
// the state its next counter, so two draws with one state are one value and may be merged.
#include <array>

#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

Types infer_uniform(const Graph& graph, const Node& node) {
  const TensorType& state = operand_type(graph, node, 0);
  check_dtype(node, state, ir::DType::kI64, "a state");
  check_rank(node, state, 1, "a state");
  unify(node, state.dims[0], ir::Dim(2), "the state's size");
  const TensorType& out = result_type(graph, node);
  if (out.dtype != ir::DType::kF32 && out.dtype != ir::DType::kF64) {
    fail(node, "a result of f32 or f64", out.str());
  }
  return {out};
}

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
struct Philox {
  std::array<uint64_t, 2> key;

  std::array<uint64_t, 4> operator()(std::array<uint64_t, 4> x) const {
    constexpr uint64_t kLow = 0xFFFFFFFF;
    for (uint64_t round = 0; round < 10; ++round) {
      const uint64_t k0 = (key[0] + round * 0x9E3779B9) & kLow;
      const uint64_t k1 = (key[1] + round * 0xBB67AE85) & kLow;
      const uint64_t a = 0xD2511F53 * x[0], b = 0xCD9E8D57 * x[2];
      x = {(b >> 32) ^ x[1] ^ k0, b & kLow, (a >> 32) ^ x[3] ^ k1, a & kLow};
    }
    return x;
  }
};

std::vector<HostTensor> reference_uniform(const Node&, const HostOperands& in, const Types& out) {
  constexpr uint64_t kLow = 0xFFFFFFFF;
  const std::vector<int64_t> state = to_ints(*in[0]);
  const auto seed = static_cast<uint64_t>(state[0]), counter = static_cast<uint64_t>(state[1]);
  const Philox philox{{seed & kLow, seed >> 32}};
  std::vector<double> values;
  for (int64_t i = 0; i < out[0].num_elements(); ++i) {
    const auto block = static_cast<uint64_t>(i / 4);
    const auto words = philox({block & kLow, block >> 32, counter & kLow, counter >> 32});
    values.push_back(static_cast<double>(words[static_cast<size_t>(i % 4)] >> 8) * 0x1p-24);
  }
  return {from_doubles(out[0], values)};
}

}  // namespace

extern const OpDef kUniform{"uniform", 1, 1, kNone, infer_uniform, copy_cost, reference_uniform};

}  // namespace rm::ops
