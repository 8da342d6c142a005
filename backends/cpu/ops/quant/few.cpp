// Splits panels of columns over threads; the arithmetic is in isa_few.cpp and isa_amx_few.cpp, that of
// rows of the weight that lie alone in isa_tile.cpp.
#include "ops/quant/few.hpp"

#include <algorithm>
#include <cstring>

#include "common/parallel.hpp"

namespace rm::cpu::quant {
namespace {

constexpr double kThreadBytes = 48 << 10;  // of weights a thread must have to read
constexpr double kThreadFlops = 4e6;       // or this much to multiply

/// Takes arrays one behind the other, each at a line of the cache.
class Layout {
 public:
  explicit Layout(char* base) : base_(base) {}
  template <class T>
  void take(int64_t count, T** to) {
    *to = reinterpret_cast<T*>(base_ + at_);
    at_ += (static_cast<uint64_t>(count) * sizeof(T) + 63) / 64 * 64;
  }
  uint64_t bytes() const { return at_; }

 private:
  char* base_;
  uint64_t at_ = 0;
};

}  // namespace

const char* FewLinear::reject(const QuantProblem& q) {
  const gemm::GemmProblem& g = q.gemm;
  if (q.x_bits != 8) return "few: activations of 8 bits only";
  if (!g.outer.empty()) return "few: leading axes that do not fold into rows";
  if (g.m < 2 || g.m > kMostFewRows) return "few: 2 to 16 rows";
  if (g.dtype[gemm::kA] == DType::f64) return "quant_linear: f32, bf16 and f16 activations only";
  return gemm::PackedGemm::reject_scattered(g);
}

FewLinear::FewLinear(QuantProblem problem, const Kernels& kernels)
    : q_(std::move(problem)),
      k_(kernels),
      type_(tile_type(q_.gemm.dtype[gemm::kA])),
      panels_((q_.gemm.n + kernels.tiles.nr - 1) / kernels.tiles.nr) {
  const double bytes = double(q_.gemm.n) * double(q_.blocks() * 4 * q_.bits);
  const double worth = std::max(bytes / kThreadBytes, q_.gemm.flops() / kThreadFlops);
  threads_ = static_cast<int>(std::clamp<double>(
      worth, 1, std::max(1.0, std::min<double>(thread_limit(), double(panels_)))));
}

uint64_t FewLinear::lay_out(char* base, Rounded* x) const {
  const int64_t blocks = q_.gemm.m * q_.blocks();
  Layout layout(base);
  layout.take(blocks * kBlock, &x->values);
  layout.take(blocks, &x->scales);
  layout.take(blocks, &x->sums);
  layout.take(blocks, &x->offsets);
  return layout.bytes();
}

uint64_t FewLinear::lay_out(char* base, Own* own) const {
  Layout layout(base);
  layout.take(q_.gemm.m * k_.tiles.nr, &own->acc);
  layout.take(q_.blocks() * kBlock, &own->row.values);
  layout.take(q_.blocks(), &own->row.scales);
  layout.take(q_.blocks(), &own->row.sums);
  return layout.bytes();
}

uint64_t FewLinear::workspace_bytes() const {
  if (q_.gemm.empty()) return 0;
  Rounded x{};
  Own own{};
  return lay_out(nullptr, &x) + lay_out(nullptr, &own) * static_cast<uint64_t>(threads_);
}

void FewLinear::launch(const rm_launch& l) const {
  if (q_.gemm.empty()) return;
  const Operands o = operands(q_, l);
  auto* base = static_cast<char*>(l.workspace);
  Rounded x{};
  char* owns = base + lay_out(base, &x);
  const auto share = [&](int64_t begin, int64_t end, int64_t thread) {
    Own own{};
    const uint64_t bytes = lay_out(nullptr, &own);
    lay_out(owns + bytes * static_cast<uint64_t>(thread), &own);
    run(o, x, begin, end, own);
  };
  const int64_t blocks = q_.blocks();
  const int threads = std::min(threads_, omp_get_max_threads());
  if (threads == 1) {
    round(o, x, 0, blocks);
    return share(0, panels_, 0);
  }
#pragma omp parallel num_threads(threads)
  {
    const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    round(o, x, blocks * me / team, blocks * (me + 1) / team);
#pragma omp barrier
    share(panels_ * me / team, panels_ * (me + 1) / team, me);
  }
}

/// Blocks [begin, end) of all rows of x.
void FewLinear::round(const Operands& o, const Rounded& x, int64_t begin, int64_t end) const {
  const gemm::GemmProblem& g = q_.gemm;
  const int64_t bytes = dtype_bytes(g.dtype[gemm::kA]), k = begin * kBlock;
  for (int64_t i = 0; i < g.m; ++i) {
    const int64_t at = begin * g.m + i;
    k_.rounded.round[type_]({o.x + (i * g.row[gemm::kA] + k * g.col[gemm::kA]) * bytes,
                             g.col[gemm::kA], g.k - k, end - begin, x.values + at * kBlock,
                             x.scales + at, x.sums + at, g.m * kBlock, g.m});
  }
  const int32_t taken = q_.bits == 8 ? 128 : 8;
  for (int64_t i = begin * g.m; i < end * g.m; ++i) x.offsets[i] = -taken * x.sums[i];
}

/// Panels [begin, end).
void FewLinear::run(const Operands& o, const Rounded& x, int64_t begin, int64_t end,
                       const Own& own) const {
  const int64_t nr = k_.tiles.nr;
  k_.multiply.open(q_.gemm.m);
  for (int64_t panel = begin; panel < end; ++panel) {
    const int64_t n = panel * nr, cols = std::min(nr, q_.gemm.n - n), tiled = cols / kTile * kTile;
    for (int64_t j = 0; j < tiled; j += kStrip) {
      strip(o, x, n + j, j + kStrip <= tiled, own.acc + j);
    }
    if (tiled < cols) lone_rows(o, x, n + tiled, cols - tiled, own.acc + tiled, own.row);
    store_columns(q_, k_.tiles, type_, o, own.acc, n, cols);
  }
  k_.multiply.close();
}

/// Two tiles of the weight from row n on, or one, which stands in for the second as well.
void FewLinear::strip(const Operands& o, const Rounded& x, int64_t n, bool whole,
                         float* acc) const {
  FewArgs a{};
  a.x = x.values, a.scales = x.scales, a.offsets = x.offsets;
  for (int64_t t = 0; t < 2; ++t) {
    const int64_t row = n + (whole ? t * kTile : 0);
    a.w[t] = o.q + row * q_.row_bytes;
    a.scale[t] = o.scale + row * q_.scale_row;
  }
  a.rows = q_.gemm.m, a.blocks = q_.blocks(), a.groups = q_.groups();
  a.group_blocks = q_.group / kBlock;
  a.ahead = kStrip * q_.row_bytes;
  a.acc = acc, a.acc_step = k_.tiles.nr;
  k_.multiply.multiply[q_.bits == 8 ? 0 : 1](a);
}

void FewLinear::lone_rows(const Operands& o, const Rounded& x, int64_t n, int64_t count,
                             float* acc, const Rounded& row) const {
  const int64_t m = q_.gemm.m, blocks = q_.blocks();
  TileArgs a{};
  a.x = row.values, a.scales = row.scales, a.sums = row.sums;
  a.blocks = blocks, a.groups = q_.groups(), a.group_blocks = q_.group / kBlock;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t b = 0; b < blocks; ++b) {
      std::memcpy(row.values + b * kBlock, x.values + (b * m + i) * kBlock, kBlock);
      row.scales[b] = x.scales[b * m + i], row.sums[b] = x.sums[b * m + i];
    }
    for (int64_t j = 0; j < count; ++j) {
      a.w[0] = o.q + (n + j) * q_.row_bytes;
      a.scale[0] = o.scale + (n + j) * q_.scale_row;
      a.out[0] = acc + i * k_.tiles.nr + j;
      k_.rounded.row[q_.bits == 8 ? 0 : 1](a);
    }
  }
}

}  // namespace rm::cpu::quant
