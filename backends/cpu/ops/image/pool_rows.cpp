// Rows of pool: a place of the result after the other, a block of channels at a time. Sums are f32,
// in the order of the window.
#include <algorithm>
#include <limits>

#include "common/parallel.hpp"
#include "ops/image/image.hpp"
#include "ops/image/rows.hpp"

namespace rm::cpu {
namespace {

class Pool {
 public:
  static constexpr const char* kOp = "pool";
  static constexpr const char* kAlgorithm = "channels";

  static const char* reject(const Problem& p) {
    image_of(p.input(0));
    image_of(p.output(0));
    return nullptr;
  }
  static double cost_ns(const Problem& p) {
    return 500 + 0.5 * static_cast<double>(p.input(0).numel() + p.output(0).numel());
  }

  Pool(const Problem& p, Isa isa)
      : x_(image_of(p.input(0))), y_(image_of(p.output(0))), k_(image_kernels_for(isa)) {
    const auto axes = static_cast<size_t>(p.input(0).rank() - 2);
    spread_attribute(p.attr_ints("kernel"), axes, 0, 1, kernel_);
    spread_attribute(p.attr_ints("stride"), axes, 0, 1, stride_);
    spread_attribute(p.attr_ints("dilation"), axes, 0, 1, dilation_);
    spread_attribute(p.attr_ints("padding"), axes, 0, 0, begin_);
    mean_ = p.attr_string("kind", "max") == "mean";
    padding_counts_ = p.attr_int("count_include_pad", 1) != 0;
    divisor_ = p.attr_int("divisor", 0);
  }

  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    const int64_t rows = y_.batch * y_.size[0] * y_.size[1];
    if (rows * y_.size[2] * y_.channels == 0) return nullptr;
    const double work = 0.1 * static_cast<double>(rows * y_.size[2] * y_.channels * kernel_[0] *
                                                  kernel_[1] * kernel_[2]);
    parallel_ranges(rows, threads_for(work, rows, thread_limit()), 1,
                    [&](int64_t begin, int64_t end, int) {
                      for (int64_t r = begin; r < end; ++r) row(l, r);
                    });
    return nullptr;
  }

 private:
  /// The part of a window inside the input, along one axis, and how many of it padding may count.
  struct Span {
    int64_t start, first, last;  // elements k in [first, last) at start + k * dilation
    int64_t counted;
  };
  Span span(int axis, int64_t at) const {
    Span s{at * stride_[axis] - begin_[axis], 0, kernel_[axis], 0};
    const int64_t d = dilation_[axis], size = x_.size[axis];
    while (s.first < s.last && s.start + s.first * d < 0) ++s.first;
    while (s.last > s.first && s.start + (s.last - 1) * d >= size) --s.last;
    for (int64_t k = 0; k < kernel_[axis]; ++k) {
      s.counted += s.start + k * d < size + begin_[axis] ? 1 : 0;
    }
    return s;
  }

  void row(const rm_launch& l, int64_t r) const {
    const int64_t b = r % y_.size[1], a = r / y_.size[1] % y_.size[0],
                  n = r / (y_.size[1] * y_.size[0]);
    const Span s0 = span(0, a), s1 = span(1, b);
    for (int64_t c = 0; c < y_.size[2]; ++c) {
      const Span s2 = span(2, c);
      const int64_t inside = (s0.last - s0.first) * (s1.last - s1.first) * (s2.last - s2.first);
      const int64_t count = divisor_ != 0       ? divisor_
                            : padding_counts_ ? s0.counted * s1.counted * s2.counted
                                              : inside;
      for (int64_t from = 0; from < y_.channels; from += kChannelBlock) {
        const int64_t channels = std::min(kChannelBlock, y_.channels - from);
        float acc[kChannelBlock], room[kChannelBlock];
        std::fill(acc, acc + channels, mean_ ? 0.f : -std::numeric_limits<float>::infinity());
        for (int64_t i = s0.first; i < s0.last; ++i) {
          for (int64_t j = s1.first; j < s1.last; ++j) {
            for (int64_t k = s2.first; k < s2.last; ++k) {
              const int64_t at = x_.offset(n, s0.start + i * dilation_[0],
                                           s1.start + j * dilation_[1], s2.start + k * dilation_[2]);
              const float* x = channels_at(k_, x_, l.inputs[0], at, from, channels, room);
              mean_ ? k_.add(acc, x, channels) : k_.largest(acc, x, channels);
            }
          }
        }
        if (mean_) k_.scale(acc, 1.f / static_cast<float>(count), channels);
        put_channels(k_, y_, l.outputs[0], y_.offset(n, a, b, c), from, channels, acc);
      }
    }
  }

  Image x_, y_;
  const ImageKernels& k_;
  int64_t kernel_[3], stride_[3], dilation_[3], begin_[3];
  int64_t divisor_ = 0;
  bool mean_ = false, padding_counts_ = true;
};

}  // namespace

std::span<const rm_kernel> pool_rows() { return isa_rows<Pool>(); }

}  // namespace rm::cpu
