// Splits panels of columns over threads and two streams; the arithmetic is in isa_tile.cpp.
#include "ops/quant/tiles.hpp"

#include <algorithm>

#include "common/parallel.hpp"

namespace rm::cpu::quant {
namespace {

constexpr double kThreadBytes = 48 << 10;  // of weights a thread must have to read

}  // namespace

TiledLinear::TiledLinear(const QuantProblem& problem, const TileSet& kernels,
                         const gemm::KernelSet& tiles, gemm::TileType type)
    : q_(problem),
      k_(kernels),
      tiles_(tiles),
      type_(type),
      element_bytes_(dtype_bytes(problem.gemm.dtype[gemm::kA])),
      panels_((problem.gemm.n + tiles.nr - 1) / tiles.nr) {
  const double bytes = double(q_.gemm.n) * double(q_.blocks() * 4 * q_.bits);
  const double worth = double(std::max<int64_t>(1, q_.gemm.m)) * bytes / kThreadBytes;
  threads_ = static_cast<int>(std::clamp<double>(
      worth, 1, std::max(1.0, std::min<double>(thread_limit(), double(panels_)))));
}

uint64_t TiledLinear::lay_out(char* base, Scratch* s) const {
  const int64_t blocks = q_.gemm.m * q_.blocks();
  uint64_t at = 0;
  const auto take = [&](int64_t bytes) {
    char* p = base + at;
    at += static_cast<uint64_t>(bytes + 63) / 64 * 64;
    return p;
  };
  s->values = reinterpret_cast<int8_t*>(take(blocks * kBlock));
  s->scales = reinterpret_cast<float*>(take(blocks * 4));
  s->sums = reinterpret_cast<int32_t*>(take(blocks * 4));
  s->acc = reinterpret_cast<float*>(take(2 * q_.gemm.m * tiles_.nr * 4));
  return at;
}

uint64_t TiledLinear::workspace_bytes() const {
  Scratch unused{};
  return lay_out(nullptr, &unused) * static_cast<uint64_t>(threads_);
}

void TiledLinear::launch(const Operands& o, void* workspace) const {
  Scratch unused{};
  const uint64_t bytes = lay_out(nullptr, &unused);
  parallel_ranges(panels_, std::min(threads_, omp_get_max_threads()), 1,
                  [&](int64_t begin, int64_t end, int thread) {
                    run(o, begin, end,
                        static_cast<char*>(workspace) + bytes * static_cast<uint64_t>(thread));
                  });
}

void TiledLinear::run(const Operands& o, int64_t panel0, int64_t panel1, char* memory) const {
  Scratch s{};
  lay_out(memory, &s);
  const gemm::GemmProblem& g = q_.gemm;
  const int64_t nr = tiles_.nr, blocks = q_.blocks();
  for (int64_t i = 0; i < g.m; ++i) {
    k_.round[type_]({o.x + i * g.row[gemm::kA] * element_bytes_, g.col[gemm::kA], g.k, blocks,
                     s.values + i * blocks * kBlock, s.scales + i * blocks, s.sums + i * blocks});
  }
  const int64_t full = std::max<int64_t>(0, std::min(panel1, g.n / nr) - panel0);
  const int64_t half = full / 2;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t n[] = {(panel0 + i) * nr, (panel0 + half + i) * nr};
    tiles(o, s, n, 2, nr / kTile);
    store_columns(q_, tiles_, type_, o, s.acc, n[0], nr);
    store_columns(q_, tiles_, type_, o, s.acc + g.m * nr, n[1], nr);
  }
  for (int64_t panel = panel0 + 2 * half; panel < panel1; ++panel) {
    const int64_t n[] = {panel * nr}, cols = std::min(nr, g.n - n[0]);
    tiles(o, s, n, 1, cols / kTile);
    rows(o, s, n[0], cols / kTile * kTile, cols);
    store_columns(q_, tiles_, type_, o, s.acc, n[0], cols);
  }
}

TileArgs TiledLinear::args(const Scratch& s, int64_t row) const {
  TileArgs a{};
  a.blocks = q_.blocks(), a.groups = q_.groups(), a.group_blocks = q_.group / kBlock;
  a.x = s.values + row * a.blocks * kBlock;
  a.scales = s.scales + row * a.blocks;
  a.sums = s.sums + row * a.blocks;
  return a;
}

void TiledLinear::tiles(const Operands& o, const Scratch& s, const int64_t* n, int streams,
                        int64_t count) const {
  const auto dot = (streams == 2 ? k_.pair : k_.one)[q_.bits == 8 ? 0 : 1];
  const int64_t m = q_.gemm.m, nr = tiles_.nr;
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t i = 0; i < m; ++i) {
      TileArgs a = args(s, i);
      for (int t = 0; t < streams; ++t) {
        const int64_t column = n[t] + j * kTile;
        a.w[t] = o.q + column * q_.row_bytes;
        a.scale[t] = o.scale + column * q_.scale_row;
        a.out[t] = s.acc + (t * m + i) * nr + j * kTile;
      }
      dot(a);
    }
  }
}

void TiledLinear::rows(const Operands& o, const Scratch& s, int64_t panel, int64_t from,
                       int64_t to) const {
  for (int64_t j = from; j < to; ++j) {
    for (int64_t i = 0; i < q_.gemm.m; ++i) {
      TileArgs a = args(s, i);
      a.w[0] = o.q + (panel + j) * q_.row_bytes;
      a.scale[0] = o.scale + (panel + j) * q_.scale_row;
      a.out[0] = s.acc + i * tiles_.nr + j;
      k_.row[q_.bits == 8 ? 0 : 1](a);
    }
  }
}

Operands operands(const QuantProblem& q, const rm_launch& l) {
  // Trailing operands that are absent need not be in the list at all.
  const auto in = [&](Input i, bool present = true) {
    return present ? static_cast<const char*>(l.inputs[i]) : nullptr;
  };
  return {in(kX),
          reinterpret_cast<const uint8_t*>(in(kQ)),
          reinterpret_cast<const uint16_t*>(in(kScale)),
          reinterpret_cast<const uint16_t*>(in(kZero, q.has_zero)),
          in(kBiasIn, q.gemm.has(gemm::kBias)),
          in(kResidualIn, q.gemm.has(gemm::kResidual)),
          static_cast<char*>(l.outputs[0])};
}

void store_columns(const QuantProblem& q, const gemm::KernelSet& kernels, gemm::TileType type,
                   const Operands& o, const float* acc, int64_t n, int64_t cols) {
  const gemm::GemmProblem& g = q.gemm;
  const int64_t offset = n * dtype_bytes(g.dtype[gemm::kA]);
  const auto at = [&](const char* p) { return p ? p + offset : nullptr; };
  kernels.store[type][g.activation]({acc, g.m, cols, 1.f, at(o.bias), at(o.residual),
                                     g.row[gemm::kResidual], o.c + offset, g.row[gemm::kC]});
}

}  // namespace rm::cpu::quant
