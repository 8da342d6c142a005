// Products of few rows with a weight as it lies in memory ([N, K], K dense), for one ISA.
//
// Bound by reading the weight once. 16-bit weights are widened in registers: bf16 comes apart into
// even and odd elements with a shift and a mask, so x is stored in that order.
#include "ops/gemm/direct_kernels.hpp"
#include "ops/gemm/simd.hpp"

namespace rm::cpu::gemm::RM_ISA {
namespace {

template <int T>
struct Weight;

/// load(): two vectors of consecutive elements of a row; x goes through the same load, so any order
/// will do. kAhead: prefetch distance in bytes, 0 where the hardware's own is as good (measured).
template <>
struct Weight<kF32> {
  using Scalar = float;
  static constexpr int kAhead = 0;
  static RM_INLINE void load(const float* p, Vec* v) {
    v[0] = F32::load(p);
    v[1] = F32::load(p + kLanes);
  }
};
template <>
struct Weight<kBF16> {
  using Scalar = uint16_t;
  static constexpr int kAhead = 1024;
  static RM_INLINE void load(const uint16_t* p, Vec* v) {
    const Bits both = *reinterpret_cast<const BitsMem*>(p);
    v[0] = (Vec)(both << 16);
    v[1] = (Vec)(both & 0xffff0000);
  }
};
template <>
struct Weight<kF16> {
  using Scalar = uint16_t;
  static constexpr int kAhead = 1024;
  static RM_INLINE void load(const uint16_t* p, Vec* v) {
    v[0] = F16::load(p);
    v[1] = F16::load(p + kLanes);
  }
};

constexpr int kBlock = 2 * kLanes;  // elements of a load()

RM_INLINE float sum_lanes(Vec v) {
  float lanes[kLanes];
  F32::store(lanes, v);
#pragma GCC unroll 4
  for (int w = kLanes / 2; w >= 1; w /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < w; ++i) lanes[i] += lanes[i + w];
  }
  return lanes[0];
}

/// One block of k: R rows times M rows of x.
template <int R, int M>
RM_INLINE void add_products(Vec (&sum)[R][M], const Vec (&v)[R][2], const float* x, int64_t ldx) {
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const Vec xi = F32::load(x + i * ldx + h * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r][i] += v[r][h] * xi;
    }
  }
}

/// R rows times M rows of x.
template <int T, int R, int M>
RM_INLINE void dot_tile(const float* x, int64_t ldx, const typename Weight<T>::Scalar* const* w,
                        int64_t k, float* const* acc, int64_t acc_step) {
  using W = Weight<T>;
  Vec sum[R][M];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) sum[r][i] = Vec{};
  }
  int64_t at = 0;
  for (; at + kBlock <= k; at += kBlock) {
    Vec v[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      if constexpr (W::kAhead != 0) {
        __builtin_prefetch(reinterpret_cast<const char*>(w[r] + at) + W::kAhead, 0, 3);
      }
      W::load(w[r] + at, v[r]);
    }
    add_products<R, M>(sum, v, x + at, ldx);
  }
  if (at < k) {
    Vec v[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      typename W::Scalar rest[kBlock] = {};
      __builtin_memcpy(rest, w[r] + at, static_cast<size_t>(k - at) * sizeof(*rest));
      W::load(rest, v[r]);
    }
    add_products<R, M>(sum, v, x + at, ldx);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) acc[r][i * acc_step] = sum_lanes(sum[r][i]);
  }
}

#if defined(__AVX512F__)
constexpr int kMostTile = 6;
/// Rows of the weight a tile of m rows of x takes: the sums must fit the registers.
constexpr int rows_at_once(int) { return 4; }
#else
constexpr int kMostTile = 4;
constexpr int rows_at_once(int m) { return m <= 2 ? 4 : 2; }
#endif
static_assert(kStreams == 4);
constexpr int64_t kNearBytes = 128 << 10;

template <int T, int M>
RM_INLINE void dot_streams(const DotArgs& a, int64_t i0, int64_t j) {
  using S = typename Weight<T>::Scalar;
  constexpr int R = rows_at_once(M);
#pragma GCC unroll 2
  for (int s = 0; s < kStreams; s += R) {
    const S* w[R];
    float* acc[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      w[r] = reinterpret_cast<const S*>(a.w[s + r] + j * a.row_bytes);
      acc[r] = a.acc[s + r] + i0 * a.acc_step + j;
    }
    dot_tile<T, R, M>(a.x + i0 * a.ldx, a.ldx, w, a.k, acc, a.acc_step);
  }
}

template <int T, int M>
RM_INLINE void dot_rest(const DotArgs& a, int64_t i0, int64_t m, int64_t j) {
  if constexpr (M > 0) {
    if (m == M) return dot_streams<T, M>(a, i0, j);
    dot_rest<T, M - 1>(a, i0, m, j);
  }
}

template <int T>
void dot(const DotArgs& a) {
  const int64_t tiles = (a.m + kMostTile - 1) / kMostTile;
  // Rows that a second tile of x finds in the second-level cache.
  const int64_t fit = kNearBytes / (kStreams * a.row_bytes + 1);
  const int64_t block = tiles == 1 ? a.count : fit < 1 ? 1 : fit;
  for (int64_t j0 = 0; j0 < a.count; j0 += block) {
    const int64_t j1 = j0 + block < a.count ? j0 + block : a.count;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t i0 = a.m * t / tiles, m = a.m * (t + 1) / tiles - i0;
      for (int64_t j = j0; j < j1; ++j) dot_rest<T, kMostTile>(a, i0, m, j);
    }
  }
}

template <int T>
void spread(const SpreadArgs& a) {
  using W = Weight<T>;
  using S = typename W::Scalar;
  for (int64_t i = 0; i < a.m; ++i) {
    const S* src = static_cast<const S*>(a.src) + i * a.row_stride;
    float* dst = a.dst + i * a.ldx;
    for (int64_t k = 0; k < a.k; k += kBlock) {
      const int64_t count = a.k - k < kBlock ? a.k - k : kBlock;
      S block[kBlock] = {};
      if (a.col_stride == 1) {
        __builtin_memcpy(block, src + k, static_cast<size_t>(count) * sizeof(S));
      } else {
        for (int64_t j = 0; j < count; ++j) block[j] = src[(k + j) * a.col_stride];
      }
      Vec v[2];
      W::load(block, v);
      F32::store(dst + k, v[0]);
      F32::store(dst + k + kLanes, v[1]);
    }
  }
}

constexpr DirectSet make_direct_set() {
  DirectSet set{};
  set.dot[kF32] = dot<kF32>;
  set.dot[kBF16] = dot<kBF16>;
  set.dot[kF16] = dot<kF16>;
  set.spread[kF32] = spread<kF32>;
  set.spread[kBF16] = spread<kBF16>;
  set.spread[kF16] = spread<kF16>;
  return set;
}

}  // namespace

extern constinit const DirectSet direct_kernels = make_direct_set();

}  // namespace rm::cpu::gemm::RM_ISA
