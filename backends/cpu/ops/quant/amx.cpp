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
      blocks_(divide_up(q_.gemm.k, kBlock)) {
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

uint64_t AmxLinear::x_bytes() const {
  return static_cast<uint64_t>(groups_ * blocks_ * kAmxTileBytes);
}

uint64_t AmxLinear::lay_out(char* base, Scratch* s) const {
  uint64_t at = 0;
  const auto take = [&](uint64_t bytes) {
    char* p = base + at;
    at += whole_lines(bytes);
    return p;
  };
  s->chunks = take(2 * chunk_bytes());
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
  const gemm::GemmProblem& g = q_.gemm;
  auto* x = static_cast<char*>(l.workspace);
  const int64_t units = groups_ * blocks_, tasks = divide_up(groups_, block_groups_) * chunks_;
  Scratch unused{};
  const uint64_t bytes = lay_out(nullptr, &unused);
  const auto spread = [&](int64_t begin, int64_t end) {
    k_.multiply.spread({o.x, g.row[gemm::kA], g.col[gemm::kA], g.m, g.k, begin, end, x});
  };
  const auto share = [&](int64_t begin, int64_t end, int64_t thread) {
    Scratch s{};
    lay_out(x + x_bytes() + bytes * static_cast<uint64_t>(thread), &s);
    run(o, x, begin, end, s);
  };
  const int threads = std::min(threads_, omp_get_max_threads());
  if (threads == 1) {
    spread(0, units);
    return share(0, tasks, 0);
  }
#pragma omp parallel num_threads(threads)
  {
    const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    spread(units * me / team, units * (me + 1) / team);
#pragma omp barrier
    share(tasks * me / team, tasks * (me + 1) / team, me);
  }
}

/// Tasks [begin, end): chunks, numbered block of rows after block of rows.
void AmxLinear::run(const Operands& o, const char* x, int64_t begin, int64_t end,
                    const Scratch& s) const {
  k_.multiply.open();
  if (groups_ == 1) {
    one_group(o, x, begin, end, s);
  } else {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t group = task / chunks_ * block_groups_;
      many_groups(o, x, group, std::min(group + block_groups_, groups_), task % chunks_, s);
    }
  }
  k_.multiply.close();
}

/// Two chunks at a time: four sums keep the tiles busy.
void AmxLinear::one_group(const Operands& o, const char* x, int64_t begin, int64_t end,
                          const Scratch& s) const {
  char* second = s.chunks + chunk_bytes();
  for (int64_t chunk = begin; chunk < end; chunk += 2) {
    const bool two = chunk + 1 < end;
    fill(o, chunk, s, s.chunks);
    if (two) fill(o, chunk + 1, s, second);
    k_.multiply.multiply({{x, nullptr}, {s.chunks, two ? second : nullptr}, kBlock * 2,
                          kChunkBlockBytes, blocks_ * kBlock, {s.acc, s.acc + kAccFloats}, {}});
    store(o, s.acc, 0, chunk);
    if (two) store(o, s.acc + kAccFloats, 0, chunk + 1);
  }
}

/// A part of k of the chunk at a time stays in the first-level cache for all pairs of groups.
void AmxLinear::many_groups(const Operands& o, const char* x, int64_t group0, int64_t group1,
                            int64_t chunk, const Scratch& s) const {
  fill(o, chunk, s, s.chunks);
  for (int64_t b = 0; b < blocks_; b += block_k_) {
    pairs(o, x, group0, group1, chunk, b, std::min(b + block_k_, blocks_), s);
  }
}

/// Blocks of k [b, end) of all pairs of groups.
void AmxLinear::pairs(const Operands& o, const char* x, int64_t group0, int64_t group1,
                      int64_t chunk, int64_t b, int64_t end, const Scratch& s) const {
  const int64_t group_bytes = blocks_ * kAmxTileBytes;
  const char* part = s.chunks + b * kChunkBlockBytes;
  float* partial = s.partial;
  for (int64_t group = group0; group < group1; group += 2, partial += gemm::kAmxPartial) {
    const bool two = group + 1 < group1;
    const char* rows = x + group * group_bytes + b * kAmxTileBytes;
    const int64_t row = group * kAmxRows, lines = std::min(q_.gemm.m - row, int64_t{2 * kAmxRows});
    for (int64_t i = 0; end == blocks_ && i < lines; ++i) {  // that the sums are stored into
      __builtin_prefetch(o.c + ((row + i) * q_.gemm.row[gemm::kC] + chunk * kAmxColumns) * 2, 1, 3);
    }
    k_.multiply.multiply({{rows, two ? rows + group_bytes : nullptr}, {part, nullptr}, kBlock * 2,
                          kChunkBlockBytes, (end - b) * kBlock, {s.acc, s.acc + kAccFloats}, {},
                          partial, b > 0, end < blocks_});
    if (end < blocks_) continue;
    store(o, s.acc, group, chunk);
    if (two) store(o, s.acc + kAccFloats, group + 1, chunk);
  }
}

/// Rows of a chunk: tiles of eight, rows that lie alone, zeros behind the last one.
void AmxLinear::fill(const Operands& o, int64_t chunk, const Scratch& s, char* to) const {
  const int64_t n0 = chunk * kAmxColumns, tiled = q_.tile == kTile ? q_.gemm.n / kTile * kTile : 0;
  const int bits = q_.bits == 8 ? 0 : 1;
  for (int64_t r = 0; r < kAmxColumns;) {
    const int64_t n = n0 + r;
    char* dst = to + r * kBlock * 2;
    const uint8_t* w = o.q + n * q_.row_bytes;
    const uint16_t* scale = o.scale + n * q_.scale_row;
    if (n < tiled) {
      k_.fill.tile[bits]({w, scale, q_.blocks(), q_.groups(), q_.group / kBlock, dst});
      r += kTile;
      continue;
    }
    if (n < q_.gemm.n) {
      k_.widen.widen[bits]({w, scale, o.zero ? o.zero + n * q_.zero_row : nullptr,
                            q_.bits == 8 ? 0.f : 8.f, q_.gemm.k, q_.group, s.row});
    } else {
      std::memset(s.row, 0, static_cast<size_t>(q_.blocks() * kBlock) * 4);
    }
    k_.fill.row({s.row, q_.blocks(), dst});
    ++r;
  }
}

void AmxLinear::store(const Operands& o, const float* acc, int64_t group, int64_t chunk) const {
  const gemm::GemmProblem& g = q_.gemm;
  const int64_t n = chunk * kAmxColumns, row = group * kAmxRows;
  const auto at = [&](const char* p, int64_t step) { return p ? p + (row * step + n) * 2 : nullptr; };
  k_.store.store[gemm::kBF16][g.activation](
      {acc, std::min<int64_t>(kAmxRows, g.m - row), std::min<int64_t>(kAmxColumns, g.n - n), 1.f,
       at(o.bias, 0), at(o.residual, g.row[gemm::kResidual]), g.row[gemm::kResidual],
       o.c + (row * g.row[gemm::kC] + n) * 2, g.row[gemm::kC]});
}

}  // namespace rm::cpu::quant
