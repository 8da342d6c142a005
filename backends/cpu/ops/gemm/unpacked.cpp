// Which problems the unpacked gemm takes, and their columns over threads.
#include "ops/gemm/unpacked.hpp"

#include <algorithm>

#include "common/parallel.hpp"

namespace rm::cpu::gemm {
namespace {

constexpr double kThreadFlops = 4e5;  // a thread must have this much to do

}  // namespace

const char* UnpackedGemm::reject(const GemmProblem& g) {
  for (Operand o : {kA, kB, kC}) {
    if (g.dtype[o] != DType::f32) return "unpacked: f32 only";
  }
  if (g.has(kBias) || g.has(kResidual) || g.activation != kNone) return "unpacked: products alone";
  if (!g.outer.empty()) return "unpacked: leading axes that do not fold into rows";
  if (g.m > kMostRows && g.k > kLongestK) return "unpacked: more rows and a longer k than it is made for";
  if (g.k * g.n > kMostOfB) return "unpacked: a larger b than it is made for";
  if (g.n > 1 && (g.col[kB] != 1 || g.col[kC] != 1)) return "unpacked: rows of b and c must be dense";
  return nullptr;
}

std::vector<rm_edge> UnpackedGemm::edges(const UnpackedSet& kernels) {
  return {{'M', 0, kernels.tile_rows},
          {'M', 0, kMostRows},
          {'N', 0, kernels.tile_columns},
          {'N', 0, kernels.tile_columns / 2},
          {'K', 0, kLongestK}};
}

UnpackedGemm::UnpackedGemm(GemmProblem problem, const UnpackedSet& kernels)
    : g_(std::move(problem)), k_(kernels) {
  const double chunks = static_cast<double>((g_.n + k_.tile_columns - 1) / k_.tile_columns);
  threads_ = static_cast<int>(std::clamp<double>(
      g_.flops() / kThreadFlops, 1, std::max(1.0, std::min<double>(thread_limit(), chunks))));
}

void UnpackedGemm::launch(const rm_launch& l) const {
  if (g_.empty()) return;
  UnpackedArgs all{static_cast<const float*>(l.inputs[kA]),
                   g_.row[kA],
                   g_.col[kA],
                   static_cast<const float*>(l.inputs[kB]),
                   g_.row[kB],
                   static_cast<float*>(l.outputs[0]),
                   g_.row[kC],
                   g_.m,
                   g_.n,
                   g_.k,
                   static_cast<float>(g_.alpha)};
  parallel_ranges(g_.n, std::min(threads_, omp_get_max_threads()), k_.tile_columns,
                  [&](int64_t begin, int64_t end, int) {
                    UnpackedArgs part = all;
                    part.b += begin;
                    part.c += begin;
                    part.n = end - begin;
                    k_.multiply(part);
                  });
}

}  // namespace rm::cpu::gemm
