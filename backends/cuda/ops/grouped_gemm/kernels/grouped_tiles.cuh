// Which rows a block has: tiles of rows, none of them over two groups. How many there are is known on
// the device alone, so there are blocks for as many as there can be, and the others end at once.
#pragma once

#include <cstdint>

#include "_shim/device_shim.cuh"
#include "_shim/launch_shim.hpp"

namespace rm::cuda_ops {

struct GroupedArgs {
  const void* x;
  const void* w;
  const void* offsets;
  void* y;
  bool wide;  // offsets are int64
  std::int64_t rows, depth, columns, groups;
  std::int64_t x_row, x_column, w_group, w_row, w_column, offset_step, y_row, y_column;
};

/// Rows [first, first + rows) of group `group`; the group behind the last one has no matrix. No rows:
/// there is no such tile.
struct GroupedTile {
  std::int64_t group = 0, first = 0;
  int rows = 0;
};

/// Tiles of up to kRows rows that S rows in E groups can make, with the rows behind the last.
inline std::int64_t grouped_tiles_at_most(std::int64_t rows, std::int64_t groups, int tile) {
  const std::int64_t used = groups + 1 < rows ? groups + 1 : rows;
  const std::int64_t most = (rows + tile - 1) / tile + used;
  return most < rows ? most : rows;
}

__device__ __forceinline__ std::int64_t grouped_end(const GroupedArgs& p, std::int64_t group) {
  if (group < 0) return 0;
  if (group >= p.groups) return p.rows;
  const std::int64_t at = group * p.offset_step;
  return p.wide ? static_cast<const std::int64_t*>(p.offsets)[at]
                : static_cast<const std::int32_t*>(p.offsets)[at];
}

/// Tile `number` of tiles of kRows rows; called by all lanes of a warp, each of which gets it. Every
/// warp looks at all offsets, so that wrong ones are found.
template <int kRows>
__device__ __forceinline__ GroupedTile grouped_tile(const GroupedArgs& p, std::int64_t number) {
  GroupedTile tile;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::int64_t before = 0;  // tiles of the groups in front
  for (std::int64_t first = 0; first <= p.groups; first += 32) {
    const std::int64_t group = first + lane;
    const std::int64_t begin = grouped_end(p, group - 1), end = grouped_end(p, group);
    if (begin < 0 || end < begin || end > p.rows) __trap();
    const std::int64_t mine = (end - begin + kRows - 1) / kRows;
    std::int64_t up_to = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const std::int64_t left = __shfl_up_sync(0xffffffffu, up_to, d);
      if (lane >= d) up_to += left;
    }
    const std::int64_t at = number - (before + up_to - mine);  // among the group's tiles
    const unsigned owner = __ballot_sync(0xffffffffu, at >= 0 && at < mine);
    if (owner != 0) {
      const int from = __ffs(static_cast<int>(owner)) - 1;
      const std::int64_t row = begin + at * kRows;
      const auto left = static_cast<int>(end - row < kRows ? end - row : kRows);
      tile.group = __shfl_sync(0xffffffffu, group, from);
      tile.first = __shfl_sync(0xffffffffu, row, from);
      tile.rows = __shfl_sync(0xffffffffu, left, from);
    }
    before += __shfl_sync(0xffffffffu, up_to, 31);
  }
  return tile;
}

}  // namespace rm::cuda_ops
