// Splits blocks of rows of a, each with all columns of c, over threads; the arithmetic is in
// isa_amx.cpp.
#include "ops/gemm/amx.hpp"

#include <algorithm>

#include "common/parallel.hpp"

namespace rm::cpu::gemm {
namespace {

constexpr int64_t kNearBytes = 1 << 20;    // rows of a that stay in the second-level cache
constexpr double kThreadBytes = 64 << 10;  // a thread must have this much to read
constexpr double kThreadFlops = 4e6;       // or this much to multiply
constexpr int64_t kOwnBytes = 128 << 10;   // rows of a that every thread puts in order for itself
constexpr int64_t kAccFloats = kAmxPartial;
constexpr int64_t kAccRoom = kAccFloats + kAmxColumns;  // the shifted last chunk is read whole

constexpr int64_t kNearBlocks = 12;  // of k: the weight's part and a pair's rows fill the first-level cache
constexpr int64_t kManyGroups = 12;  // that pay for a copy of the weight

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

const char* AmxGemm::reject(const GemmProblem& g) {
  for (Operand o : {kA, kB, kC}) {
    if (g.dtype[o] != DType::bf16) return "amx: bf16 only";
  }
  for (Operand o : {kBias, kResidual, kC}) {
    if (!g.has(o)) continue;
    if (g.dtype[o] != DType::bf16) return "amx: all operands must have one element type";
    if (g.n > 1 && g.col[o] != 1) return "amx: the last axis of bias, residual and c must be dense";
  }
  if (!g.outer.empty()) return "amx: leading axes that do not fold into rows";
  if (g.n < kAmxColumns) return "amx: fewer columns than two tiles have";
  if (g.k > 1 && g.row[kB] != 1) return "amx: b must be dense along k";
  return nullptr;
}

std::vector<rm_edge> AmxGemm::edges() {
  return {{'M', 0, kAmxRows}, {'M', 0, 2 * kAmxRows}, {'N', 0, kAmxColumns}, {'K', 0, kAmxBlock}};
}

AmxGemm::AmxGemm(GemmProblem problem, const AmxSet& kernels)
    : g_(std::move(problem)),
      k_(kernels),
      row_bytes_(g_.col[kB] * 2),
      groups_(divide_up(g_.m, kAmxRows)),
      chunks_(divide_up(g_.n, kAmxColumns)),
      blocks_(divide_up(g_.k, kAmxBlock)) {
  const double worth =
      std::max(double(g_.n) * double(g_.k) * 2 / kThreadBytes, g_.flops() / kThreadFlops);
  const int64_t near = std::max<int64_t>(2, kNearBytes / std::max<int64_t>(1, blocks_ * kAmxTileBytes));
  const auto most = static_cast<double>(divide_up(groups_, 2) * chunks_);
  threads_ = static_cast<int>(
      std::clamp<double>(worth, 1, std::max(1.0, std::min<double>(thread_limit(), most))));
  // Where the columns are too few for all threads, rows are shared out as well.
  const int64_t parts = std::max(divide_up(groups_, near), divide_up(threads_, std::max<int64_t>(1, chunks_)));
  block_groups_ = std::max<int64_t>(2, divide_up(divide_up(groups_, parts), 2) * 2);
  copies_ = block_groups_ >= kManyGroups && blocks_ > 0;
  block_k_ = copies_ ? divide_up(blocks_, divide_up(blocks_, kNearBlocks)) : blocks_;
  near_ = NearRows(g_.m, g_.k, g_.row[kA], g_.col[kA]);
  // Threads that wait for each other cost more than the same few tiles made by each.
  own_tiles_ = (copies_ && near_.in_place()) || tile_bytes() <= kOwnBytes;
}

/// Of rows of a that are put in order: tiles, or rows beside a weight that is copied.
int64_t AmxGemm::tile_bytes() const { return copies_ ? near_.bytes() : groups_ * blocks_ * kAmxTileBytes; }

int64_t AmxGemm::units() const { return copies_ ? near_.ordered() : groups_ * blocks_; }

void AmxGemm::order(const Operands& o, int64_t begin, int64_t end, char* to) const {
  if (copies_) return near_.order(o.ptr[kA], begin, end, to);
  k_.spread({o.ptr[kA], g_.row[kA], g_.col[kA], g_.m, g_.k, begin, end, to});
}

uint64_t AmxGemm::workspace_bytes() const {
  if (g_.empty()) return 0;
  const int64_t tiles = tile_bytes() * (own_tiles_ ? threads_ : 1);
  return static_cast<uint64_t>(tiles) + static_cast<uint64_t>(threads_ * room()) * sizeof(float);
}

/// Floats that a thread has for itself: sums, and the weight's part and partial sums of all pairs.
int64_t AmxGemm::room() const {
  if (!copies_) return kAccRoom;
  return kAccRoom + block_k_ * (2 * kAmxTileBytes / 4) + (block_groups_ / 2 + 1) * kAmxPartial;
}

void AmxGemm::launch(const rm_launch& l) const {
  if (g_.empty()) return;
  Operands o(g_, l);
  char* tiles = static_cast<char*>(l.workspace);
  auto* sums = reinterpret_cast<float*>(tiles + tile_bytes() * (own_tiles_ ? threads_ : 1));
  const int64_t tasks = divide_up(groups_, block_groups_) * chunks_;
  const int threads = std::min(threads_, omp_get_max_threads());
  if (threads == 1 || own_tiles_) {
    parallel_ranges(tasks, threads, 1, [&](int64_t begin, int64_t end, int thread) {
      Operands own = o;
      own.x = tiles + tile_bytes() * thread;
      order(o, 0, units(), tiles + tile_bytes() * thread);
      run(own, begin, end, sums + thread * room());
    });
    return;
  }
  o.x = tiles;
#pragma omp parallel num_threads(threads)
  {
    const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    order(o, units() * me / team, units() * (me + 1) / team, tiles);
#pragma omp barrier
    run(o, tasks * me / team, tasks * (me + 1) / team, sums + me * room());
  }
}

/// Tasks [begin, end): chunks, numbered block of rows after block of rows.
void AmxGemm::run(const Operands& o, int64_t begin, int64_t end, float* acc) const {
  k_.open();
  while (begin < end) {
    const int64_t group = begin / chunks_ * block_groups_, chunk = begin % chunks_;
    const int64_t count = std::min(chunks_ - chunk, end - begin);
    const Share share{group, std::min(group + block_groups_, groups_), chunk, chunk + count};
    if (share.group1 - share.group0 == 1) {
      few_rows(o, share, acc);
    } else if (copies_) {
      near_rows(o, share, acc);
    } else {
      many_rows(o, share, acc);
    }
    begin += count;
  }
  k_.close();
}

/// One group of rows: two chunks at a time, from two places that lie far apart, since processors
/// fetch ahead within a page.
void AmxGemm::few_rows(const Operands& o, const Share& s, float* acc) const {
  const int64_t each = (s.chunk1 - s.chunk0) / 2, second = s.chunk0 + each;
  AmxArgs args{{rows(o, s.group0), nullptr}, {}, row_bytes_, kAmxBlock * 2, g_.k,
               {acc, acc + kAccFloats / 2}, {}};
  for (int64_t i = 0; i < each; ++i) {
    const int64_t chunk[2] = {s.chunk0 + i, second + i};
    for (int c = 0; c < 2; ++c) {
      args.w[c] = weight(o, chunk[c]);
      args.next[c] = chunk[c] + 1 < s.chunk1 ? weight(o, chunk[c] + 1) : nullptr;
    }
    k_.multiply(args);
    for (int c = 0; c < 2; ++c) store(o, args.acc[c], s.group0, chunk[c]);
  }
  args.next[0] = args.next[1] = args.w[1] = nullptr;
  for (int64_t chunk = s.chunk0 + 2 * each; chunk < s.chunk1; ++chunk) {
    args.w[0] = weight(o, chunk);
    k_.multiply(args);
    store(o, acc, s.group0, chunk);
  }
}

/// Two groups of rows at a time; the others find the chunk in the second-level cache.
void AmxGemm::many_rows(const Operands& o, const Share& s, float* acc) const {
  for (int64_t chunk = s.chunk0; chunk < s.chunk1; ++chunk) {
    AmxArgs args{{}, {weight(o, chunk), nullptr}, row_bytes_, kAmxBlock * 2, g_.k,
                 {acc, acc + kAccFloats / 2}, {}};
    for (int64_t group = s.group0; group < s.group1; group += 2) {
      const bool two = group + 1 < s.group1, fetch = group == s.group0 && chunk + 1 < s.chunk1;
      args.x[0] = rows(o, group), args.x[1] = two ? rows(o, group + 1) : nullptr;
      args.next[0] = fetch ? weight(o, chunk + 1) : nullptr;
      k_.multiply(args);
      store(o, args.acc[0], group, chunk);
      if (two) store(o, args.acc[1], group + 1, chunk);
    }
  }
}

/// Many groups of rows: a part of k of a chunk at a time, copied into the first-level cache, with all
/// pairs of groups.
void AmxGemm::near_rows(const Operands& o, const Share& s, float* acc) const {
  auto* part = reinterpret_cast<char*>(acc + kAccRoom);
  float* partial = acc + kAccRoom + block_k_ * (2 * kAmxTileBytes / 4);
  const int64_t pairs = divide_up(s.group1 - s.group0, 2);
  for (int64_t chunk = s.chunk0; chunk < s.chunk1; ++chunk) {
    for (int64_t b = 0; b < blocks_; b += block_k_) {
      const int64_t end = std::min(b + block_k_, blocks_);
      const bool last = end == blocks_;
      k_.copy({weight(o, chunk), row_bytes_, g_.k, b, end, part});
      const char* next = last ? nullptr : weight(o, chunk) + end * (kAmxBlock * 2);
      if (last && chunk + 1 < s.chunk1) next = weight(o, chunk + 1);
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t group = s.group0 + 2 * pair, row = group * kAmxRows;
        const bool two = group + 1 < s.group1;
        AmxNear args{};
        near_.find(o.ptr[kA], o.x, row, b, &args);
        args.two = two, args.w = part, args.blocks = end - b, args.acc = acc;
        args.partial = partial + pair * kAmxPartial, args.continues = b > 0, args.more = !last;
        const int64_t from = kAmxColumns * pair / pairs;
        if (next != nullptr) {
          args.ahead = next + from * row_bytes_, args.ahead_row_bytes = row_bytes_;
          args.ahead_rows = kAmxColumns * (pair + 1) / pairs - from;
        }
        if (last) {
          args.c = const_cast<char*>(o.ptr[kC]) + (row * g_.row[kC] + chunk * kAmxColumns) * 2;
          args.c_rows = std::min(NearRows::kPair, g_.m - row), args.c_row_bytes = g_.row[kC] * 2;
        }
        k_.multiply_near(args);
        if (!last) continue;
        store(o, acc, group, chunk, two ? NearRows::kPair : kAmxRows);
      }
    }
  }
}

int64_t AmxGemm::column(int64_t chunk) const {
  return std::min(chunk * kAmxColumns, g_.n - kAmxColumns);
}

const char* AmxGemm::weight(const Operands& o, int64_t chunk) const {
  return o.ptr[kB] + column(chunk) * row_bytes_;
}

const char* AmxGemm::rows(const Operands& o, int64_t group) const {
  return o.x + group * blocks_ * kAmxTileBytes;
}

void AmxGemm::store(const Operands& o, const float* acc, int64_t group, int64_t chunk,
                    int64_t rows) const {
  const int64_t n = chunk * kAmxColumns, row = group * kAmxRows;
  const auto at = [&](Operand i) -> const char* {
    return o.ptr[i] ? o.ptr[i] + (i == kBias ? n : row * g_.row[i] + n) * 2 : nullptr;
  };
  k_.store[g_.activation](
      {acc + (n - column(chunk)), std::min<int64_t>(rows, g_.m - row),
       std::min<int64_t>(kAmxColumns, g_.n - n), static_cast<float>(g_.alpha), at(kBias),
       at(kResidual), g_.row[kResidual], const_cast<char*>(at(kC)), g_.row[kC]});
}

}  // namespace rm::cpu::gemm
