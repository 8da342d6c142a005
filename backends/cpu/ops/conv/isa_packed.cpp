// The end of a packed convolution's tiles, whose products are gemm's (ops/gemm/isa_kernels.cpp), and
// whole products where sums need not leave the registers in between.
#include "common/row_pointers.hpp"
#include "ops/conv/activation.hpp"
#include "ops/conv/packed_kernels.hpp"

namespace rm::cpu::conv::RM_ISA {
namespace {

constexpr int kNr = 2 * kWidth;  // gemm::KernelSet::nr

template <int kActivation>
void store(const PanelStore& s) {
  for (int64_t i = 0; i < s.rows; ++i) {
    const float* acc = s.acc + i * kNr;
    const float* residual = s.residual ? s.residual + i * s.residual_stride : nullptr;
    float* y = s.y + i * s.y_stride;
    for (int64_t c = 0; c < s.channels; c += kWidth) {
      vf v = vload(acc + c);
      if (c + kWidth <= s.channels) {
        if (s.bias) v += vload(s.bias + c);
        if (residual) v += vload(residual + c);
        vstore(y + c, activate(kActivation, v));
      } else {
        const int64_t rest = s.channels - c;
        if (s.bias) v += vload_part(s.bias + c, rest);
        if (residual) v += vload_part(residual + c, rest);
        vstore_part(y + c, activate(kActivation, v), rest);
      }
    }
  }
}

#if RM_ISA_LEVEL >= 2
constexpr int kMr = 14;
#elif RM_ISA_LEVEL == 1
constexpr int kMr = 6;
#else
constexpr int kMr = 4;
#endif

/// The end of a full panel whose activation is a floor.
template <int kRows>
RM_INLINE void finish_plain(const Strip& s, int64_t channel, const vf (&sum)[kRows][2]) {
  const vf floor = vset(s.floor);
#pragma GCC unroll 14
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const int64_t c = channel + v * kWidth;
      vf out = sum[i][v];
      if (s.bias) out += vload(s.bias + c);
      if (s.residual) out += vload(s.residual + i * s.residual_stride + c);
      vstore(s.y + i * s.y_stride + c, out < floor ? vf{} : out);
    }
  }
}

template <int kRows>
RM_INLINE void finish_any(const Strip& s, int64_t channel, const vf (&sum)[kRows][2]) {
  float sums[kRows * kNr];
  for (int i = 0; i < kRows; ++i) {
    vstore(sums + i * kNr, sum[i][0]);
    vstore(sums + i * kNr + kWidth, sum[i][1]);
  }
  const int64_t left = s.channels - channel;
  s.store({sums, kRows, left < kNr ? left : kNr, s.bias ? s.bias + channel : nullptr,
           s.residual ? s.residual + channel : nullptr, s.residual_stride, s.y + channel,
           s.y_stride});
}

/// Step `k` behind where x and the panel stand.
template <int kRows>
RM_INLINE void multiply_add(const RowPointers<kRows>& x, const float* w, int k, vf (&sum)[kRows][2]) {
  const vf low = vload(w + k * kNr), high = vload(w + k * kNr + kWidth);
#pragma GCC unroll 14
  for (int i = 0; i < kRows; ++i) {
    const vf by = vset(x.get(i, k));
    sum[i][0] += by * low;
    sum[i][1] += by * high;
  }
}

template <int kRows>
void strip(const Strip& s) {
  const float* w = s.panels;
  const char* ahead = s.ahead;
  for (int64_t panel = 0; panel < s.num_panels; ++panel) {
    const int64_t channel = panel * kNr;
    if (s.residual) {  // comes in while the products are made
      for (int i = 0; i < kRows; ++i) {
        for (int v = 0; v < kNr; v += 16) {
          __builtin_prefetch(s.residual + i * s.residual_stride + channel + v);
        }
      }
    }
    vf sum[kRows][2];
#pragma GCC unroll 14
    for (int i = 0; i < kRows; ++i) sum[i][0] = sum[i][1] = vf{};
    RowPointers<kRows> x(s.x, s.x_stride);
    int64_t k = 0;
    for (; k + 2 <= s.steps; k += 2, w += 2 * kNr) {
      __builtin_prefetch(ahead, 0, 2);
      __builtin_prefetch(ahead + s.ahead_step, 0, 2);
      ahead += 2 * s.ahead_step;
      multiply_add(x, w, 0, sum);
      multiply_add(x, w, 1, sum);
      x.advance(2);
    }
    if (k < s.steps) {
      multiply_add(x, w, 0, sum);
      w += kNr;
      ahead += s.ahead_step;
    }
    if (s.plain && channel + kNr <= s.channels) {
      finish_plain(s, channel, sum);
    } else {
      finish_any(s, channel, sum);
    }
  }
}

template <int kRows>
constexpr void fill_strips(PackedSet& set) {
  set.strip[kRows - 1] = strip<kRows>;
  if constexpr (kRows > 1) fill_strips<kRows - 1>(set);
}

constexpr PackedSet make_packed_set() {
  PackedSet set = {{store<0>, store<1>, store<2>, store<3>, store<4>, store<5>, store<6>, store<7>},
                   {}};
  fill_strips<kMr>(set);
  return set;
}

}  // namespace

// constinit: nothing of this file may run before the instruction set has been checked.
extern constinit const PackedSet packed_set = make_packed_set();

}  // namespace rm::cpu::conv::RM_ISA
