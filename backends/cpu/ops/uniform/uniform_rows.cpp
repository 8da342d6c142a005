// Rows of uniform: Philox4x32-10 (Salmon et al., SC 2011), four elements a block. An element is a
// function of seed, counter and place alone, so threads may share the work in any way.
#include "ops/uniform/rows.hpp"

#include <array>
#include <cstring>

#include "common/lines.hpp"
#include "common/parallel.hpp"
#include "common/row.hpp"

namespace rm::cpu {
namespace {

using Block = std::array<uint32_t, 4>;

Block philox(Block c, uint64_t seed) {
  auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
    c = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(a)};
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return c;
}

class Uniform {
 public:
  static constexpr const char* kOp = "uniform";
  static constexpr const char* kAlgorithm = "philox";

  static const char* reject(const Problem& p) {
    if (p.input(0).dtype != DType::i64 || p.input(0).numel() != 2) return "no state of two i64";
    const DType y = p.output(0).dtype;
    return y == DType::f32 || y == DType::f64 ? nullptr : "a result that is neither f32 nor f64";
  }
  static double cost_ns(const Problem& p) {
    return 100 + kElementNs * static_cast<double>(p.output(0).numel());
  }

  Uniform(const Problem& p, Isa) {
    View y = p.output(0);
    at_least_one_axis(y);
    state_step_ = p.input(0).step(0);
    n_ = y.dim(-1);
    y_step_ = y.step(-1);
    lines_ = lines_along(y.rank() - 1, y.shape, {y.stride});
    y_bytes_ = dtype_bytes(y.dtype);
    threads_ = thread_limit();
  }
  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    uint64_t seed = 0, counter = 0;
    std::memcpy(&seed, at(l.inputs[0], 0, 8), 8);
    std::memcpy(&counter, at(l.inputs[0], state_step_, 8), 8);
    const double work = kElementNs * static_cast<double>(n_ * lines_.count());
    parallel_ranges(lines_.count(), threads_for(work, lines_.count(), threads_), 1,
                    [&](int64_t begin, int64_t end, int) {
                      for (int64_t i = begin; i < end; ++i) {
                        char* y = at(l.outputs[0], lines_.offset(0, i), y_bytes_);
                        if (y_bytes_ == 4) {
                          fill(reinterpret_cast<float*>(y), i * n_, seed, counter);
                        } else {
                          fill(reinterpret_cast<double*>(y), i * n_, seed, counter);
                        }
                      }
                    });
    return nullptr;
  }

 private:
  static constexpr double kElementNs = 3;

  // 24 bits: every value is a float, and below 1.
  template <class T>
  void fill(T* y, int64_t first, uint64_t seed, uint64_t counter) const {
    Block block{};
    uint64_t held = ~uint64_t{0};
    for (int64_t i = 0; i < n_; ++i) {
      const auto place = static_cast<uint64_t>(first + i);
      if (place / 4 != held) {
        held = place / 4;
        block = philox({static_cast<uint32_t>(held), static_cast<uint32_t>(held >> 32),
                        static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32)},
                       seed);
      }
      y[i * y_step_] = static_cast<T>(block[place % 4] >> 8) * static_cast<T>(0x1p-24);
    }
  }

  int64_t state_step_, n_, y_step_, y_bytes_;
  RowsIndex lines_;
  int threads_;
};

}  // namespace

std::span<const rm_kernel> uniform_rows() { return plain_rows<Uniform>(); }

}  // namespace rm::cpu
