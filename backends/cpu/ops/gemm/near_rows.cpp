#include "ops/gemm/near_rows.hpp"

#include <cstring>

namespace rm::cpu::gemm {
namespace {

constexpr int64_t kPage = 4096;  // rows this far apart share sets of the first-level cache
constexpr int64_t kBlockBytes = kAmxBlock * 2;

}  // namespace

NearRows::NearRows(int64_t m, int64_t k, int64_t row_stride, int64_t col_stride)
    : m_(m),
      k_(k),
      row_stride_(row_stride),
      col_stride_(col_stride),
      in_place_(k % kAmxBlock == 0 && col_stride == 1 && row_stride * 2 % kPage != 0) {}

/// Bytes from one ordered row to the next: an odd number of lines, which spreads them over the cache's sets.
int64_t NearRows::pitch() const { return ((k_ + kAmxBlock - 1) / kAmxBlock | 1) * kBlockBytes; }

int64_t NearRows::ordered() const { return in_place_ ? m_ % kPair : (m_ + kPair - 1) / kPair * kPair; }

int64_t NearRows::bytes() const {
  return (in_place_ ? kPair : (m_ + kPair - 1) / kPair * kPair) * pitch();
}

void NearRows::order(const char* x, int64_t begin, int64_t end, char* to) const {
  const int64_t first = in_place_ ? m_ / kPair * kPair : 0;
  for (int64_t r = begin; r < end; ++r) {
    auto* row = reinterpret_cast<uint16_t*>(to + r * pitch());
    const int64_t count = first + r < m_ ? k_ : 0;
    const auto* from = reinterpret_cast<const uint16_t*>(x) + (first + r) * row_stride_;
    if (col_stride_ == 1 && count > 0) {
      std::memcpy(row, from, static_cast<size_t>(count) * 2);
    } else {
      for (int64_t j = 0; j < count; ++j) row[j] = from[j * col_stride_];
    }
    std::memset(row + count, 0, static_cast<size_t>(pitch() - count * 2));
  }
}

void NearRows::find(const char* x, const char* ordered, int64_t row, int64_t b, AmxNear* args) const {
  const bool lies = in_place_ && row + kPair <= m_;
  args->x_row_bytes = lies ? row_stride_ * 2 : pitch();
  args->x = (lies ? x : ordered) + (lies || !in_place_ ? row * args->x_row_bytes : 0) + b * kBlockBytes;
}

}  // namespace rm::cpu::gemm
