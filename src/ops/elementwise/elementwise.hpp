// Records of the unary, binary and `where` operators, made from the opcode table.
#pragma once

#include <vector>

#include "ops/op_def.hpp"

namespace rm::ops {

std::vector<OpDef> elementwise_ops();

}  // namespace rm::ops
