// Convolution as a product on tensor cores: tiles of kM places by kN channels, depth in steps of
// 128 bytes gathered by asynchronous 16-byte copies (zeros outside the image), kStages deep; long
// sums of few tiles are split and added in a fixed order. For channels in whole 16-byte vectors.
// Bound: tensor cores (mma.sync), for few channels memory.
#pragma once

#include "_shim/async_shim.cuh"
#include "conv2d/kernels/conv2d_naive_any.cuh"

namespace rm::cuda_ops {

/// c[16 x 8] += a[16 x 32 bytes] b[32 bytes x 8]; float: tf32.
template <class T>
__device__ __forceinline__ void conv_mma(float (&c)[4], const std::uint32_t (&a)[4],
                                         std::uint32_t b0, std::uint32_t b1) {
  mma_16816<T>(c, a[0], a[1], a[2], a[3], b0, b1);
}
template <>
__device__ __forceinline__ void conv_mma<float>(float (&c)[4], const std::uint32_t (&a)[4],
                                                std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/// Operands of the product: fp32 rounded to tf32, others as they are.
template <class T>
__device__ __forceinline__ void conv_round(std::uint32_t (&r)[4]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm("cvt.rna.tf32.f32 %0, %0;" : "+r"(r[i]));
  }
}

struct ConvRow {
  int n, h, w;
};
__device__ __forceinline__ ConvRow conv_row(int m, const FastDivisor& by_ow,
                                            const FastDivisor& by_oh) {
  const std::uint32_t line = by_ow.quotient(m), n = by_oh.quotient(line);
  return {static_cast<int>(n), static_cast<int>(line - n * by_oh.d),
          static_cast<int>(m - line * by_ow.d)};
}

/// Floats from row to row of a tile of sums: neighbouring rows in other banks.
template <int kN>
inline constexpr int kConvPitch = kN + 8;

template <int kM, int kN, int kStages>
constexpr int conv_gemm_shared() {
  const int stages = kStages * (kM + kN) * 128, result = kM * kConvPitch<kN> * 4;
  return stages > result ? stages : result;
}

/// Stores a block's tile [kM][kConvPitch<kN>] of sums, which lies in shared memory: neighbouring
/// threads store neighbouring elements.
template <class T, int kM, int kN, int kThreads>
__device__ __forceinline__ void conv_store_tile(const ConvGemmArgs& p, const float* result, int m0,
                                                int n0, int g, int split) {
  constexpr int V = kVec<T>, kPitch = kConvPitch<kN>;
  const ConvArgs& c = p.conv;
  const int rows = min(kM, p.rows - m0), columns = min(kN, c.out - n0);
  if (p.splits > 1) {
    const std::int64_t channels = static_cast<std::int64_t>(c.groups) * c.out;
    float* to =
        p.parts + (static_cast<std::int64_t>(split) * p.rows + m0) * channels + g * c.out + n0;
    for (int i = threadIdx.x; i < kM * kN; i += kThreads) {
      const int m = i / kN, n = i % kN;
      if (m < rows && n < columns) to[m * channels + n] = result[m * kPitch + n];
    }
    return;
  }
  const auto store = [&](auto width, int m, int n) {
    constexpr int W = decltype(width)::value;
    const int channel = g * c.out + n0 + n;
    std::int64_t at;
    if (p.flat) {
      at = (m0 + m) * c.y_stride[3] + channel * c.y_stride[1];
    } else {
      const ConvRow r = conv_row(m0 + m, p.by_ow, p.by_oh);
      at = conv_offset(c.y_stride, r.n, channel, r.h, r.w);
    }
    float v[W];
#pragma unroll
    for (int j = 0; j < W; ++j) v[j] = result[m * kPitch + n + j];
    conv_store<T, W>(c, v, at, channel);
  };
  if (p.vectors) {
    constexpr int kAcross = kN / V;  // threads along a row
    static_assert(kThreads % kAcross == 0);
    const int n = static_cast<int>(threadIdx.x) % kAcross * V;
    if (n >= columns) return;
    for (int m = static_cast<int>(threadIdx.x) / kAcross; m < rows; m += kThreads / kAcross) {
      store(std::integral_constant<int, V>{}, m, n);
    }
  } else {
    for (int i = threadIdx.x; i < kM * kN; i += kThreads) {
      const int m = c.channels_last ? i / kN : i % kM, n = c.channels_last ? i % kN : i / kM;
      if (m < rows && n < columns) store(std::integral_constant<int, 1>{}, m, n);
    }
  }
}

template <class T, int kM, int kN, int kWarpM, int kWarpN, int kStages>
__global__ void __launch_bounds__(32 * (kM / kWarpM) * (kN / kWarpN))
    conv2d_gemm(const __grid_constant__ ConvGemmArgs p) {
  constexpr int V = kVec<T>, kDepth = 8 * V;
  constexpr int kThreads = 32 * (kM / kWarpM) * (kN / kWarpN), kRowsAtOnce = kThreads / 8;
  constexpr int kRowsA = kM / kRowsAtOnce, kRowsB = kN / kRowsAtOnce;
  constexpr int kTilesM = kWarpM / 16, kTilesN = kWarpN / 8;
  extern __shared__ __align__(128) unsigned char conv_shared[];
  overlap_begin();
  const ConvArgs& c = p.conv;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = blockIdx.z / p.splits, split = blockIdx.z % p.splits;
  const int m0 = static_cast<int>(blockIdx.x) / p.tiles_n * kM;
  const int n0 = static_cast<int>(blockIdx.x) % p.tiles_n * kN;
  const int chunk = threadIdx.x % 8, row0 = threadIdx.x / 8;

  // this thread's rows of the gathered operand, and its place along the depth
  const T* from[kRowsA];
  int row_h[kRowsA], row_w[kRowsA];
#pragma unroll
  for (int i = 0; i < kRowsA; ++i) {
    const int m = m0 + row0 + i * kRowsAtOnce;
    const ConvRow r = conv_row(m < p.rows ? m : 0, p.by_ow, p.by_oh);
    from[i] = static_cast<const T*>(p.x) + r.n * p.x_stride[0] + g * p.padded;
    row_h[i] = m < p.rows ? r.h * c.map.mul[0] + c.map.off[0] : -(1 << 30);
    row_w[i] = r.w * c.map.mul[1] + c.map.off[1];
  }
  const T* weights =
      static_cast<const T*>(p.w) + (static_cast<std::int64_t>(g) * c.out + n0) * p.w_stride[0];
  const int first = split * p.steps_per_split, last = min(p.steps, first + p.steps_per_split);
  const int depth0 = first * kDepth + chunk * V;
  int tap = depth0 / p.padded, channel = depth0 - tap * p.padded, kh = tap / c.kw,
      kw = tap - kh * c.kw;
  const std::uint32_t shared = shared_address(conv_shared);

  const auto load = [&](int stage) {
    const std::uint32_t to = shared + stage * (kM + kN) * 128;
    const bool inside = kh < c.kh;
    const ConvMap& map = c.map;
#pragma unroll
    for (int i = 0; i < kRowsA; ++i) {
      const int row = row0 + i * kRowsAtOnce;
      int h = row_h[i] + kh * map.step[0], w = row_w[i] + kw * map.step[1];
      bool valid = inside && h >= 0 && w >= 0;
      if (map.div[0] != 1 || map.div[1] != 1) {
        const int qh = h / map.div[0], qw = w / map.div[1];
        valid = valid && qh * map.div[0] == h && qw * map.div[1] == w;
        h = qh, w = qw;
      }
      valid = valid && h < c.h && w < c.wd;
      const T* src = valid ? from[i] + h * p.x_stride[1] + w * p.x_stride[2] + channel : from[i];
      copy_16_async(to + row * 128 + ((chunk ^ (row & 7)) * 16), src, valid);
    }
    const T* tap_weights = weights + kh * p.w_stride[1] + kw * p.w_stride[2] + channel;
#pragma unroll
    for (int i = 0; i < kRowsB; ++i) {
      const int row = row0 + i * kRowsAtOnce;
      const bool valid = inside && n0 + row < c.out;
      const T* src = valid ? tap_weights + row * p.w_stride[0] : static_cast<const T*>(p.w);
      copy_16_async(to + (kM + row) * 128 + ((chunk ^ (row & 7)) * 16), src, valid);
    }
    channel += kDepth;
    while (channel >= p.padded) {
      channel -= p.padded;
      if (++kw == c.kw) kw = 0, ++kh;
    }
  };

  float acc[kTilesM][kTilesN][4] = {};
  const int warp_m = warp % (kM / kWarpM) * kWarpM, warp_n = warp / (kM / kWarpM) * kWarpN;
  // rows and chunks that this lane names to ldmatrix
  const int a_row = warp_m + lane % 16, a_chunk = lane / 16;
  const int b_row = warp_n + lane / 16 * 8 + lane % 8, b_chunk = lane / 8 % 2;

#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (first + s < last) load(s);
    copy_group_end();
  }
  for (int step = first; step < last; ++step) {
    copy_groups_wait<kStages - 2>();
    __syncthreads();
    if (step + kStages - 1 < last) load((step - first + kStages - 1) % kStages);
    copy_group_end();
    const std::uint32_t at = shared + (step - first) % kStages * (kM + kN) * 128;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      std::uint32_t a[kTilesM][4], b[kTilesN / 2][4];
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
        const int row = a_row + i * 16;
        load_matrix_x4(a[i], at + row * 128 + (((2 * k + a_chunk) ^ (row & 7)) * 16));
        conv_round<T>(a[i]);
      }
#pragma unroll
      for (int j = 0; j < kTilesN / 2; ++j) {
        const int row = b_row + j * 16;
        load_matrix_x4(b[j], at + (kM + row) * 128 + (((2 * k + b_chunk) ^ (row & 7)) * 16));
        conv_round<T>(b[j]);
      }
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) {
          conv_mma<T>(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
  copy_groups_wait<0>();
  __syncthreads();

  float* result = reinterpret_cast<float*>(conv_shared);
  constexpr int kPitch = kConvPitch<kN>;
#pragma unroll
  for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
      float* to = result + (warp_m + i * 16 + lane / 4) * kPitch + warp_n + j * 8 + lane % 4 * 2;
      to[0] = acc[i][j][0], to[1] = acc[i][j][1];
      to[8 * kPitch] = acc[i][j][2], to[8 * kPitch + 1] = acc[i][j][3];
    }
  }
  __syncthreads();
  conv_store_tile<T, kM, kN, kThreads>(p, result, m0, n0, g, split);
}

/// Adds the parts of a split product and finishes, kV channels a thread.
template <class T, int kV>
__global__ void __launch_bounds__(256) conv2d_gemm_finish(const __grid_constant__ ConvGemmArgs p) {
  overlap_begin();
  const ConvArgs& c = p.conv;
  const int channels = c.groups * c.out, across = channels / kV;
  const std::int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= static_cast<std::int64_t>(p.rows) * across) return;
  // neighbouring threads store to neighbouring addresses
  const bool wide = kV > 1 || c.channels_last;
  const int m = static_cast<int>(wide ? i / across : i % p.rows);
  const int n = static_cast<int>(wide ? i % across : i / p.rows) * kV;
  float v[kV] = {};
  for (int s = 0; s < p.splits; ++s) {
    const float* from = p.parts + (static_cast<std::int64_t>(s) * p.rows + m) * channels + n;
#pragma unroll
    for (int j = 0; j < kV; ++j) v[j] += from[j];
  }
  const ConvRow r = conv_row(m, p.by_ow, p.by_oh);
  conv_store<T, kV>(c, v, conv_offset(c.y_stride, r.n, n, r.h, r.w), n);
}

}  // namespace rm::cuda_ops
