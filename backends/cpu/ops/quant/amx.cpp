// Splits blocks of rows of x, each with all rows of the weight, over threads; the arithmetic is in
// isa_amx.cpp here and beside gemm.
#include "ops/quant/amx.hpp"

#include <algorithm>
#include <cstring>

#include "common/parallel.hpp"

namespace rm::cpu::quant {
namespace {

using gemm::kAmxColumns;
using gemm::kAmxRows;
using gemm::kAmxTileBytes;
using gemm::NearRows;

constexpr int64_t kNearBytes = 1 << 20;    // rows of x that stay in the second-level cache
constexpr double kThreadBytes = 48 << 10;  // of weights a thread must have to read
constexpr int64_t kNearBlocks = 12;  // of k: the weight's part and a pair's rows fill the first-level cache
constexpr int64_t kShortBlocks = 16, kFewGroups = 8;  // which do not pay for sums kept between parts
constexpr int64_t kAccFloats = kAmxRows * kAmxColumns;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
uint64_t whole_lines(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

const char* AmxLinear::reject(const QuantProblem& q) {
  const gemm::GemmProblem& g = q.gemm;
  for (gemm::Operand o : {gemm::kA, gemm::kBias, gemm::kResidual, gemm::kC}) {
    if (!g.has(o)) continue;
    if (g.dtype[o] != DType::bf16) return "amx: bf16 only";
    if (o != gemm::kA && g.n > 1 && g.col[o] != 1) {
      return "amx: the last axis of bias, residual and c must be dense";
    }
  }
  if (!g.outer.empty()) return "amx: leading axes that do not fold into rows";
  return nullptr;
}

AmxLinear::AmxLinear(QuantProblem problem, const Kernels& kernels)
    : q_(std::move(problem)),
      k_(kernels),
      groups_(divide_up(q_.gemm.m, kAmxRows)),
      chunks_(divide_up(q_.gemm.n, kAmxColumns)),
      blocks_(divide_up(q_.gemm.k, kBlock)),
      rows_(q_.gemm.m, q_.gemm.k, q_.gemm.row[gemm::kA], q_.gemm.col[gemm::kA]) {
  const double bytes = double(q_.gemm.n) * double(q_.blocks() * 4 * q_.bits);
  const double worth = double(std::max<int64_t>(1, groups_)) * bytes / kThreadBytes;
  threads_ = static_cast<int>(std::clamp<double>(
      worth, 1, std::max(1.0, std::min<double>(thread_limit(), double(chunks_)))));
  const int64_t near =
      std::max<int64_t>(2, kNearBytes / std::max<int64_t>(1, blocks_ * kAmxTileBytes));
  const int64_t parts = std::max<int64_t>(1, divide_up(groups_, near));
  block_groups_ = std::max<int64_t>(2, divide_up(divide_up(groups_, parts), 2) * 2);
  const bool splits = block_groups_ >= kFewGroups && blocks_ > kShortBlocks;
  block_k_ = splits ? divide_up(blocks_, divide_up(blocks_, kNearBlocks)) : std::max<int64_t>(1, blocks_);
}

/// Of rows of x that are put in order: a thread's, or all threads'.
uint64_t AmxLinear::x_bytes() const {
  return whole_lines(static_cast<uint64_t>(rows_.bytes() * (rows_.in_place() ? threads_ : 1)));
}

uint64_t AmxLinear::lay_out(char* base, Scratch* s) const {
  uint64_t at = 0;
  const auto take = [&](uint64_t bytes) {
    char* p = base + at;
    at += whole_lines(bytes);
    return p;
  };
  s->chunk = take(static_cast<uint64_t>(q_.blocks() * kChunkBlockBytes));
  s->lone = take(static_cast<uint64_t>(kAmxColumns * lone_bytes()));
  s->row = reinterpret_cast<float*>(take(static_cast<uint64_t>(q_.blocks() * kBlock) * 4));
  s->acc = reinterpret_cast<float*>(take(2 * kAccFloats * 4));
  s->partial = reinterpret_cast<float*>(
      take(static_cast<uint64_t>((block_groups_ / 2 + 1) * gemm::kAmxPartial) * 4));
  return at;
}

uint64_t AmxLinear::workspace_bytes() const {
  if (q_.gemm.empty()) return 0;
  Scratch unused{};
  return x_bytes() + lay_out(nullptr, &unused) * static_cast<uint64_t>(threads_);
}

void AmxLinear::launch(const rm_launch& l) const {
  if (q_.gemm.empty()) return;
  const Operands o = operands(q_, l);
  auto* x = static_cast<char*>(l.workspace);
  const int64_t ordered = rows_.ordered(), tasks = divide_up(groups_, block_groups_) * chunks_;
  Scratch unused{};
  const uint64_t bytes = lay_out(nullptr, &unused);
  const auto share = [&](const char* own, int64_t begin, int64_t end, int64_t thread) {
    Scratch s{};
    lay_out(x + x_bytes() + bytes * static_cast<uint64_t>(thread), &s);
    run(o, own, begin, end, s);
  };
  const int threads = std::min(threads_, omp_get_max_threads());
  if (threads == 1 || rows_.in_place()) {
    parallel_ranges(tasks, threads, 1, [&](int64_t begin, int64_t end, int thread) {
      char* own = x + rows_.bytes() * thread;
      rows_.order(o.x, 0, ordered, own);
      share(own, begin, end, thread);
    });
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    rows_.order(o.x, ordered * me / team, ordered * (me + 1) / team, x);
#pragma omp barrier
    share(x, tasks * me / team, tasks * (me + 1) / team, me);
  }
}

/// Tasks [begin, end): chunks, numbered block of rows after block of rows.
void AmxLinear::run(const Operands& o, const char* x, int64_t begin, int64_t end,
                    const Scratch& s) const {
  k_.multiply.open();
  for (int64_t task = begin; task < end; ++task) {
    const int64_t group = task / chunks_ * block_groups_;
    chunk(o, x, group, std::min(group + block_groups_, groups_), task % chunks_, s);
  }
  k_.multiply.close();
}

/// A part of k of the chunk at a time stays in the first-level cache for all pairs of groups.
void AmxLinear::chunk(const Operands& o, const char* x, int64_t group0, int64_t group1,
                      int64_t chunk, const Scratch& s) const {
  fill(o, chunk, s, s.chunk);
  for (int64_t b = 0; b < std::max<int64_t>(1, blocks_); b += block_k_) {
    pairs(o, x, group0, group1, chunk, b, std::min(b + block_k_, blocks_), s);
  }
}

/// Blocks of k [b, end) of all pairs of groups.
void AmxLinear::pairs(const Operands& o, const char* x, int64_t group0, int64_t group1,
                      int64_t chunk, int64_t b, int64_t end, const Scratch& s) const {
  const gemm::GemmProblem& g = q_.gemm;
  float* partial = s.partial;
  for (int64_t group = group0; group < group1; group += 2, partial += gemm::kAmxPartial) {
    const int64_t row = group * kAmxRows;
    gemm::AmxNear args{};
    rows_.find(o.x, x, row, b, &args);
    args.two = group + 1 < group1;
    args.w = s.chunk + b * kChunkBlockBytes, args.blocks = end - b, args.acc = s.acc;
    args.partial = partial, args.continues = b > 0, args.more = end < blocks_;
    if (!args.more) {
      args.c = o.c + (row * g.row[gemm::kC] + chunk * kAmxColumns) * 2;
      args.c_rows = std::min(g.m - row, NearRows::kPair), args.c_row_bytes = g.row[gemm::kC] * 2;
    }
    k_.multiply.multiply_near(args);
    if (!args.more) store(o, s.acc, row, std::min(g.m - row, args.two ? NearRows::kPair : kAmxRows), chunk);
  }
}

/// Rows of a chunk: tiles of eight, two at a time, rows that lie alone, zeros behind the last one.
void AmxLinear::fill(const Operands& o, int64_t chunk, const Scratch& s, char* to) const {
  const int64_t n0 = chunk * kAmxColumns, tiled = q_.tile == kTile ? q_.gemm.n / kTile * kTile : 0;
  const int bits = q_.bits == 8 ? 0 : 1;
  if (n0 >= tiled) {  // none of them lies in a tile
    for (int64_t r = 0; r < kAmxColumns; ++r) {
      fill_row(o, n0 + r, s);
      k_.fill.row({s.row, q_.blocks(), s.lone + r * lone_bytes()});
    }
    return k_.multiply.copy({s.lone, lone_bytes(), q_.blocks() * kBlock, 0, q_.blocks(), to});
  }
  for (int64_t half = 0; half < kAmxColumns; half += kAmxRows) {
    const int64_t n = n0 + half, whole = std::clamp<int64_t>(tiled - n, 0, kAmxRows);
    char* dst = to + half / kAmxRows * kAmxTileBytes;
    if (whole > 0) {
      AmxTiles a{{}, {}, q_.blocks(), q_.groups(), q_.group / kBlock, dst};
      for (int64_t t = 0; t < 2; ++t) {  // one alone stands in for the second as well
        const int64_t row = n + (whole > kTile ? t * kTile : 0);
        a.w[t] = o.q + row * q_.row_bytes, a.scale[t] = o.scale + row * q_.scale_row;
      }
      k_.fill.tiles[bits](a);
    }
    for (int64_t r = whole; r < kAmxRows; ++r) {
      fill_row(o, n + r, s);
      k_.fill.column({s.row, q_.blocks(), dst + r * 4});
    }
  }
}

/// Row n of the weight as f32.
void AmxLinear::fill_row(const Operands& o, int64_t n, const Scratch& s) const {
  if (n >= q_.gemm.n) {
    std::memset(s.row, 0, static_cast<size_t>(q_.blocks() * kBlock) * 4);
    return;
  }
  k_.widen.widen[q_.bits == 8 ? 0 : 1](
      {o.q + n * q_.row_bytes, o.scale + n * q_.scale_row, o.zero ? o.zero + n * q_.zero_row : nullptr,
       q_.bits == 8 ? 0.f : 8.f, q_.gemm.k, q_.group, s.row});
}

void AmxLinear::store(const Operands& o, const float* acc, int64_t row, int64_t rows,
                      int64_t chunk) const {
  const gemm::GemmProblem& g = q_.gemm;
  const int64_t n = chunk * kAmxColumns;
  const auto at = [&](const char* p, int64_t step) { return p ? p + (row * step + n) * 2 : nullptr; };
  k_.multiply.store[g.activation]({acc, rows, std::min<int64_t>(kAmxColumns, g.n - n), 1.f,
                                   at(o.bias, 0), at(o.residual, g.row[gemm::kResidual]),
                                   g.row[gemm::kResidual], o.c + (row * g.row[gemm::kC] + n) * 2,
                                   g.row[gemm::kC]});
}

}  // namespace rm::cpu::quant
