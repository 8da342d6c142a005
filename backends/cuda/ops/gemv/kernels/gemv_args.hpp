// What the gemv kernels are launched with. Pitches are in elements, w_pitch in bytes.
// In the order of need: a launch's arguments are not in the constant cache, each line of 64 bytes
// costs a block 0.3 us when it is first read. The first line has 48 bytes of ours.
#pragma once

#include "_shim/epilogue_shim.hpp"

namespace rm::cuda_ops {

struct GemvArgs {
  // what asking for w takes
  const void* w;
  std::int64_t w_pitch;
  const void* x;
  int n;
  int row_bytes, together;             // of w; a tile's rows are one copy
  int stages, stages_at, stage_bytes;  // of a block's ring, sizes in bytes
  // the second line
  const void* scales;
  std::int64_t scales_pitch;
  int k, group_shift;   // log2 of group; 30 where one scale covers a row
  int scales_at;        // behind a stage's rows of w
  int m, steps, plain;  // steps of 512 bytes in a row; no epilogue
  void* y;
  std::int64_t x_pitch;
  std::int64_t y_pitch;
  // the third: gemv_bulk_sm90, gemv_rows_sm90, gemv_tensor_sm90; sizes in bytes
  int chunks, slots;          // pieces a row of w is cut into; warps that share a group
  int turn_step, chunk_step;  // from a warp's tile to its next
  int chunk_bytes;            // of a row in one tile
  int chunks_inverse;         // 65536 / chunks, rounded up
  int full_turns, more;       // groups of rows of every block; blocks that have one more
  int sums_bytes, x_smem_pitch;
  int buffers, buffer_shift;
  int x_at;        // a stage: w rows, then scales, then (staged) x rows
  int x_resident;  // x stays in shared memory, else its piece comes with w's
  int x_small;     // resident x is loaded, not copied
  int group, bits;
  EpilogueArgs epilogue;
};

/// Several weights against one row of x; GemvArgs has x, k, and n: the rows of all of them.
struct GemvGroupArgs {
  const void* w[3];  // rows without gaps
  int first[3];      // of the rows of all: where each begins, above n where there is none
  int gated;         // y[0] = activation(x w[0]^T) * (x w[1]^T)
  const void* norm;  // of x, by rms; null: none
  float eps, weight_offset;
  void* y[3];
  const void *bias[3], *residual;
  int activation;
  int centred;            // norm is a layer norm's weight
  const void* norm_bias;  // may be null
  int turned;             // w[0] is [K, N]
};

/// The same of one row of x that a layer norm takes first: GemvGroupArgs has no norm.
struct GemvCentredArgs : GemvGroupArgs {
  const void *weight, *shift;  // the norm's; shift may be null
};

/// The same of weights of 8 or 4 bits (or none: then no scales); asking for w takes one line of it.
struct GemvQuantGroupArgs {
  const void* scales[3];  // as gemv has them, without gaps
  GemvGroupArgs group;
};

}  // namespace rm::cuda_ops
