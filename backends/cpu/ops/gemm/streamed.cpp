// The packed gemm on a weight of which no packed copy may stay: every thread packs a few panels
// into its second-level cache, multiplies all rows with them, and goes on.
#include <algorithm>

#include "common/parallel.hpp"
#include "ops/gemm/packed.hpp"

namespace rm::cpu::gemm {
namespace {

constexpr int64_t kWholeBytes = 1 << 20;   // a smaller b is packed whole, all threads together
constexpr int64_t kMostWhole = 4 << 20;    // so is one of up to here where a is no smaller than kNearRows
constexpr int64_t kNearRows = 1 << 19;
constexpr int64_t kNearBytes = 192 << 10;  // panels that stay in the second level beside rows of a
uint64_t round_line(uint64_t bytes) { return (bytes + 63) / 64 * 64; }
constexpr int64_t kMostRows = 1024;     // of a a pass: bounds the copy of a
constexpr int64_t kRowsTogether = 96;   // a thread copies: their lines stay in the second level

}  // namespace

void PackedGemm::plan_stream() {
  const int64_t bytes = static_cast<int64_t>(batch_bytes());
  // Every few panels all rows of a are read again: a has to be near, or b too large for a copy.
  const bool streams = bytes > kMostWhole ||
                       (bytes >= kWholeBytes && g_.batch * g_.m * g_.k * k_.a_element_bytes <= kNearRows);
  streamed_ = source_ || (!g_.constant_b && g_.shared_b && streams && panels_ >= 2 * threads_);
  if (streamed_) a_bytes_ = 0;  // rows of a are copied once, for all threads
  stream_rows_ = std::min(g_.batch * g_.m, kMostRows);
  stream_panels_ = std::clamp<int64_t>(kNearBytes / std::max<int64_t>(1, panel_bytes()), 1,
                                       std::max<int64_t>(1, panels_));
}

void PackedGemm::run_streamed(const Operands& o, const rm_launch& l, int threads) const {
  const int64_t rows = g_.batch * g_.m;
  char* shared = static_cast<char*>(l.workspace);
#pragma omp parallel num_threads(threads)
  {
    const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    const Scratch s = scratch(l.workspace, static_cast<int>(me));
    char* panels = s.a;
    for (int64_t first = 0; first < rows; first += stream_rows_) {
      const int64_t count = std::min(stream_rows_, rows - first);
      Operands own = o;
      if (copy_a_) {
        own.a_rows = shared;
        own.first_row = first;
        copy_rows(o, shared, first, first + count * me / team, first + count * (me + 1) / team);
#pragma omp barrier
      } else {
        own.first_row = first;
      }
      stream_panels(own, panels, first + count, panels_ * me / team, panels_ * (me + 1) / team, s);
      if (copy_a_ && first + count < rows) {
#pragma omp barrier
      }
    }
  }
}

/// Rows [begin, end) of a, as the kernels read them; the first row of the copy is `first`. Several at a time:
/// those of a transposed operand share their lines.
void PackedGemm::copy_rows(const Operands& o, char* to, int64_t first, int64_t begin, int64_t end) const {
  for (int64_t r = begin; r < end;) {
    const int64_t in_batch = r % g_.m, rows = std::min({end - r, g_.m - in_batch, kRowsTogether});
    const int64_t at = g_.offset(kA, r / g_.m) + in_batch * g_.row[kA];
    k_.widen[type_]({o.ptr[kA] + at * element_bytes_, g_.row[kA], g_.col[kA], rows, g_.k,
                     to + (r - first) * lda_ * k_.a_element_bytes, lda_});
    r += rows;
  }
}

void PackedGemm::stream_panels(Operands o, char* panels, int64_t rows_end, int64_t p0, int64_t p1,
                               const Scratch& s) const {
  o.panels = panels;
  for (int64_t p = p0; p < p1; p += stream_panels_) {
    const int64_t end = std::min(p1, p + stream_panels_);
    if (source_) {
      char* scratch = panels + round_line(static_cast<uint64_t>(stream_panels_ * panel_bytes()));
      source_->fill(o.source_launch, p, end, panels, scratch);
    } else {
      k_.pack[type_]({o.ptr[kB], g_.row[kB], g_.col[kB], g_.k, g_.n, panels, p, end});
    }
    o.first_panel = p;
    run_rows(o, o.first_row, rows_end, p, end, s);
  }
}

}  // namespace rm::cpu::gemm
