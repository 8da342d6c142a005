// What the gemv kernels are launched with. Pitches are in elements, w_pitch in bytes.
#pragma once

#include "_shim/epilogue_shim.hpp"

namespace rm::cuda_ops {

struct GemvArgs {
  const void *x, *w, *scales;
  void* y;
  std::int64_t x_pitch, w_pitch, y_pitch, scales_pitch;
  int m, n, k, group, bits;
  EpilogueArgs epilogue;
  // gemv_bulk_sm90, gemv_rows_sm90: sizes in bytes
  int chunks, slots;                 // pieces a row of w is cut into; warps that share a group
  int turn_step, chunk_step;         // from a warp's tile to its next
  int chunk_bytes;                   // gemv_rows_sm90: of a row in one tile
  int stage_bytes, scales_at, x_at;  // a stage: w rows, then scales, then (staged) x rows
  int x_smem_pitch, x_resident;      // x stays in shared memory, else its piece comes with w's
  int x_small;                       // resident x is loaded, not copied
  int sums_bytes, group_shift;       // log2 of group; 30 where one scale covers a row
  // gemv_tensor_sm90
  int row_bytes, steps;  // of w; steps of 512 bytes in a row
  int together, plain;   // a tile's rows are one copy; no epilogue
  int buffers, buffer_shift, stages_at;
  int full_turns, more;  // groups of rows of every block; blocks that have one more
  int chunks_inverse;    // 65536 / chunks, rounded up
};

}  // namespace rm::cuda_ops
