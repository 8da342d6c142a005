// Blocking and threading of the packed gemm; the arithmetic is in isa_kernels.cpp.
#include "ops/gemm/packed.hpp"

#include <algorithm>

#include "common/parallel.hpp"
#include "rm/plugin.hpp"

namespace rm::cpu::gemm {
namespace {

constexpr int64_t kBlockRows = 96;        // f32 rows of one k block stay in the second level
constexpr int64_t kAheadBytes = 2048;     // prefetch distance of a stream
constexpr int64_t kMostSteps = 768;       // rows of a in a block stay near, too
constexpr double kThreadFlops = 4e5;      // a thread must have this much to do (4-8 us)
constexpr double kThreadBytes = 96 << 10;
constexpr int64_t kMostColumns = 32;      // of a panel, in any set
constexpr int64_t kPanelsTogether = 4;  // a thread packs: whole lines of rows that lie far apart

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
uint64_t round_line(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

TileType tile_type(DType t) { return t == DType::f32 ? kF32 : t == DType::bf16 ? kBF16 : kF16; }

struct Grid {
  int rows, panels;
};

/// How `threads` share rows x panels: the smallest largest share; on a tie, tall shares for many
/// rows (each thread reads its part of a once), wide ones for few (each panel is read once).
Grid make_grid(int64_t rows, int64_t panels, int threads) {
  Grid best{1, threads};
  double best_cost = 1e300;
  for (int tm = 1; tm <= threads; ++tm) {
    if (threads % tm != 0) continue;
    const int tn = threads / tm;
    const double share = double(divide_up(rows, tm)) * double(divide_up(panels, tn));
    const bool tall = rows / tm >= 32;
    const double cost = share * (tm > 1 && !tall ? 1.25 : 1.0) * (tn > 1 && tall ? 1.02 : 1.0);
    if (cost < best_cost) best_cost = cost, best = {tm, tn};
  }
  return best;
}

}  // namespace

const char* PackedGemm::reject(const GemmProblem& g) {
  GemmProblem dense = g;
  dense.col[kResidual] = 1;  // store() gathers other ones
  return reject_scattered(dense);
}

const char* PackedGemm::reject_scattered(const GemmProblem& g) {
  const DType t = g.dtype[kA];
  if (t != DType::f32 && t != DType::bf16 && t != DType::f16) return "packed: f32, bf16, f16 only";
  for (Operand o : {kB, kBias, kResidual, kC}) {
    if (g.has(o) && g.dtype[o] != t) return "packed: all operands must have one element type";
  }
  if (g.n > 1) {
    for (Operand o : {kBias, kResidual, kC}) {
      if (g.has(o) && g.col[o] != 1)
        return "packed: the last axis of bias, residual and c must be dense";
    }
  }
  return nullptr;
}

std::vector<rm_edge> PackedGemm::edges(const KernelSet& kernels) {
  std::vector<rm_edge> sizes = {{'M', 0, kernels.mr},
                                {'M', 0, kBlockRows},
                                {'N', 0, kernels.nr},
                                {'N', 0, kernels.nr / 2},
                                {'K', 0, kernels.step},
                                {'K', 0, kernels.nr / 2}};  // a square of the packing
  for (const int element_bytes : kernels.panel_element_bytes) {
    if (element_bytes == 0) continue;  // no panels of this type
    const int64_t step_bytes = int64_t{kernels.nr} * element_bytes * kernels.step;
    const int64_t steps = std::min<int64_t>(kernels.block_bytes / step_bytes, kMostSteps);
    sizes.push_back({'K', 0, steps * kernels.step});
  }
  return sizes;
}

PackedGemm::PackedGemm(GemmProblem problem, const KernelSet& kernels, const PanelSource* source)
    : g_(std::move(problem)),
      k_(kernels),
      source_(source),
      type_(tile_type(g_.dtype[kA])),
      b_type_(source ? kF32 : type_),
      element_bytes_(dtype_bytes(g_.dtype[kA])),
      step_bytes_(kernels.nr * kernels.panel_element_bytes[b_type_] * kernels.step),
      steps_(divide_up(g_.k, kernels.step)),
      panels_(divide_up(g_.n, kernels.nr)) {
  plan_blocks();
  plan_threads();
}

void PackedGemm::plan_blocks() {
  const int64_t most = std::min<int64_t>(k_.block_bytes / step_bytes_, kMostSteps);
  const int64_t blocks = std::max<int64_t>(1, divide_up(steps_, most));
  kc_ = std::max<int64_t>(1, divide_up(steps_, blocks));
  mc_ = std::min(kBlockRows, std::max<int64_t>(g_.m, 1));
  const int64_t acc_panel = mc_ * k_.nr * 4;
  nc_ = blocks == 1 ? panels_ : std::max<int64_t>(1, k_.sums_bytes / std::max<int64_t>(1, acc_panel));
  nc_ = std::max<int64_t>(1, std::min(nc_, panels_));
  const int64_t acc_rows = blocks == 1 ? k_.mr : mc_ * nc_;
  acc_bytes_ =
      round_line(static_cast<uint64_t>(std::max<int64_t>(acc_rows, 4 * k_.mr) * k_.nr) * 4);

  // Rows that lie a multiple of 4 KiB apart would fight for the same sets of the first level.
  const bool aliased = g_.m > k_.mr && g_.row[kA] * element_bytes_ % 4096 == 0;
  copy_a_ = element_bytes_ != k_.a_element_bytes || (g_.col[kA] != 1 && g_.k > 1) ||
            g_.k % k_.step != 0 || aliased;
  columns_ = k_.columns[type_] != nullptr && g_.m > k_.mr && g_.row[kA] == 1 && g_.col[kA] >= g_.m;
  lda_ = (g_.k + 15) / 16 * 16 + 16;
  chunk_lda_ = (kc_ * k_.step + 15) / 16 * 16 + 16;
  a_bytes_ = copy_bytes();
}

/// Of a thread's copy of a: one tile's whole rows, or a block's rows of one block of k.
uint64_t PackedGemm::copy_bytes() {
  if (!copy_a_) return 0;
  const int64_t few = std::min<int64_t>(k_.mr, g_.m) * lda_ * k_.a_element_bytes;
  // A line between the tiles: else all begin in the same set of the first level.
  tile_bytes_ = columns_ ? kc_ * k_.column_width * 4 + 64 : 0;
  const int64_t chunk = columns_ ? divide_up(mc_, k_.mr) * tile_bytes_
                                 : mc_ * chunk_lda_ * k_.a_element_bytes;
  return round_line(static_cast<uint64_t>(std::max(few, mc_ > k_.mr ? chunk : 0)));
}

void PackedGemm::plan_threads() {
  const double weights = double(g_.shared_b ? 1 : g_.batch) * double(batch_bytes());
  const double worth = std::max(g_.flops() / kThreadFlops, weights / kThreadBytes);
  const int64_t tasks = std::max<int64_t>(1, g_.batch * divide_up(g_.m, k_.mr) * panels_);
  threads_ = static_cast<int>(
      std::clamp<double>(worth, 1, std::min<double>(thread_limit(), double(tasks))));
  plan_stream();
  if (copy_a_ && !streamed_) {
    // All threads together copy no more than about twice a's rows at a time: whole blocks for as
    // many threads as a large machine has would outweigh a many times. A thread computes at least
    // one tile's rows at a time, so no more threads are asked for than two copies have tiles.
    const int64_t rows = std::max<int64_t>(1, 2 * g_.batch * g_.m);
    threads_ = static_cast<int>(std::min<int64_t>(threads_, divide_up(rows, k_.mr)));
    mc_ = std::min(mc_, std::max<int64_t>(divide_up(rows, threads_), k_.mr));
    a_bytes_ = copy_bytes();
  }
  thread_bytes_ = acc_bytes_ + a_bytes_;
  if (streamed_) {
    thread_bytes_ += round_line(static_cast<uint64_t>(stream_panels_ * panel_bytes()));
    if (source_) thread_bytes_ += round_line(source_->scratch_bytes());
    shared_bytes_ =
        copy_a_ ? round_line(static_cast<uint64_t>(stream_rows_ * lda_ * k_.a_element_bytes)) : 0;
  } else if (!g_.constant_b) {
    // Each thread its own panels when there is a batch for each, else one set that all fill.
    const bool own = !g_.shared_b && g_.batch > 1;
    shared_bytes_ = round_line(batch_bytes()) * (own ? static_cast<uint64_t>(threads_) : 1u);
  }
  workspace_bytes_ =
      g_.empty() ? 0 : shared_bytes_ + thread_bytes_ * static_cast<uint64_t>(threads_);
}

uint64_t PackedGemm::packed_bytes(size_t) const {
  return batch_bytes() * static_cast<uint64_t>(g_.shared_b ? 1 : g_.batch);
}

void PackedGemm::pack(const void* src, void* dst, int64_t begin, int64_t end) const {
  char* first = static_cast<char*>(dst) + begin * panel_bytes();
  k_.pack[type_]({src, g_.row[kB], g_.col[kB], g_.k, g_.n, first, begin, end});
}

void PackedGemm::prepack(size_t, const rm_tensor& source, void* packed) const {
  const int64_t batches = g_.shared_b ? 1 : g_.batch;
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t b = 0; b < batches; ++b) {
    for (int64_t p = 0; p < panels_; p += kPanelsTogether) {
      const int64_t offset = g_.shared_b ? 0 : g_.offset(kB, b);
      pack(static_cast<const char*>(plugin::address(source)) + offset * element_bytes_,
           static_cast<char*>(packed) + static_cast<uint64_t>(b) * batch_bytes(), p,
           std::min(p + kPanelsTogether, panels_));
    }
  }
}

PackedGemm::Scratch PackedGemm::scratch(void* workspace, int thread) const {
  char* base =
      static_cast<char*>(workspace) + shared_bytes_ + thread_bytes_ * static_cast<uint64_t>(thread);
  return {reinterpret_cast<float*>(base), base + acc_bytes_};
}

void PackedGemm::run(const rm_launch& l, const void* source_launch) const {
  if (g_.empty()) return;
  Operands o(g_, l);
  o.source_launch = source_launch;
  o.panels = g_.constant_b ? o.ptr[kB] : static_cast<const char*>(l.workspace);
  const int threads = std::min(threads_, omp_get_max_threads());
  if (streamed_) {
    run_streamed(o, l, threads);
  } else if (g_.constant_b || g_.shared_b) {
    run_shared(o, l, threads);
  } else {
    run_batched(o, l, threads);
  }
}

/// Panels all threads read: prepacked, or packed here first.
void PackedGemm::run_shared(const Operands& o, const rm_launch& l, int threads) const {
  const int64_t rows = g_.batch * g_.m;
  const auto share = [&](int thread, int team) {
    const Grid grid = make_grid(rows, panels_, team);
    const int ri = thread / grid.panels, pi = thread % grid.panels;
    run_rows(o, rows * ri / grid.rows, rows * (ri + 1) / grid.rows, panels_ * pi / grid.panels,
             panels_ * (pi + 1) / grid.panels, scratch(l.workspace, thread));
  };
  if (threads == 1) {
    if (!g_.constant_b) pack(o.ptr[kB], l.workspace, 0, panels_);
    share(0, 1);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const int team = omp_get_num_threads(), me = omp_get_thread_num();
    if (!g_.constant_b) {
      pack(o.ptr[kB], l.workspace, panels_ * me / team, panels_ * (me + 1) / team);
#pragma omp barrier
    }
    share(me, team);
  }
}

/// Every batch has a b of its own that must be packed: whole batches a thread while they last,
/// then (fewer batches than threads) all threads on each batch.
void PackedGemm::run_batched(const Operands& o, const rm_launch& l, int threads) const {
  const auto b_of = [&](int64_t batch) {
    return o.ptr[kB] + g_.offset(kB, batch) * element_bytes_;
  };
  const auto whole = [&](int64_t begin, int64_t end, int thread) {
    char* panels =
        static_cast<char*>(l.workspace) + round_line(batch_bytes()) * static_cast<uint64_t>(thread);
    Operands own = o;
    own.panels = panels;
    for (int64_t b = begin; b < end; ++b) {
      pack(b_of(b), panels, 0, panels_);
      run_rows(own, b * g_.m, (b + 1) * g_.m, 0, panels_, scratch(l.workspace, thread));
    }
  };
  if (threads == 1 || g_.batch >= threads) {
    parallel_ranges(g_.batch, threads, 1, whole);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const int team = omp_get_num_threads(), me = omp_get_thread_num();
    const Grid grid = make_grid(g_.m, panels_, team);
    const int ri = me / grid.panels, pi = me % grid.panels;
    for (int64_t b = 0; b < g_.batch; ++b) {
      pack(b_of(b), l.workspace, panels_ * me / team, panels_ * (me + 1) / team);
#pragma omp barrier
      run_rows(o, b * g_.m + g_.m * ri / grid.rows, b * g_.m + g_.m * (ri + 1) / grid.rows,
               panels_ * pi / grid.panels, panels_ * (pi + 1) / grid.panels,
               scratch(l.workspace, me));
#pragma omp barrier
    }
  }
}

/// Rows [begin, end) of all batches laid end to end, panels [p0, p1).
void PackedGemm::run_rows(const Operands& o, int64_t begin, int64_t end, int64_t p0, int64_t p1,
                          const Scratch& s) const {
  if (p0 >= p1) return;
  for (int64_t row = begin; row < end;) {
    const int64_t batch = row / g_.m, first = row % g_.m;
    const int64_t left = std::min(g_.m - first, end - row);
    const int64_t rows = divide_up(left, divide_up(left, mc_));  // equal blocks
    run_block(o, batch, first, rows, p0, p1, s);
    row += rows;
  }
}

void PackedGemm::run_block(const Operands& o, int64_t batch, int64_t row, int64_t rows, int64_t p0,
                           int64_t p1, const Scratch& s) const {
  const int64_t offset = g_.offset(kA, batch) + row * g_.row[kA];
  const char* src = o.ptr[kA] + offset * element_bytes_;
  Rows a{src, g_.row[kA], batch, row, rows};
  if (o.a_rows) {
    a.data = o.a_rows + (batch * g_.m + row - o.first_row) * lda_ * k_.a_element_bytes;
    a.stride = lda_;
  } else if (copy_a_ && rows <= k_.mr) {
    k_.widen[type_]({src, g_.row[kA], g_.col[kA], rows, g_.k, s.a, lda_});
    a.data = s.a;
    a.stride = lda_;
  }
  if (rows <= k_.mr) {
    few_rows(o, a, p0, p1, s);
  } else {
    many_rows(o, a, p0, p1, s);
  }
}

/// One tile of rows: panels are streamed once, from end to end.
void PackedGemm::few_rows(const Operands& o, const Rows& a, int64_t p0, int64_t p1,
                          const Scratch& s) const {
  const char* panels = panels_of(o, a.batch);
  const int64_t wide = k_.wide[a.count - 1], acc_panel = a.count * k_.nr;
  for (int64_t p = p0; p < p1;) {
    const bool many = p + wide <= p1;
    const int64_t count = many ? wide : 1;
    const char* b = panels + (p - o.first_panel) * panel_bytes();
    k_.tile[b_type_][a.count - 1][many ? 1 : 0]({a.data, a.stride, b, panel_bytes(), steps_, s.acc,
                                                 acc_panel, false, b + kAheadBytes, step_bytes_});
    for (int64_t i = 0; i < count; ++i) {
      store(o, s.acc + i * acc_panel, a.batch, a.first, a.count, p + i);
    }
    p += count;
  }
}

/// Several tiles: a block of a panel serves all of them from the first-level cache.
void PackedGemm::many_rows(const Operands& o, const Rows& a, int64_t p0, int64_t p1,
                           const Scratch& s) const {
  const char* panels = panels_of(o, a.batch);
  const int64_t tiles = divide_up(a.count, k_.mr);
  const bool keep = kc_ < steps_;  // partial sums live between blocks of k
  for (int64_t n0 = p0; n0 < p1; n0 += nc_) {
    const int64_t n1 = std::min(n0 + nc_, p1);
    int64_t k0 = 0;
    do {
      const int64_t steps = std::min(kc_, steps_ - k0);
      const bool last = k0 + steps >= steps_, chunk = copy_a_ && !o.a_rows;
      const bool columns = chunk && columns_;
      if (chunk) copy_chunk(o, a, k0, steps, s.a);
      const char* first = chunk ? s.a : a.data + k0 * k_.step * k_.a_element_bytes;
      const int64_t stride = columns ? k_.column_width : chunk ? chunk_lda_ : a.stride;
      for (int64_t p = n0; p < n1; ++p) {
        const char* block = panels + (p - o.first_panel) * panel_bytes() + k0 * step_bytes_;
        // The next panel's block comes in from far while this one is worked on, a share a tile.
        const char* ahead = p + 1 < p1 ? block + panel_bytes() : block;
        const int64_t ahead_step = p + 1 < p1 ? step_bytes_ / tiles : 0;
        for (int64_t t = 0; t < tiles; ++t) {
          const int64_t r0 = a.count * t / tiles, count = a.count * (t + 1) / tiles - r0;
          float* acc = keep ? s.acc + ((p - n0) * a.count + r0) * k_.nr : s.acc;
          const char* rows = first + (columns ? t * tile_bytes_ : r0 * stride * k_.a_element_bytes);
          const TileFn tile = columns ? k_.column_tile[b_type_][count - 1] : k_.tile[b_type_][count - 1][0];
          if (last) fetch(o, a.batch, a.first + r0, count, p);
          tile({rows, stride, block, panel_bytes(), steps, acc, 0, k0 > 0,
                ahead + t * steps * ahead_step, ahead_step});
          if (last) store(o, acc, a.batch, a.first + r0, count, p);
        }
      }
      k0 += steps;
    } while (k0 < steps_);
  }
}

/// A block's rows of `steps` steps of k from k0 on, as its tiles read them.
void PackedGemm::copy_chunk(const Operands& o, const Rows& a, int64_t k0, int64_t steps,
                            char* to) const {
  const int64_t k = k0 * k_.step, cols = std::min(steps * k_.step, g_.k - k);
  const int64_t at = g_.offset(kA, a.batch) + a.first * g_.row[kA] + k * g_.col[kA];
  const char* src = o.ptr[kA] + at * element_bytes_;
  if (columns_) {
    k_.columns[type_]({src, g_.col[kA], a.count, divide_up(a.count, k_.mr), cols, k + cols >= g_.k,
                       reinterpret_cast<float*>(to), tile_bytes_ / 4});
  } else {
    k_.widen[type_]({src, g_.row[kA], g_.col[kA], a.count, cols, to, chunk_lda_});
  }
}

/// The lines that a finished tile is written to, and what is added to it.
void PackedGemm::fetch(const Operands& o, int64_t batch, int64_t row, int64_t rows, int64_t panel) const {
  const int64_t n0 = panel * k_.nr;
  for (Operand i : {kC, kResidual}) {
    if (!o.ptr[i] || g_.col[i] != 1) continue;
    const char* at = o.ptr[i] + (g_.offset(i, batch) + row * g_.row[i] + n0) * element_bytes_;
    const int64_t bytes = std::min<int64_t>(k_.nr, g_.n - n0) * element_bytes_;
    for (int64_t r = 0; r < rows; ++r, at += g_.row[i] * element_bytes_) {
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 1, 3);
    }
  }
}

