// One panel of a step. The sums of a tile of rows lie in registers; each element of the state is
// broadcast against the weights of all gates. Few rows take several sums a gate, so that the
// processor always has eight of them to go on with.
#include "ops/recurrent/kernels.hpp"

#include "common/vec_math.hpp"

namespace rm::cpu::recurrent::RM_ISA {
namespace {

using namespace rm::cpu::RM_ISA;

constexpr int kRows = RM_ISA_LEVEL >= 2 ? 4 : 2;
constexpr int kSums = 8;  // independent chains of multiply-adds that hide their latency

template <class T>
void pack(const PackArgs& a) {
  const auto* src = static_cast<const T*>(a.src);
  const int64_t panel = a.depth * a.gates * kWidth;
  for (int64_t p = a.begin; p < a.end; ++p) {
    T* dst = static_cast<T*>(a.dst) + p * panel;
    for (int64_t k = 0; k < a.depth; ++k) {
      for (int64_t g = 0; g < a.gates; ++g) {
        for (int64_t i = 0; i < kWidth; ++i) {
          const int64_t unit = p * kWidth + i;
          *dst++ = unit < a.units ? src[(g * a.units + unit) * a.row + k * a.col] : T{};
        }
      }
    }
  }
}

/// sums[g][r] += the product of the panel and the states of kTile rows.
template <class T, int kGates, int kTile>
RM_INLINE void multiply(const StepArgs& a, const float* h, vf (&sums)[kGates][kTile]) {
  constexpr int kAgain = kGates * kTile >= kSums ? 1 : kSums / (kGates * kTile);
  const auto* w = static_cast<const T*>(a.panel);
  vf parts[kAgain][kGates][kTile];
  for (int u = 0; u < kAgain; ++u) {
    for (int g = 0; g < kGates; ++g) {
      for (int r = 0; r < kTile; ++r) parts[u][g][r] = u == 0 ? sums[g][r] : vf{};
    }
  }
  int64_t k = 0;
  for (; k + kAgain <= a.depth; k += kAgain, w += kAgain * kGates * kWidth) {
    for (int u = 0; u < kAgain; ++u) {
      for (int g = 0; g < kGates; ++g) {
        const vf weight = vload(w + (u * kGates + g) * kWidth);
        for (int r = 0; r < kTile; ++r) parts[u][g][r] += weight * vset(h[r * a.ld_h + k + u]);
      }
    }
  }
  for (; k < a.depth; ++k, w += kGates * kWidth) {
    for (int g = 0; g < kGates; ++g) {
      const vf weight = vload(w + g * kWidth);
      for (int r = 0; r < kTile; ++r) parts[0][g][r] += weight * vset(h[r * a.ld_h + k]);
    }
  }
  for (int g = 0; g < kGates; ++g) {
    for (int r = 0; r < kTile; ++r) {
      sums[g][r] = parts[0][g][r];
      for (int u = 1; u < kAgain; ++u) sums[g][r] += parts[u][g][r];
    }
  }
}

template <class T>
RM_INLINE vf load(const T* p, int64_t n) {
  return n == kWidth ? vload(p) : vload_part(p, n);
}

template <class T, Cell kCell, int kTile>
void tile(const StepArgs& a, int64_t row) {
  constexpr int kGates = static_cast<int>(gates_of(kCell));
  const auto* x = static_cast<const T*>(a.x);
  vf sums[kGates][kTile];
  for (int g = 0; g < kGates; ++g) {
    for (int r = 0; r < kTile; ++r) {
      if constexpr (kCell == Cell::project) {
        sums[g][r] = vf{};
      } else {
        sums[g][r] = vload(a.bias + g * a.ld_c);
        // The last gate of a gru multiplies its product before the input is added.
        if (kCell == Cell::gru && g == 2) continue;
        sums[g][r] += load(x + (row + r) * a.x_row + g * a.hidden, a.units);
      }
    }
  }
  multiply<T, kGates, kTile>(a, a.h + row * a.ld_h, sums);
  for (int r = 0; r < kTile; ++r) {
    vf made;
    if constexpr (kCell == Cell::lstm) {
      float* c = a.c + (row + r) * a.ld_c;
      const vf cell = vsigmoid(sums[1][r]) * vload(c) + vsigmoid(sums[0][r]) * vtanh(sums[2][r]);
      vstore(c, cell);
      made = vsigmoid(sums[3][r]) * vtanh(cell);
    } else if constexpr (kCell == Cell::gru) {
      const vf input = load(x + (row + r) * a.x_row + 2 * a.hidden, a.units);
      const vf n = vtanh(input + vsigmoid(sums[0][r]) * sums[2][r]);
      made = n + vsigmoid(sums[1][r]) * (vload(a.h + (row + r) * a.ld_h + a.first) - n);
    } else if constexpr (kCell == Cell::tanh) {
      made = vtanh(sums[0][r]);
    } else if constexpr (kCell == Cell::relu) {
      made = sums[0][r] < 0.0f ? vf{} : sums[0][r];  // NaN stays
    } else {
      made = sums[0][r];
    }
    vstore(a.made + (row + r) * a.ld_made, made);
    if (a.y == nullptr) continue;
    T* y = static_cast<T*>(a.y) + (row + r) * a.y_row;
    if (a.units == kWidth) {
      vstore(y, made);
    } else {
      vstore_part(y, made, a.units);
    }
  }
}

template <class T, Cell kCell>
void step(const StepArgs& a) {
  int64_t row = 0;
  for (; row + kRows <= a.rows; row += kRows) tile<T, kCell, kRows>(a, row);
  switch (a.rows - row) {
    case 1:
      return tile<T, kCell, 1>(a, row);
    case 2:
      return tile<T, kCell, kRows < 2 ? 1 : 2>(a, row);
    case 3:
      return tile<T, kCell, kRows < 3 ? 1 : 3>(a, row);
    default:
      return;
  }
}

}  // namespace

#define RM_STEPS(T)                                                                       \
  {step<T, Cell::lstm>, step<T, Cell::gru>, step<T, Cell::tanh>, step<T, Cell::relu>, \
   step<T, Cell::project>}
extern const KernelSet recurrent_kernels;
const KernelSet recurrent_kernels = {kWidth,
                                     kRows,
                                     {pack<float>, pack<bf16>, pack<f16>},
                                     {RM_STEPS(float), RM_STEPS(bf16), RM_STEPS(f16)}};

}  // namespace rm::cpu::recurrent::RM_ISA
