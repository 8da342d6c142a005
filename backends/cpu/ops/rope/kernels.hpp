// One row of rope, as the ISA sources see it.
#pragma once

#include "common/types.hpp"

namespace rm::cpu {

struct RopeRow {
  const void *x, *cos, *sin;
  void* y;
  int64_t n, x_stride, cos_stride, sin_stride, y_stride;
};
using RopeFn = void (*)(const RopeRow&);
struct RopeTable {
  RopeFn (*find)(DType x, DType cos, bool interleaved);  // nullptr: no such mix of types
};

}  // namespace rm::cpu
