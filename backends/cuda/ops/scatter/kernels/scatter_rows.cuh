// Rows of src added to rows of y, as gradients of tables are. A block has 1024 columns of one row of
// src; the blocks of the first row that names a row of y add all that do, in order, the others end.
// Bound: memory, and reading the ids once a block.
#pragma once

#include "scatter/kernels/scatter_lines.cuh"

namespace rm::cuda_ops {

struct ScatterRowsArgs {
  const void* ids;
  bool wide;
  const float* src;
  float* y;
  std::int64_t rows, columns, targets;                   // of src; rows of y
  std::int64_t id_step, src_row, src_column, y_row, y_column;
};

inline constexpr int kScatterColumns = 1024;

static __global__ void __launch_bounds__(256) scatter_add_rows(const ScatterRowsArgs a) {
  __shared__ unsigned hits[8];
  const std::int64_t row = blockIdx.x;
  const auto id = [&](std::int64_t i) { return scatter_id(a.ids, a.wide, i * a.id_step); };
  const std::int64_t target = id(row);
  if (target < 0 || target >= a.targets) __trap();
  for (std::int64_t first = 0; first < row; first += 256) {
    const std::int64_t i = first + threadIdx.x;
    if (__syncthreads_or(i < row && id(i) == target)) return;
  }
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * kScatterColumns + threadIdx.x;
  float sum[4] = {};
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const std::int64_t c = column + u * 256;
    if (c < a.columns) sum[u] = a.y[target * a.y_row + c * a.y_column];
  }
  for (std::int64_t first = row; first < a.rows; first += 256) {
    const std::int64_t i = first + threadIdx.x;
    const unsigned mine = __ballot_sync(0xffffffffu, i < a.rows && id(i) == target);
    if (threadIdx.x % 32 == 0) hits[threadIdx.x / 32] = mine;
    __syncthreads();
    for (int w = 0; w < 8; ++w) {
      for (unsigned left = hits[w]; left != 0; left &= left - 1) {
        const std::int64_t from = first + 32 * w + __ffs(static_cast<int>(left)) - 1;
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          const std::int64_t c = column + u * 256;
          if (c < a.columns) sum[u] += a.src[from * a.src_row + c * a.src_column];
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const std::int64_t c = column + u * 256;
    if (c < a.columns) a.y[target * a.y_row + c * a.y_column] = sum[u];
  }
}

}  // namespace rm::cuda_ops
