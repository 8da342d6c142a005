// What the kernels of sdpa_backward know of a problem, and their entry points.
#pragma once

#include "ops/sdpa/shape.hpp"

namespace rm::cpu {

struct SdpaBackwardShape {
  SdpaShape forward;  // of the operands, and of y
  int64_t lse[3], dy[4], dq[4], dk[4], dv[4];  // strides, in elements
};

struct SdpaBackwardData {
  SdpaData forward;  // o is y, which is read; lse lies as the shape says
  const void* dy;
  void *dq, *dk, *dv;
  int64_t keys;  // those behind are not seen by any query
};

/// All queries of group g of heads of batch b; scratch is 64-byte aligned.
struct SdpaBackwardTable {
  void (*run)(const SdpaBackwardShape&, const SdpaBackwardData&, int64_t b, int64_t g,
              char* scratch);
  uint64_t (*scratch_bytes)(const SdpaBackwardShape&);
  int64_t rows, row_block, columns, key_block;  // edges: of a tile, of a block, of a panel
};

}  // namespace rm::cpu
