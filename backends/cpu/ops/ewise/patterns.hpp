// Chains of instructions that one kernel computes better than one by one.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace rm::cpu {

/// By instruction: the register x where an instruction of f32 ends gelu's derivative written out, as
/// autograd does, (erf(x / sqrt 2) + 1) / 2 + x exp(-x^2 / 2) / sqrt(2 pi); else -1. `code` is that of
/// docs/operators.md, of a program of `operands` operands; programs that are not legal have none.
std::vector<int64_t> gelu_slopes(std::span<const int64_t> code, std::span<const double> imm,
                                 size_t operands);

/// Whether the last instruction needs each of them when those of `slopes` read their x alone.
std::vector<char> needed(std::span<const int64_t> code, std::span<const int64_t> slopes,
                         size_t operands);

}  // namespace rm::cpu