const char* PackedGemm::panels_of(const Operands& o, int64_t batch) const {
  const bool own = g_.constant_b && !g_.shared_b;
  return o.panels + (own ? static_cast<uint64_t>(batch) * batch_bytes() : 0);
}

void PackedGemm::store(const Operands& o, const float* acc, int64_t batch, int64_t row,
                       int64_t rows, int64_t panel) const {
  const int64_t n0 = panel * k_.nr, cols = std::min<int64_t>(k_.nr, g_.n - n0);
  const auto at = [&](Operand i) -> const char* {
    if (!o.ptr[i]) return nullptr;
    const int64_t offset = i == kBias ? n0 : g_.offset(i, batch) + row * g_.row[i] + n0 * g_.col[i];
    return o.ptr[i] + offset * element_bytes_;
  };
  const char* residual = at(kResidual);
  int64_t residual_row = g_.row[kResidual];
  alignas(64) char gathered[kMaxTileRows * kMostColumns * sizeof(float)];
  if (residual && g_.col[kResidual] != 1) {
    gather_residual(residual, rows, cols, gathered);
    residual = gathered, residual_row = cols;
  }
  k_.store[type_][g_.activation]({acc, rows, cols, static_cast<float>(g_.alpha), at(kBias), residual,
                                  residual_row, const_cast<char*>(at(kC)), g_.row[kC]});
}

/// Rows of a residual whose last axis is not dense, one behind the other; columns outside, since the rows
/// of a transposed one are neighbours.
void PackedGemm::gather_residual(const char* from, int64_t rows, int64_t cols, char* to) const {
  const auto copy = [&](const auto* source, auto* dense) {
    for (int64_t j = 0; j < cols; ++j) {
      for (int64_t i = 0; i < rows; ++i) {
        dense[i * cols + j] = source[i * g_.row[kResidual] + j * g_.col[kResidual]];
      }
    }
  };
  if (element_bytes_ == 4) {
    copy(reinterpret_cast<const uint32_t*>(from), reinterpret_cast<uint32_t*>(to));
  } else {
    copy(reinterpret_cast<const uint16_t*>(from), reinterpret_cast<uint16_t*>(to));
  }
}

}  // namespace rm::cpu::gemm
