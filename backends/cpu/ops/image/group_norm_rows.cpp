// Rows of group_norm: moments a piece of places at a time, joined in f64, then one pass
// y = x * factor + shift with a factor and a shift a channel.
//
// Moments are taken around the first place of each sample: a large common value does not eat the
// variance.
#include <algorithm>
#include <cmath>

#include "common/parallel.hpp"
#include "common/plain_vec.hpp"
#include "ops/image/image.hpp"
#include "ops/image/rows.hpp"

namespace rm::cpu {
namespace {

constexpr int64_t kPiece = 256;  // places summed in f32 before f64 takes over

class GroupNorm {
 public:
  static constexpr const char* kOp = "group_norm";
  static constexpr const char* kAlgorithm = "channels";

  static const char* reject(const Problem& p) {
    const Image x = image_of(p.input(0));
    image_of(p.output(0));
    const int64_t groups = p.attr_int("groups", 1);
    if (groups < 1 || x.channels % groups != 0) return "groups that do not divide the channels";
    for (size_t i : {size_t{1}, size_t{2}}) {
      if (p.has_input(i) && !is_float32_class(p.input(i).dtype)) return "a weight of another class";
    }
    return nullptr;
  }
  static double cost_ns(const Problem& p) {
    return 1000 + static_cast<double>(p.input(0).numel());
  }

  GroupNorm(const Problem& p, Isa isa)
      : x_(image_of(p.input(0))), y_(image_of(p.output(0))), k_(image_kernels_for(isa)) {
    groups_ = p.attr_int("groups", 1);
    eps_ = p.attr_float("eps", 1e-5);
    silu_ = p.attr_string("activation", "none") == "silu";
    for (size_t i : {size_t{1}, size_t{2}}) {
      if (!p.has_input(i)) continue;
      scale_[i - 1] = p.input(i);
    }
    pieces_ = (x_.places() + kPiece - 1) / kPiece;
  }

  /// Sums of every piece, origins, then factors and shifts.
  uint64_t workspace_bytes() const {
    return static_cast<uint64_t>(x_.batch * x_.channels * (2 * pieces_ + 3)) * sizeof(float) + 64;
  }

  rm_status* launch(const rm_launch& l) const {
    if (x_.batch * x_.places() * x_.channels == 0) return nullptr;
    auto* origin = static_cast<float*>(l.workspace);
    float* factor = origin + x_.batch * x_.channels;
    float* shift = factor + x_.batch * x_.channels;
    float* sums = shift + x_.batch * x_.channels;
    const double work = static_cast<double>(x_.places() * x_.channels * x_.batch);
    for (int64_t n = 0; n < x_.batch; ++n) {
      k_.widen(x_.dtype, static_cast<const char*>(l.inputs[0]) + x_.offset(n, 0, 0, 0), x_.step[1],
               origin + n * x_.channels, x_.channels);
    }
    const int64_t tasks = x_.batch * pieces_;
    parallel_ranges(tasks, threads_for(0.15 * work, tasks, thread_limit()), 1,
                    [&](int64_t begin, int64_t end, int) {
                      for (int64_t t = begin; t < end; ++t) piece(l, t, origin, sums);
                    });
    for (int64_t n = 0; n < x_.batch; ++n) join(l, n, origin, sums, factor, shift);
    parallel_ranges(x_.batch * x_.places(),
                    threads_for((silu_ ? 0.5 : 0.15) * work, x_.batch * x_.places(), thread_limit()),
                    1, [&](int64_t begin, int64_t end, int) {
                      for (int64_t i = begin; i < end; ++i) place(l, i, factor, shift);
                    });
    return nullptr;
  }

 private:
  int64_t offset(const Image& image, int64_t n, int64_t place) const {
    return image.offset(n, place / (image.size[1] * image.size[2]),
                        place / image.size[2] % image.size[1], place % image.size[2]);
  }

