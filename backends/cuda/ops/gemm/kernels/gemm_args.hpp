// What the gemm kernels are launched with. Strides are in elements.
#pragma once

#include "_shim/epilogue_shim.hpp"

namespace rm::cuda_ops {

struct GemmArgs {
  const void *a, *b;
  void* c;
  std::int64_t m, n, k, batch;
  std::int64_t a_row, a_column, a_batch;  // of op(a) [M, K]
  std::int64_t b_row, b_column, b_batch;  // of op(b) [K, N]
  std::int64_t c_pitch, c_batch;
  EpilogueArgs epilogue;
};

/// out[n] = sum over i < count of partial[i, n].
struct ColumnSums {
  const float* partial;
  void* out;
  int columns, count;
};

/// out[i] = sum over j < count of in[i / rows * batch + i % rows * outer + j * inner], i < results.
struct GemmSums {
  std::int64_t results, count, rows, batch, outer, inner;
};

/// dt = dc * activation'(aux), and the columns' sums of blocks of rows.
struct GemmSlopeArgs {
  const void *dc, *aux;
  void* dt;        // null: dc itself is dt
  float* partial;  // [row blocks, N], or null
  std::int64_t rows, n, dc_pitch, aux_pitch, dt_pitch;
  std::int64_t rows_a_batch, dc_batch, aux_batch;  // row r is row r % rows_a_batch of its batch
  int activation, block_rows;
  float slope;
};

}  // namespace rm::cuda_ops
