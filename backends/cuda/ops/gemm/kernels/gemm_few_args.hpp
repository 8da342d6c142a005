// What the gemm of few rows is launched with.
#pragma once

#include <cuda.h>

#include "gemm/kernels/gemm_args.hpp"

namespace rm::cuda_ops {

/// What a kernel is made for: `any` finds its epilogue in its arguments; the others have whole tiles
/// in rows that may be accessed in pairs, a bias of the columns or none, no aux, and that activation,
/// in half the instructions.
enum class FewKind : int { any, linear, gelu };

struct FewArgs {
  CUtensorMap a, b;  // [M, K] and [N, K] in boxes of 64 of K
  int m, n;
  int tiles_m, chunks;  // chunks: of 64 of K, a block's
  bool early;           // b and bias are read before the stream's earlier kernels have ended
  bool pairs;           // c, bias, residual and aux may be accessed in pairs
  void* c;
  std::int64_t c_pitch;
  EpilogueArgs epilogue;
};

inline constexpr int kFewRows = 64;  // of a tile
inline constexpr int kFewMostChunks = 15;

/// Shared memory of a block: its tiles of a and b, the sums that come to it, barriers.
constexpr int few_bytes(int columns, int parts, int chunks) {
  return chunks * (kFewRows + columns) * 128 + (parts > 1 ? kFewRows * columns * 4 : 0) +
         (kFewMostChunks + 1) * 8;
}

}  // namespace rm::cuda_ops
