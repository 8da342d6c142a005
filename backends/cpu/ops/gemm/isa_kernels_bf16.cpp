// The bf16 gemm kernels for AVX512-BF16: pairs of k in one instruction, a stays bf16.
#include <immintrin.h>

#include "ops/gemm/epilogue.hpp"
#include "ops/gemm/transpose.hpp"

namespace rm::cpu::gemm::RM_ISA {
namespace {

constexpr int kMr = 14;
constexpr int wide_panels(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

RM_INLINE vf dot_pairs(vf acc, __m512i a, __m512i b) {
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}

template <int MR, int NP>
void tile(const TileArgs& args) {
  vf acc[MR][NP][2];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) {
      const float* src = args.acc + p * args.acc_panel + i * kNr;
      acc[i][p][0] = args.accumulate ? F32::load(src) : vf{};
      acc[i][p][1] = args.accumulate ? F32::load(src + kWidth) : vf{};
    }
  }
  const uint16_t* a = static_cast<const uint16_t*>(args.a);
  const int64_t lda = args.lda;
  const char* b = static_cast<const char*>(args.b);
  const char* ahead = args.ahead;
#pragma GCC unroll 4
  for (int64_t k = 0; k < args.steps; ++k) {
    __builtin_prefetch(ahead, 0, 2);
    ahead += args.ahead_step;
    __m512i lo[NP], hi[NP];
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) {
      const char* row = b + p * args.b_panel_bytes + k * (kNr * 4);
      lo[p] = _mm512_loadu_si512(row);
      hi[p] = _mm512_loadu_si512(row + 64);
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      int32_t pair;
      __builtin_memcpy(&pair, a + i * lda + 2 * k, 4);
      const __m512i x = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int p = 0; p < NP; ++p) {
        acc[i][p][0] = dot_pairs(acc[i][p][0], x, lo[p]);
        acc[i][p][1] = dot_pairs(acc[i][p][1], x, hi[p]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) {
      float* dst = args.acc + p * args.acc_panel + i * kNr;
      F32::store(dst, acc[i][p][0]);
      F32::store(dst + kWidth, acc[i][p][1]);
    }
  }
}

/// A full panel of a source that is dense along k; returns how many values of k it did.
int64_t pack_squares(const PackArgs& args, const uint16_t* src, uint16_t* dst) {
  int64_t k = 0;
  for (; k + 2 * kWidth <= args.k; k += 2 * kWidth) {
    for (int half = 0; half < 2; ++half) {
      vu square[kWidth];
      load_square(src + half * kWidth * args.ns + k, args.ns, square);
      transpose(square);
      for (int i = 0; i < kWidth; ++i) {
        uint16_t* row = dst + (k / 2 + i) * 2 * kNr + half * 2 * kWidth;
        store_bits(row, square[i]);
      }
    }
  }
  return k;
}

void pack(const PackArgs& args) {
  const int64_t steps = (args.k + 1) / 2;
  for (int64_t panel = args.panel_begin; panel < args.panel_end; ++panel) {
    uint16_t* dst = static_cast<uint16_t*>(args.dst) + (panel - args.panel_begin) * steps * 2 * kNr;
    const int64_t n0 = panel * kNr;
    const int cols = static_cast<int>(args.n - n0 < kNr ? args.n - n0 : kNr);
    const uint16_t* src = static_cast<const uint16_t*>(args.src) + n0 * args.ns;
    if (cols < kNr || args.k % 2 != 0) {
      __builtin_memset(dst, 0, static_cast<size_t>(steps) * 2 * kNr * sizeof(uint16_t));
    }
    const int64_t done = args.ks == 1 && cols == kNr ? pack_squares(args, src, dst) : 0;
    // Blocks of k keep the rows of a transposed source in the first-level cache.
    for (int64_t k0 = done; k0 < args.k; k0 += 32) {
      const int64_t k1 = k0 + 32 < args.k ? k0 + 32 : args.k;
      for (int j = 0; j < cols; ++j) {
        for (int64_t k = k0; k < k1; ++k) {
          dst[(k / 2 * kNr + j) * 2 + k % 2] = src[k * args.ks + j * args.ns];
        }
      }
    }
  }
}

void copy_rows(const WidenArgs& args) {
  for (int64_t i = 0; i < args.rows; ++i) {
    const uint16_t* src = static_cast<const uint16_t*>(args.src) + i * args.row_stride;
    uint16_t* dst = static_cast<uint16_t*>(args.dst) + i * args.dst_stride;
    if (args.col_stride == 1) {
      __builtin_memcpy(dst, src, static_cast<size_t>(args.cols) * sizeof(uint16_t));
    } else {
      for (int64_t k = 0; k < args.cols; ++k) dst[k] = src[k * args.col_stride];
    }
    if (args.cols % 2 != 0) dst[args.cols] = 0;
  }
}

template <int MR>
constexpr void fill_tiles(KernelSet& set) {
  set.tile[kBF16][MR - 1][0] = tile<MR, 1>;
  set.tile[kBF16][MR - 1][1] = tile<MR, wide_panels(MR)>;
  set.wide[MR - 1] = wide_panels(MR);
  if constexpr (MR > 1) fill_tiles<MR - 1>(set);
}

constexpr KernelSet make_kernel_set() {
  KernelSet set{};
  set.mr = kMr;
  set.nr = kNr;
  set.block_bytes = 24 << 10;
  set.sums_bytes = 160 << 10;
  set.step = 2;
  set.a_element_bytes = 2;
  set.layout[kBF16] = "packed-bf16-n32-k2";
  set.panel_element_bytes[kBF16] = 2;
  fill_tiles<kMr>(set);
  fill_stores<BF16, kActivations - 1>(set.store[kBF16]);
  set.pack[kBF16] = pack;
  set.widen[kBF16] = copy_rows;
  return set;
}

}  // namespace

// constinit: nothing of this file may run before the instruction set has been checked.
extern constinit const KernelSet gemm_kernels = make_kernel_set();

}  // namespace rm::cpu::gemm::RM_ISA
