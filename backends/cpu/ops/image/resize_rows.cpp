// Rows of resize: an element of the result is a sum of up to eight of the operand, weighted along
// each axis as torch's upsample does.
#include <algorithm>
#include <cmath>

#include "common/parallel.hpp"
#include "ops/image/image.hpp"
#include "ops/image/rows.hpp"

namespace rm::cpu {
namespace {

struct Point {
  int64_t at[2];
  float weight[2];
};

class Resize {
 public:
  static constexpr const char* kOp = "resize";
  static constexpr const char* kAlgorithm = "channels";

  static const char* reject(const Problem& p) {
    image_of(p.input(0));
    image_of(p.output(0));
    const std::string_view mode = p.attr_string("mode", "nearest");
    return mode == "nearest" || mode == "linear" ? nullptr : "a mode but nearest and linear";
  }
  static double cost_ns(const Problem& p) {
    return 500 + static_cast<double>(p.output(0).numel());
  }

  Resize(const Problem& p, Isa isa)
      : x_(image_of(p.input(0))), y_(image_of(p.output(0))), k_(image_kernels_for(isa)) {
    const auto axes = static_cast<size_t>(p.input(0).rank() - 2);
    const std::vector<double> ratio = p.attr_floats("ratio");
    linear_ = p.attr_string("mode", "nearest") == "linear";
    const bool corners = p.attr_int("align_corners", 0) != 0;
    for (size_t a = 0; a < 3; ++a) {
      const double step = a < 3 - axes ? 1.0 : ratio.at(a - (3 - axes));
      for (int64_t i = 0; i < y_.size[a]; ++i) points_[a].push_back(point(a, i, step, corners));
    }
  }

  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    const int64_t rows = y_.batch * y_.size[0] * y_.size[1];
    if (rows * y_.size[2] * y_.channels == 0) return nullptr;
    const double work =
        (linear_ ? 0.6 : 0.1) * static_cast<double>(rows * y_.size[2] * y_.channels);
    parallel_ranges(rows, threads_for(work, rows, thread_limit()), 1,
                    [&](int64_t begin, int64_t end, int) {
                      for (int64_t r = begin; r < end; ++r) row(l, r);
                    });
    return nullptr;
  }

 private:
  Point point(size_t axis, int64_t i, double ratio, bool corners) const {
    const int64_t last = x_.size[axis] - 1;
    if (!linear_) {
      const float real = std::floor(static_cast<float>(i) * static_cast<float>(ratio));
      return {{std::min(static_cast<int64_t>(real), last), 0}, {1, 0}};
    }
    const double real = corners ? ratio * static_cast<double>(i)
                                : std::max(0.0, ratio * (static_cast<double>(i) + 0.5) - 0.5);
    const int64_t first = std::min(static_cast<int64_t>(real), last);
    const int64_t second = std::min(first + 1, last);
    if (first == second) return {{first, 0}, {1, 0}};
    const auto weight = static_cast<float>(std::min(real - static_cast<double>(first), 1.0));
    return {{first, second}, {1 - weight, weight}};
  }

  void row(const rm_launch& l, int64_t r) const {
    const int64_t b = r % y_.size[1], a = r / y_.size[1] % y_.size[0],
                  n = r / (y_.size[1] * y_.size[0]);
    const Point &p0 = points_[0][static_cast<size_t>(a)], &p1 = points_[1][static_cast<size_t>(b)];
    for (int64_t c = 0; c < y_.size[2]; ++c) {
      const Point& p2 = points_[2][static_cast<size_t>(c)];
      for (int64_t from = 0; from < y_.channels; from += kChannelBlock) {
        const int64_t channels = std::min(kChannelBlock, y_.channels - from);
        float acc[kChannelBlock], room[kChannelBlock];
        const float* made = acc;
        if (!linear_) {
          made = channels_at(k_, x_, l.inputs[0], x_.offset(n, p0.at[0], p1.at[0], p2.at[0]), from,
                             channels, room);
        } else {
          std::fill(acc, acc + channels, 0.f);
          for (int i = 0; i < 8; ++i) {
            const int i0 = i >> 2, i1 = i >> 1 & 1, i2 = i & 1;
            const float w = p0.weight[i0] * p1.weight[i1] * p2.weight[i2];
            if ((i0 && p0.weight[1] == 0) || (i1 && p1.weight[1] == 0) ||
                (i2 && p2.weight[1] == 0)) {
              continue;  // no such neighbour
            }
            const int64_t at = x_.offset(n, p0.at[i0], p1.at[i1], p2.at[i2]);
            k_.add_product(acc, channels_at(k_, x_, l.inputs[0], at, from, channels, room), w,
                           channels);
          }
        }
        put_channels(k_, y_, l.outputs[0], y_.offset(n, a, b, c), from, channels, made);
      }
    }
  }

  Image x_, y_;
  const ImageKernels& k_;
  std::vector<Point> points_[3];
  bool linear_ = false;
};

}  // namespace

std::span<const rm_kernel> resize_rows() { return isa_rows<Resize>(); }

}  // namespace rm::cpu
