// A convolution as every row sees it: sizes and strides with three spatial axes, missing ones in
// front of size 1.
#pragma once

#include <array>
#include <string>

#include "common/problem.hpp"

namespace rm::cpu::conv {

enum Operand { kX, kW, kBias, kResidual, kY, kOperands };
enum Activation { kNone, kRelu, kGelu, kGeluTanh, kSilu, kTanh, kSigmoid, kHardSwish };

using Triple = std::array<int64_t, 3>;

struct ConvProblem {
  DType dtype = DType::invalid;
  bool transposed = false, constant_w = false;
  bool given[kOperands] = {};
  bool channels_last[kOperands] = {};  // dense in the order N, spatial axes, C
  int axes = 0;                        // spatial ones of the caller
  int64_t batch = 0, groups = 1;
  int64_t from = 0, to = 0;  // channels of x and of y, all groups
  Triple x{}, y{}, k{};      // sizes
  Triple stride{}, begin{}, end{}, dilation{}, output_padding{};
  // Elements: N, C and the spatial axes of x, residual and y; w's two channel axes and its own.
  std::array<int64_t, 5> step[kOperands] = {};
  Activation activation = kNone;

  int64_t from_each() const { return from / groups; }
  int64_t to_each() const { return to / groups; }
  double flops() const;
  double weights() const;  // elements
  bool empty() const;
};

/// Throws std::invalid_argument when the operands break the schema.
ConvProblem decode(const rm_problem& p);

}  // namespace rm::cpu::conv
