// Collects the rows of every operator folder.
#include "ops/all_rows.hpp"

#include <span>

#include "ops/adam/rows.hpp"
#include "ops/check/rows.hpp"
#include "ops/conv/rows.hpp"
#include "ops/copy/rows.hpp"
#include "ops/cross_entropy/rows.hpp"
#include "ops/cumsum/rows.hpp"
#include "ops/embedding/rows.hpp"
#include "ops/ewise/rows.hpp"
#include "ops/gather/rows.hpp"
#include "ops/image/rows.hpp"
#include "ops/index/rows.hpp"
#include "ops/index_copy/rows.hpp"
#include "ops/layer_norm/rows.hpp"
#include "ops/norm_backward/rows.hpp"
#include "ops/quant/rows.hpp"
#include "ops/recurrent/rows.hpp"
#include "ops/reduce/rows.hpp"
#include "ops/rms_norm/rows.hpp"
#include "ops/rope/rows.hpp"
#include "ops/scan/rows.hpp"
#include "ops/scatter/rows.hpp"
#include "ops/sdpa/rows.hpp"
#include "ops/softmax/rows.hpp"
#include "ops/sort/rows.hpp"
#include "ops/uniform/rows.hpp"
#if __has_include("ops/gemm/CMakeLists.txt")
#include "ops/gemm/rows.hpp"
#include "ops/grouped_gemm/rows.hpp"
#define RM_CPU_HAS_GEMM 1
#else
#define RM_CPU_HAS_GEMM 0
#endif

namespace rm::cpu {

std::vector<rm_kernel> all_rows() {
  std::vector<rm_kernel> rows;
  auto add = [&](std::span<const rm_kernel> more) {
    rows.insert(rows.end(), more.begin(), more.end());
  };
#if RM_CPU_HAS_GEMM
  add(gemm_rows());
  add(grouped_gemm_rows());
#endif
  add(conv_rows());
  add(pool_rows());
  add(resize_rows());
  add(group_norm_rows());
  add(sdpa_rows());
  add(sdpa_backward_rows());
  add(layer_norm_rows());
  add(rms_norm_rows());
  add(layer_norm_backward_rows());
  add(rms_norm_backward_rows());
  add(softmax_rows());
  add(cross_entropy_rows());
  add(cross_entropy_backward_rows());
  add(embedding_rows());
  add(rope_rows());
  add(ewise_rows());
  add(reduce_rows());
  add(cumsum_rows());
  add(scan_rows());
  add(copy_rows());
  add(gather_rows());
  add(index_rows());
  add(index_copy_rows());
  add(scatter_rows());
  add(sort_rows());
  add(uniform_rows());
  add(recurrent_rows());
  add(adam_rows());
  add(check_rows());
  add(quantize_rows());
  add(quant_linear_rows());
  return rows;
}

std::string kernel_library_fingerprint() {
#if RM_CPU_HAS_GEMM
  return gemm_library_fingerprint();
#else
  return {};
#endif
}

}  // namespace rm::cpu
