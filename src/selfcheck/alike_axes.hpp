// The axes of an operator's operands by name: which sizes are one size, and what kernels do along it.
#pragma once

#include <cstdint>
#include <vector>

#include "selfcheck/alike.hpp"

namespace rm::selfcheck {

/// One axis of the problem; several axes of operands may share it.
struct Axis {
  int64_t size;
  char letter;     // of docs/operators.md, 0: none
  bool inner;      // kernels run along it in vectors
  bool fixed = false;
};

/// The axes of each operand as indices; inputs, then outputs. Empty for an absent one.
struct Axes {
  std::vector<Axis> all;
  std::vector<std::vector<int>> of;

  int add(int64_t size, char letter, bool inner = false, bool fixed = false) {
    all.push_back({size, letter, inner, fixed});
    return static_cast<int>(all.size()) - 1;
  }
};

/// Of a problem with an output. Folds and merges axes of operands first, as kernels do.
Axes axes_of(Shape& shape);

}  // namespace rm::selfcheck
