// Collects the rows of every operator folder.
#include "ops/all_rows.hpp"

#include <span>

#include "ops/ewise/rows.hpp"
#if __has_include("ops/gemm/CMakeLists.txt")
#include "ops/gemm/rows.hpp"
#define RM_CPU_HAS_GEMM 1
#else
#define RM_CPU_HAS_GEMM 0
#endif

namespace rm::cpu {

std::vector<rm_kernel> all_rows() {
  std::vector<rm_kernel> rows;
  auto add = [&](std::span<const rm_kernel> more) { rows.insert(rows.end(), more.begin(), more.end()); };
#if RM_CPU_HAS_GEMM
  add(gemm_rows());
#endif
  add(ewise_rows());
  return rows;
}

std::string kernel_library_fingerprint() { return {}; }

}  // namespace rm::cpu
