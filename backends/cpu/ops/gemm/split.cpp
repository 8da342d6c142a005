// Blocking and threading of f32 products on bf16 tiles; the arithmetic is in isa_split.cpp.
#include "ops/gemm/split.hpp"

#include <algorithm>
#include <bit>

#include "common/parallel.hpp"
#include "ops/gemm/cost.hpp"

namespace rm::cpu::gemm {
namespace {

constexpr int64_t kMostDepth = 16;              // steps of k in a block: a strip of it is 96 KiB
constexpr int64_t kLineDepth = 4;               // where k is no line: as few pages at a time
constexpr int64_t kNearBytes = 800 << 10;       // packed at a time: beside the rest in the second level
constexpr int64_t kFewestStrips = 8;            // that are packed at a time
constexpr int64_t kSumBytes = 512 << 10;        // sums that stay in the second level between blocks of k
constexpr int64_t kMostK = 16384;               // bounds the packed copy
constexpr double kThreadFlops = 1e6;
constexpr double kGflops = 400, kPackNs = 0.4;  // of one thread; to pack one element (a Xeon with AMX)

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// At most `most`, so that parts of `all` are of equal size.
int64_t balanced(int64_t all, int64_t most) { return divide_up(all, divide_up(all, most)); }

}  // namespace

struct SplitGemm::Call : Pointers {
  using Pointers::Pointers;
  char* near = nullptr;
  Range range;                         // of the near side's parts
  std::atomic<bool> unusual{false};  // something is outside the limits: what was computed is not used
};

const char* SplitGemm::reject(const GemmProblem& g) {
  for (Operand o : {kA, kB, kC}) {
    if (g.dtype[o] != DType::f32) return "split: f32 only";
  }
  if (const char* why = PackedGemm::reject_scattered(g)) return why;
  // Inference keeps its chain of multiply-adds, whose bits do not depend on the number of rows or on the kernel.
  if (g.constant_operand_b) return "split: for operands that change from call to call";
  if (!g.outer.empty()) return "split: leading axes that do not fold into rows";
  if (g.k == 0 || g.k > kMostK) return "split: no product, or more than 16,384 a sum";
  return nullptr;
}

std::vector<rm_edge> SplitGemm::edges() {
  return {{'M', 0, kSplitSide},
          {'M', 0, kSplitSide / 2},
          {'N', 0, kSplitSide},
          {'N', 0, kSplitSide / 2},
          {'K', 0, kSplitDepth},
          {'K', 0, kLineDepth * kSplitDepth},
          {'K', 0, kMostDepth * kSplitDepth}};
}

double SplitGemm::cost_ns(const GemmProblem& g) {
  const double m = double(divide_up(g.m, kSplitSide) * kSplitSide);
  const double n = double(divide_up(g.n, kSplitSide) * kSplitSide);
  const double k = double(divide_up(g.k, kSplitDepth) * kSplitDepth);
  return roofline_ns(g, 2 * m * n * k / kGflops + kPackNs * k * (m + n), 2000);
}

SplitGemm::Side SplitGemm::side(bool columns) const {
  const int64_t count = columns ? g_.n : g_.m;
  return {columns, count, divide_up(count, kSplitSide), columns ? g_.col[kB] : g_.row[kA],
          columns ? g_.row[kB] : g_.col[kA]};
}

SplitGemm::SplitGemm(GemmProblem problem, const SplitSet& kernels, const KernelSet& packed)
    : g_(std::move(problem)),
      k_(kernels),
      stores_(packed),
      packed_(g_, packed),
      near_(side(g_.m >= g_.n)),
      passing_(side(g_.m < g_.n)),
      steps_(divide_up(g_.k, kSplitDepth)),
      depth_(balanced(steps_, passing_.k_stride == 1 ? kMostDepth : kLineDepth)) {
  near_strips_ = std::clamp<int64_t>(kNearBytes / (steps_ * kSplitStepBytes), kFewestStrips,
                                     std::max<int64_t>(near_.strips, kFewestStrips));
  near_strips_ = std::min(near_strips_, near_.strips);
  const bool keep = depth_ < steps_;
  const int64_t strip_sums = near_strips_ * kSplitSums * static_cast<int64_t>(sizeof(float));
  threads_ = static_cast<int>(std::clamp<double>(
      g_.flops() / kThreadFlops, 1, double(std::clamp<int64_t>(passing_.strips, 1, thread_limit()))));
  passing_strips_ = keep ? std::clamp<int64_t>(kSumBytes / std::max<int64_t>(strip_sums, 1), 1,
                                               std::max<int64_t>(1, divide_up(passing_.strips, threads_)))
                         : 1;
  near_bytes_ = static_cast<uint64_t>(near_strips_ * steps_ * kSplitStepBytes);
  thread_bytes_ = static_cast<uint64_t>(depth_ * kSplitStepBytes) +
                  static_cast<uint64_t>(keep ? passing_strips_ * strip_sums : kSplitSums * 4);
}

uint64_t SplitGemm::workspace_bytes() const {
  if (g_.empty()) return 0;
  return std::max(near_bytes_ + thread_bytes_ * static_cast<uint64_t>(threads_), packed_.workspace_bytes());
}

void SplitGemm::Range::add(uint32_t most) {
  for (uint32_t was = largest.load(); was < most && !largest.compare_exchange_weak(was, most);) {
  }
  if (most == 0) return;
  for (uint32_t was = smallest.load(); was > most && !smallest.compare_exchange_weak(was, most);) {
  }
}

/// Whether six products of parts are as good as one of f32: every part a normal number, no sum infinite. `most`: the largest
/// magnitude of a part of the passing side.
bool SplitGemm::within_limits(const Range& near, uint32_t most) const {
  constexpr uint32_t kLargest = std::bit_cast<uint32_t>(0x1p126f), kSmallest = std::bit_cast<uint32_t>(0x1p-100f);
  const uint32_t large = near.largest, small = near.smallest;
  if (large >= kLargest || most >= kLargest) return false;  // among them NaN and infinity
  if (large == 0 || most == 0) return true;
  if (small < kSmallest || most < kSmallest) return false;
  const double x = std::bit_cast<float>(most);
  return x * std::bit_cast<float>(large) * double(g_.k) < 0x1p120 && x * std::bit_cast<float>(small) > 0x1p-80;
}

int64_t SplitGemm::block_steps(int64_t k0) const { return std::min(depth_, steps_ - k0); }

uint32_t SplitGemm::pack(const Call& c, const Side& s, int64_t strip, int64_t k0, char* dst) const {
  const int64_t row = strip * kSplitSide, k = k0 * kSplitDepth;
  const auto* src = reinterpret_cast<const float*>(c.ptr[s.columns ? kB : kA]);
  const SplitPack what{src + row * s.row_stride + k * s.k_stride, s.row_stride, s.k_stride,
                       std::min<int64_t>(kSplitSide, s.count - row),
                       std::min(block_steps(k0) * kSplitDepth, g_.k - k), dst};
  return s.columns ? k_.columns(what) : k_.rows(what);
}

void SplitGemm::launch(const rm_launch& l) const {
  if (g_.empty()) return;
  Call c(g_, l);
  c.near = static_cast<char*>(l.workspace);
  const int threads = std::min(threads_, omp_get_max_threads());
  const auto work = [&](int64_t thread, int64_t team) {
    char* memory = c.near + near_bytes_ + thread_bytes_ * static_cast<uint64_t>(thread);
    k_.open();
    for (int64_t first = 0; first < near_.strips; first += near_strips_) {
      const int64_t count = std::min(near_strips_, near_.strips - first);
      if (team > 1 && first > 0) {
#pragma omp barrier
      }
      pack_near(c, first, count, thread, team);
      if (team > 1) {
#pragma omp barrier
      }
      run(c, first, count, passing_.strips * thread / team, passing_.strips * (thread + 1) / team, memory);
    }
    k_.close();
  };
  if (threads == 1) {
    work(0, 1);
  } else {
#pragma omp parallel num_threads(threads)
    work(omp_get_thread_num(), omp_get_num_threads());
  }
  if (c.unusual) packed_.launch(l);
}

/// Strips [first, first + count) of the near side, [block of k][strip][step], a share of a team's.
void SplitGemm::pack_near(Call& c, int64_t first, int64_t count, int64_t thread, int64_t team) const {
  for (int64_t k0 = 0; k0 < steps_; k0 += depth_) {
    const int64_t bytes = block_steps(k0) * kSplitStepBytes;
    char* to = c.near + k0 * count * kSplitStepBytes;
    for (int64_t strip = count * thread / team; strip < count * (thread + 1) / team; ++strip) {
      c.range.add(pack(c, near_, first + strip, k0, to + strip * bytes));
    }
  }
}

/// Strips [begin, end) of the passing side with those of the near side that are packed.
void SplitGemm::run(Call& c, int64_t first, int64_t count, int64_t begin, int64_t end, char* memory) const {
  auto* sums = reinterpret_cast<float*>(memory + depth_ * kSplitStepBytes);
  const bool keep = depth_ < steps_;
  for (int64_t p0 = begin; p0 < end; p0 += passing_strips_) {
    const int64_t p1 = std::min(p0 + passing_strips_, end);
    for (int64_t k0 = 0; k0 < steps_; k0 += depth_) {
      const int64_t steps = block_steps(k0);
      const bool last = k0 + steps == steps_;
      for (int64_t p = p0; p < p1; ++p) {
        if (c.unusual.load(std::memory_order_relaxed)) return;
        if (!within_limits(c.range, pack(c, passing_, p, k0, memory))) c.unusual = true;
        SplitAhead next;  // what is packed next
        if (p + 1 < p1) {
          next = source_of(c, passing_, p + 1, k0);
        } else if (!last) {
          next = source_of(c, passing_, p0, k0 + steps);
        } else if (p1 < end) {
          next = source_of(c, passing_, p1, 0);
        }
        const int64_t each = divide_up(next.count, count * steps);
        const char* strip = c.near + k0 * count * kSplitStepBytes;
        for (int64_t i = 0; i < count; ++i, strip += steps * kSplitStepBytes) {
          float* at = sums + (keep ? ((p - p0) * count + i) * kSplitSums : 0);
          const int64_t row = passing_.columns ? first + i : p, column = passing_.columns ? p : first + i;
          SplitAhead written = last ? lines_of(c, kC, row, column) : SplitAhead{};
          k_.multiply({passing_.columns ? strip : memory, passing_.columns ? memory : strip, steps, at, k0 > 0,
                       &written, &next, each});
          if (last) store(c, at, row, column);
        }
      }
    }
  }
}

/// The lines of an operand of c's shape that belong to a block of sums.
SplitAhead SplitGemm::lines_of(const Call& c, Operand o, int64_t row_strip, int64_t column_strip) const {
  if (!c.ptr[o]) return {};
  const int64_t row = row_strip * kSplitSide, n = column_strip * kSplitSide;
  const int64_t rows = std::min<int64_t>(kSplitSide, g_.m - row), cols = std::min<int64_t>(kSplitSide, g_.n - n);
  const int64_t lines = divide_up(cols * 4, 64);
  return {c.ptr[o] + (row * g_.row[o] + n) * 4, g_.row[o] * 4, lines, lines, rows * lines};
}

/// The lines that a strip of a block of k is packed from.
SplitAhead SplitGemm::source_of(const Call& c, const Side& s, int64_t strip, int64_t k0) const {
  const int64_t row = strip * kSplitSide, k = k0 * kSplitDepth;
  const int64_t rows = std::min<int64_t>(kSplitSide, s.count - row);
  const int64_t depth = std::min(block_steps(k0) * kSplitDepth, g_.k - k);
  const bool along_k = s.k_stride == 1;
  if (!along_k && s.row_stride != 1) return {};
  const int64_t lines = divide_up((along_k ? depth : rows) * 4, 64);
  return {c.ptr[s.columns ? kB : kA] + (row * s.row_stride + k * s.k_stride) * 4,
          (along_k ? s.row_stride : s.k_stride) * 4, lines, lines, (along_k ? rows : depth) * lines};
}

void SplitGemm::store(const Call& c, const float* sums, int64_t row_strip, int64_t column_strip) const {
  const int64_t row = row_strip * kSplitSide, n = column_strip * kSplitSide;
  const auto at = [&](Operand o) -> const char* {
    return c.ptr[o] ? c.ptr[o] + (o == kBias ? n : row * g_.row[o] + n) * 4 : nullptr;
  };
  stores_.store[kF32][g_.activation](
      {sums, std::min<int64_t>(kSplitSide, g_.m - row), std::min<int64_t>(kSplitSide, g_.n - n),
       static_cast<float>(g_.alpha), at(kBias), at(kResidual), g_.row[kResidual],
       const_cast<char*>(at(kC)), g_.row[kC]});
}

}  // namespace rm::cpu::gemm
