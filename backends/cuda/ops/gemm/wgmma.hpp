// gemm's own tensor-core kernel: when it applies, and its launch for one product or for two at
// once.
#pragma once

#include <cuda.h>

#include "gemm/api.hpp"
#include "gemm/kernels/gemm_args.hpp"

namespace rm::cuda_ops {

/// Tiles of 128 x columns (64, 128, 256) by clusters of blocks (1, 2, 4), which share b's tiles, or
/// where `split` (64 and 128 columns) cut K into as many parts. turns (128 columns): a block's two
/// warpgroups work at a tile each, one's epilogue beside the other's products.
struct WgmmaPlan {
  int columns = 128, cluster = 1;
  bool split[2] = {};
  bool turns = false;
};

/// Boxes of 64 by y elements of [batch, rows, columns], in 128-byte rows and their swizzle; false
/// where the driver refuses.
bool make_wgmma_map(CUtensorMap* map, DType dtype, const void* data, std::int64_t batch,
                    std::int64_t rows, std::int64_t columns, std::int64_t pitch,
                    std::int64_t batch_stride, int y);

const char* wgmma_why_not(const Gemm& p);
Status launch_wgmma(const Gemm& p, const WgmmaPlan& plan, Stream stream);
/// Both products' tiles in one launch, and the sums where there are columns; none may need
/// another's result.
Status launch_wgmma_pair(const Gemm& first, const Gemm* second, const WgmmaPlan& plan,
                         const ColumnSums& sums, Stream stream);

}  // namespace rm::cuda_ops
