// Splits the columns of c over threads and each thread's share over streams (direct_kernels.hpp).
#include "ops/gemm/direct.hpp"

#include <algorithm>

#include "common/parallel.hpp"
#include "ops/gemm/packed.hpp"

namespace rm::cpu::gemm {
namespace {

constexpr double kThreadBytes = 64 << 10;  // a thread must have this much to read

TileType tile_type(DType t) { return t == DType::f32 ? kF32 : t == DType::bf16 ? kBF16 : kF16; }

}  // namespace

const char* DirectGemm::reject(const GemmProblem& g) {
  if (const char* why = PackedGemm::reject_scattered(g)) return why;
  if (!g.outer.empty()) return "direct: leading axes that do not fold into rows";
  if (g.m > kMostRows) return "direct: more rows of a than it is made for";
  if (g.k > 1 && g.row[kB] != 1) return "direct: b must be dense along k";
  return nullptr;
}

std::vector<rm_edge> DirectGemm::edges(const DirectSet& kernels, const KernelSet& stores) {
  return {{'M', 0, kernels.tile_rows},
          {'M', 0, kMostRows},
          {'N', 0, kernels.tile_columns[0]},
          {'N', 0, kernels.tile_columns[1]},
          {'N', 0, kStreams},
          {'N', 0, stores.nr},
          {'K', 0, kernels.block},
          {'K', 0, kernels.piece}};
}

DirectGemm::DirectGemm(GemmProblem problem, const DirectSet& kernels, const KernelSet& stores)
    : g_(std::move(problem)),
      k_(kernels),
      stores_(stores),
      type_(tile_type(g_.dtype[kA])),
      element_bytes_(dtype_bytes(g_.dtype[kA])),
      chunks_((g_.n + stores.nr - 1) / stores.nr),
      ldx_((g_.k + 63) / 64 * 64 + 16) {
  const double bytes = double(g_.n) * double(g_.k) * double(element_bytes_);
  const double worth = std::max(bytes / kThreadBytes, g_.flops() / 4e5);
  threads_ = static_cast<int>(
      std::clamp<double>(worth, 1, std::min<double>(thread_limit(), double(chunks_))));
  thread_bytes_ = static_cast<uint64_t>(g_.m * (ldx_ + kStreams * stores.nr)) * sizeof(float);
  thread_bytes_ = (thread_bytes_ + 63) / 64 * 64;
}

void DirectGemm::launch(const rm_launch& l) const {
  if (g_.empty()) return;
  Operands o(g_, l);
  parallel_ranges(
      chunks_, std::min(threads_, omp_get_max_threads()), 1,
      [&](int64_t begin, int64_t end, int thread) {
        run(o, begin, end,
            static_cast<char*>(l.workspace) + thread_bytes_ * static_cast<uint64_t>(thread));
      });
}

void DirectGemm::run(const Operands& o, int64_t chunk0, int64_t chunk1, char* scratch) const {
  auto* x = reinterpret_cast<float*>(scratch);
  float* acc = x + g_.m * ldx_;
  const int64_t nr = stores_.nr, row_bytes = g_.col[kB] * element_bytes_;
  k_.spread[type_]({o.ptr[kA], g_.row[kA], g_.col[kA], g_.m, g_.k, x, ldx_});
  DotArgs args{x, ldx_, g_.m, {}, row_bytes, nr, g_.k, {}, nr};
  const auto weight = [&](int64_t n) { return o.ptr[kB] + n * row_bytes; };

  const int64_t full = std::min(chunk1, g_.n / nr) - chunk0, each = full / kStreams;
  for (int64_t i = 0; i < each; ++i) {
    for (int s = 0; s < kStreams; ++s) {
      args.w[s] = weight((chunk0 + s * each + i) * nr);
      args.acc[s] = acc + s * g_.m * nr;
    }
    k_.dot[type_](args);
    for (int s = 0; s < kStreams; ++s) {
      store(o, args.acc[s], (chunk0 + s * each + i) * nr, nr);
    }
  }
  // Fewer chunks than streams are left, or columns than a chunk: neighbours are the streams.
  args.count = 1;
  for (int64_t chunk = chunk0 + std::max<int64_t>(each, 0) * kStreams; chunk < chunk1; ++chunk) {
    const int64_t n0 = chunk * nr, cols = std::min(nr, g_.n - n0);
    for (int64_t j = 0; j < cols; j += kStreams) {
      for (int s = 0; s < kStreams; ++s) {
        // Streams behind the last column read it again, and add it up where nobody looks: pieces of
        // k are added to acc, so two streams must never share one.
        const int64_t column = std::min(j + s, cols - 1);
        args.w[s] = weight(n0 + column);
        args.acc[s] = j + s < cols ? acc + column : acc + s * g_.m * nr;
      }
      k_.dot[type_](args);
    }
    store(o, acc, n0, cols);
  }
}

void DirectGemm::store(const Operands& o, const float* acc, int64_t n, int64_t cols) const {
  const auto at = [&](Operand i) { return o.ptr[i] ? o.ptr[i] + n * element_bytes_ : nullptr; };
  stores_.store[type_][g_.activation]({acc, g_.m, cols, static_cast<float>(g_.alpha), at(kBias),
                                       at(kResidual), g_.row[kResidual], const_cast<char*>(at(kC)),
                                       g_.row[kC]});
}

}  // namespace rm::cpu::gemm
