// One operator of the high-level IR: its arity, type inference, cost and reference evaluation.
//
// A record is constant data; ops.def lists them all. docs/operators.md is the contract.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "ir/graph.hpp"
#include "ops/host_tensor.hpp"

namespace rm::ops {

enum Trait : uint32_t {
  kNone = 0,
  kElementwise = 1u << 0,  // result element i depends on operand elements i (after broadcasting)
  kView = 1u << 1,         // the same elements, another shape: a strided view can serve it
  kCommutative = 1u << 2,  // operands 0 and 1 may be exchanged
  kReduction = 1u << 3,
  kContraction = 1u << 4,  // matrix products and attention
  kIndexing = 1u << 5,     // elements chosen by the values of an operand
  kOpaque = 1u << 6,       // run by another framework: types are taken as written
};

/// What a node does besides computing its results from its operands.
enum class Effects : uint8_t {
  kNone,    // nothing: the same operands give the same results
  kRandom,  // draws random numbers: two runs differ, a result is never a constant
  kIo,      // is seen outside
};

/// Arithmetic operations and bytes read and written, for static types.
struct Cost {
  double flops = 0, bytes = 0;
};

/// nullptr stands for an absent optional operand; trailing absent operands may be missing.
using HostOperands = std::vector<const HostTensor*>;

inline constexpr int kAnyNumber = 1 << 20;
inline constexpr int kNoOperand = -1;

struct OpDef {
  std::string_view name;
  int min_operands, max_operands;  // the first min_operands are required
  uint32_t traits;
  /// Result types; throws rm::Error "[op] expected ..., got ...; try ...". Dims may be symbolic.
  std::vector<ir::TensorType> (*infer)(const ir::Graph&, const ir::Node&);
  Cost (*cost)(const ir::Graph&, const ir::Node&);
  /// Plain loops accumulating in double; `results` are the node's static result types.
  std::vector<HostTensor> (*reference)(const ir::Node&, const HostOperands&,
                                       const std::vector<ir::TensorType>& results);

  Effects effects = Effects::kNone;
  /// Result 0 is this operand with a part of it replaced, so it may take over the operand's memory.
  int updates = kNoOperand;

  bool is(Trait trait) const { return (traits & trait) != 0; }
};

}  // namespace rm::ops