  void piece(const rm_launch& l, int64_t task, const float* origin, float* sums) const {
    const int64_t n = task / pieces_, first = task % pieces_ * kPiece,
                  last = std::min(first + kPiece, x_.places());
    float* sum = sums + task * 2 * x_.channels;
    float* squares = sum + x_.channels;
    std::fill(sum, sum + 2 * x_.channels, 0.f);
    float room[kChannelBlock];
    for (int64_t p = first; p < last; ++p) {
      const int64_t at = offset(x_, n, p);
      for (int64_t c = 0; c < x_.channels; c += kChannelBlock) {
        const int64_t count = std::min(kChannelBlock, x_.channels - c);
        k_.moments(sum + c, squares + c, channels_at(k_, x_, l.inputs[0], at, c, count, room),
                   origin + n * x_.channels + c, count);
      }
    }
  }

  double scale_of(const rm_launch& l, size_t which, int64_t channel, double otherwise) const {
    const View& v = scale_[which];
    if (v.dtype == DType::invalid) return otherwise;
    return visit(v.dtype, [&](auto type) {
      using T = decltype(type);
      return static_cast<double>(
          get(static_cast<const T*>(l.inputs[which + 1])[channel * v.stride[0]]));
    });
  }

  void join(const rm_launch& l, int64_t n, const float* origin, const float* sums, float* factor,
            float* shift) const {
    const int64_t each = x_.channels / groups_;
    const auto count = static_cast<double>(x_.places());
    for (int64_t g = 0; g < groups_; ++g) {
      double mean = 0, spread = 0, of_means = 0;
      for (int64_t pass = 0; pass < 2; ++pass) {  // the mean of the group, then the spread around it
        for (int64_t c = g * each; c < (g + 1) * each; ++c) {
          double sum = 0, squares = 0;
          for (int64_t p = 0; p < pieces_; ++p) {
            const float* here = sums + (n * pieces_ + p) * 2 * x_.channels;
            sum += static_cast<double>(here[c]);
            squares += static_cast<double>(here[x_.channels + c]);
          }
          const double own = static_cast<double>(origin[n * x_.channels + c]) + sum / count;
          if (pass == 0) {
            mean += own / static_cast<double>(each);
            spread += squares - sum * sum / count;
          } else {
            of_means += (own - mean) * (own - mean);
          }
        }
      }
      const double variance = (spread + of_means * count) / (count * static_cast<double>(each));
      const double inverse = 1 / std::sqrt((variance < 0 ? 0 : variance) + eps_);
      for (int64_t c = g * each; c < (g + 1) * each; ++c) {
        const double f = inverse * scale_of(l, 0, c, 1);
        factor[n * x_.channels + c] = static_cast<float>(f);
        shift[n * x_.channels + c] = static_cast<float>(scale_of(l, 1, c, 0) - mean * f);
      }
    }
  }

  void place(const rm_launch& l, int64_t i, const float* factor, const float* shift) const {
    const int64_t n = i / x_.places(), p = i % x_.places();
    const int64_t from = offset(x_, n, p), to = offset(y_, n, p);
    float room[kChannelBlock], made[kChannelBlock];
    for (int64_t c = 0; c < x_.channels; c += kChannelBlock) {
      const int64_t count = std::min(kChannelBlock, x_.channels - c), at = n * x_.channels + c;
      k_.affine(made, channels_at(k_, x_, l.inputs[0], from, c, count, room), factor + at,
                shift + at, silu_, count);
      put_channels(k_, y_, l.outputs[0], to, c, count, made);
    }
  }

  Image x_, y_;
  const ImageKernels& k_;
  View scale_[2];  // weight, bias
  int64_t groups_ = 1, pieces_ = 1;
  double eps_ = 1e-5;
  bool silu_ = false;
};

}  // namespace

std::span<const rm_kernel> group_norm_rows() { return isa_rows<GroupNorm>(); }

}  // namespace rm::cpu
