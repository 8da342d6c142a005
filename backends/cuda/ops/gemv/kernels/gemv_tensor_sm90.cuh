// One row of 16-bit x: the tensor cores multiply, so a weight costs less than an instruction. A
// product's 16 x 16 operand is two rows of w in eight segments each, its 8 columns are x in the
// same segments; only where the segments agree is the result of use. So every lane reads 16 bytes
// of both rows and of x, all of them beside its neighbour's. int8 and int4: a nibble becomes base +
// nibble by one LOP3 (base 128 in bf16, 64 in fp16), the sums start at -base * sum of x, and a
// group's scale multiplies the group's sum. int8 is two nibbles. Where x holds NaN or Inf that
// would not be right: a plain loop does such calls. Every warp owns a stage; none waits for
// another's.
#pragma once

#include "gemv/kernels/gemv_naive_any.cuh"
#include "gemv/kernels/gemv_ring_sm90.cuh"
#include "gemv/kernels/gemv_unpack_sm90.cuh"

namespace rm::cuda_ops {

/// 16-byte vectors of x that meet 16 bytes of w.
template <int kBits>
inline constexpr int kGemvPlanes = kBits == 0 ? 1 : 16 / kBits;

/// Warps of a block: unpacking wants registers.
__host__ __device__ constexpr int gemv_tensor_warps(int bits) {
  return bits == 0 ? kGemvMaxWarps : 16;
}

/// What is added to a nibble when it becomes a T.
template <class T>
inline constexpr float kNibbleBase = std::is_same_v<T, __half> ? 64.0f : 128.0f;

/// Nibbles j and j + 4 of a word as two T, the base added; kFlip: of signed nibbles, 8 more. One
/// instruction after the shift; without the asm the compiler takes two.
template <class T, int kJ, bool kFlip>
__device__ __forceinline__ std::uint32_t nibble_pair(std::uint32_t w) {
  constexpr bool kHalf = std::is_same_v<T, __half>;  // 64's mantissa bits 4 .. 7 are worth 1 .. 8
  constexpr std::uint32_t kMask = kHalf ? 0x00f000f0u : 0x000f000fu;
  constexpr std::uint32_t kBase =
      (kHalf ? 0x54005400u : 0x43004300u) + (kFlip ? kHalf ? 0x00800080u : 0x00080008u : 0u);
  const std::uint32_t v = !kHalf ? w >> (4 * kJ) : kJ == 0 ? w << 4 : w >> (4 * kJ - 4);
  std::uint32_t out;
  if constexpr (kFlip) {
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(out) : "r"(v), "r"(kMask), "r"(kBase));
  } else {
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(v), "r"(kMask), "r"(kBase));
  }
  return out;
}

__device__ __forceinline__ uint4 shared_16(const unsigned char* at) {
  return *reinterpret_cast<const uint4*>(at);
}
__device__ __forceinline__ std::uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/// x in shared memory: a plane of 16-byte vectors for each of the vectors that meet 16 bytes of w,
/// zeros behind K; and the sums of x over each segment of a step, negative and times the base.
/// True where some x is not finite.
template <class T, int kBits>
__device__ __forceinline__ bool gemv_tensor_x(const GemvArgs& p, unsigned char* to, float* sums) {
  constexpr int kPlanes = kGemvPlanes<kBits>, kGroup = 4 * kPlanes;  // vectors of a segment
  const int all = p.steps * 8 * kGroup, vectors = p.k / 8;
  bool bad = false;
  const auto* x = static_cast<const uint4*>(p.x);
#pragma unroll 2
  for (int i = threadIdx.x; i - static_cast<int>(threadIdx.x % 32) < all; i += blockDim.x) {
    uint4 v = i < vectors ? x[i] : uint4{0, 0, 0, 0};
    if constexpr (kBits == 0) {
      if (i < all) *reinterpret_cast<uint4*>(to + i * 16) = v;
      continue;
    }
    Pack<T, 8> values;
    memcpy(&values, &v, 16);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += to_float(values.v[j]);
#pragma unroll
    for (int k = 1; k < kGroup; k <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, k);
    bad |= !(fabsf(sum) < INFINITY);
    if constexpr (kBits == 4) {
      v = uint4{__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632),
                __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632)};
    } else {
      v = uint4{__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632)};
    }
    if (i >= all) continue;
    const int unit = i / kPlanes, plane = i % kPlanes, step = unit / 32;
    *reinterpret_cast<uint4*>(to + ((step * kPlanes + plane) * 32 + unit % 32) * 16) = v;
    if (i % kGroup == 0) {
      constexpr float kFrom = -(kBits == 4 ? kNibbleBase<T> + 8.0f : kNibbleBase<T>);
      sums[unit / 4] = kFrom * sum;
    }
  }
  return bad;
}

/// Adds the products of 16 bytes of two rows to c.
template <class T>
__device__ __forceinline__ void gemv_dense_16(float (&c)[2][4], const uint4& a, const uint4& b,
                                              const uint4& x) {
  mma_16816<T>(c[0], a.x, b.x, a.y, b.y, x.x, x.y);
  mma_16816<T>(c[1], a.z, b.z, a.w, b.w, x.z, x.w);
}

/// The same for quantised weights and several pairs of rows. int4: 32 values a row and four vectors
/// of x, one sum; int8: 16 and two, low nibbles in the first sum, high ones in the second. The
/// pairs take turns: a product waits for the one before in its sum.
template <class T, int kBits, int kPairs>
__device__ __forceinline__ void gemv_nibbles_16(float (&c)[kPairs][kBits == 4 ? 1 : 2][4],
                                                const uint4 (&a)[kPairs], const uint4 (&b)[kPairs],
                                                const uint4 (&x)[kGemvPlanes<kBits>]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int r = 0; r < kPairs; ++r) {
      const std::uint32_t u = word_of(a[r], i), v = word_of(b[r], i);
      if constexpr (kBits == 4) {
        mma_16816<T>(c[r][0], nibble_pair<T, 0, false>(u), nibble_pair<T, 0, false>(v),
                     nibble_pair<T, 1, false>(u), nibble_pair<T, 1, false>(v), x[i].x, x[i].y);
      } else {
        mma_16816<T>(c[r][0], nibble_pair<T, 0, false>(u), nibble_pair<T, 0, false>(v),
                     nibble_pair<T, 2, false>(u), nibble_pair<T, 2, false>(v),
                     word_of(x[i / 2], i % 2 * 2), word_of(x[i / 2], i % 2 * 2 + 1));
      }
    }
#pragma unroll
    for (int r = 0; r < kPairs; ++r) {
      const std::uint32_t u = word_of(a[r], i), v = word_of(b[r], i);
      if constexpr (kBits == 4) {
        mma_16816<T>(c[r][0], nibble_pair<T, 2, false>(u), nibble_pair<T, 2, false>(v),
                     nibble_pair<T, 3, false>(u), nibble_pair<T, 3, false>(v), x[i].z, x[i].w);
      } else {
        mma_16816<T>(c[r][1], nibble_pair<T, 1, true>(u), nibble_pair<T, 1, true>(v),
                     nibble_pair<T, 3, true>(u), nibble_pair<T, 3, true>(v),
                     word_of(x[i / 2], i % 2 * 2), word_of(x[i / 2], i % 2 * 2 + 1));
      }
    }
  }
}

/// Sums of one warp: kPairs pairs of rows.
template <class T, int kBits, int kPairs>
struct GemvPairSums {
  static constexpr int kChains = kBits == 0 ? 2 : 1;
  float sum[kPairs][kChains][4];
  __device__ void clear() {
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
#pragma unroll
      for (int i = 0; i < 4 * kChains; ++i) sum[p][i / 4][i % 4] = 0.0f;
    }
  }
  /// [row of the tile][segment]
  __device__ __forceinline__ void store(float* to) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if (g / 2 != t) return;
    const bool odd = g % 2 != 0;  // columns 2t and 2t + 1
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v = odd ? sum[i][0][2 * half + 1] : sum[i][0][2 * half];
        if constexpr (kChains == 2) v += odd ? sum[i][1][2 * half + 1] : sum[i][1][2 * half];
        to[(i * 2 + half) * 8 + g] = v;
      }
    }
  }
};

/// Sums over one tile that has arrived; `chunk` of its rows.
template <class T, int kBits, int kPairs>
__device__ __forceinline__ void gemv_tensor_tile(const GemvArgs& p, const GemvMemory& s,
                                                 const unsigned char* stage, int chunk,
                                                 GemvPairSums<T, kBits, kPairs>& sums) {
  constexpr int kPlanes = kGemvPlanes<kBits>, kStep = 512;
  const int lane = threadIdx.x % 32;
  const int bytes = min(p.chunk_bytes, p.row_bytes - chunk * p.chunk_bytes);
  const int first_step = chunk * (p.chunk_bytes / kStep);
  const unsigned char* w = stage + lane * 16;
  const unsigned char* x = s.base + s.x + first_step * kStep * kPlanes + lane * 16;
  if constexpr (kBits == 0) {
    const auto step = [&](int at, bool inside) {
      const uint4 xs = shared_16(x + at);
#pragma unroll
      for (int r = 0; r < kPairs; ++r) {
        const unsigned char* row = w + 2 * r * p.chunk_bytes + at;
        const uint4 a = read_16(row, inside), b = read_16(row + p.chunk_bytes, inside);
        gemv_dense_16<T>(sums.sum[r], a, b, xs);
      }
    };
    int at = 0;
#pragma unroll 4
    for (; at + kStep <= bytes; at += kStep) step(at, true);
    if (at < bytes) step(at, at + lane * 16 < bytes);  // what lies behind the row may be anything
  } else {
    constexpr int kUnitK = kBits == 4 ? 128 : 64;  // values of a segment
    const int steps = (bytes + kStep - 1) / kStep, k0 = first_step * 8 * kUnitK;
    const int first_group = k0 >> p.group_shift;
    const float* from =
        reinterpret_cast<const float*>(s.base + s.x_sums) + first_step * 8 + lane % 4 * 2;
    for (int i = 0; i < steps; ++i) {
      uint4 xs[kPlanes];
#pragma unroll
      for (int j = 0; j < kPlanes; ++j) xs[j] = shared_16(x + (i * kPlanes + j) * kStep);
      const float2 start = *reinterpret_cast<const float2*>(from + i * 8);
      const int k = k0 + (i * 8 + lane / 4) * kUnitK;
      const uint4 eight =
          read_16(stage + p.scales_at + ((k >> p.group_shift) - first_group) * 16, k < p.k);
      Pack<T, 8> scales;  // of the tile's rows
      memcpy(&scales, &eight, 16);
      uint4 a[kPairs], b[kPairs];
      float c[kPairs][kBits == 4 ? 1 : 2][4];
#pragma unroll
      for (int r = 0; r < kPairs; ++r) {
        const unsigned char* row = w + 2 * r * p.chunk_bytes + i * kStep;
        a[r] = shared_16(row), b[r] = shared_16(row + p.chunk_bytes);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          c[r][0][j] = j % 2 ? start.y : start.x;
          constexpr float kMore = (kNibbleBase<T> + 8.0f) / kNibbleBase<T>;
          if constexpr (kBits == 8) c[r][1][j] = c[r][0][j] * kMore;
        }
      }
      gemv_nibbles_16<T, kBits, kPairs>(c, a, b, xs);
#pragma unroll
      for (int r = 0; r < kPairs; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float v = c[r][0][j];
          if constexpr (kBits == 8) v += 16.0f * c[r][1][j];
          sums.sum[r][0][j] += v * to_float(scales.v[2 * r + j / 2]);
        }
      }
    }
  }
}

/// Asks for a tile of `rows` rows: one copy where they lie together.
__device__ __forceinline__ void gemv_tensor_ask(const GemvArgs& p, const GemvTile& t,
                                                std::uint32_t bar, std::uint32_t stage, int rows) {
  const int row0 = (blockIdx.x + t.turn * gridDim.x) * rows, have = min(rows, p.n - row0);
  const int from = t.chunk * p.chunk_bytes, bytes = min(p.chunk_bytes, p.row_bytes - from);
  const char* w = static_cast<const char*>(p.w) + row0 * p.w_pitch + from;
  barrier_expect(bar, have * bytes);
  if (p.together) {
    bulk_copy(stage, w, have * bytes, bar);
    return;
  }
#pragma unroll 4
  for (int r = 0; r < have; ++r, w += p.w_pitch)
    bulk_copy(stage + r * p.chunk_bytes, w, bytes, bar);
}

/// Scales of a tile's eight rows, 16 bytes a group, one a lane and turn; every lane arrives when
/// its own are there.
template <class T, int kBits>
__device__ __forceinline__ void gemv_tensor_scales(const GemvArgs& p, const GemvTile& t,
                                                   std::uint32_t bar, std::uint32_t at, int rows) {
  const int row0 = (blockIdx.x + t.turn * gridDim.x) * rows, chunk_k = p.chunk_bytes * (8 / kBits);
  const int k0 = t.chunk * chunk_k, k1 = min(k0 + chunk_k, p.k);
  const int first = k0 >> p.group_shift, last = (k1 - 1) >> p.group_shift;
  for (int i = threadIdx.x % 32; i <= last - first; i += 32) {
    copy_16_async(at + i * 16,
                  static_cast<const T*>(p.scales) + (first + i) * p.scales_pitch + row0, true);
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

/// The elements of a finished group of rows: the slots' sums, in order.
template <class T>
__device__ __forceinline__ void gemv_tensor_store(const GemvArgs& p, const float* all, int slots,
                                                  int row0, int rows) {
  const int row = threadIdx.x % 32, n = row0 + row;
  if (row >= rows || n >= p.n) return;
  float v = 0.0f;
  for (int k = 0; k < slots; ++k) {
    const auto* from = reinterpret_cast<const float4*>(all + (k * rows + row) * 8);
    const float4 a = from[0], b = from[1];
    v += ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
  }
  if (!p.plain) v = epilogue_value<T>(p.epilogue, v, 0, 0, n);
  static_cast<T*>(p.y)[n] = from_float<T>(v);
}

template <class T, class Sums>
__device__ __forceinline__ void gemv_tensor_join(const GemvArgs& p, const GemvMemory& s, int turn,
                                                 int slot, Sums& sums, int rows) {
  const int lane = threadIdx.x % 32, size = rows * 8;
  const int row0 = (blockIdx.x + turn * gridDim.x) * rows;
  float* all = reinterpret_cast<float*>(s.base + s.sums);
  if (p.chunks == 1) {
    all += static_cast<int>(threadIdx.x / 32) * size;
    __syncwarp();
    sums.store(all);
    __syncwarp();
    gemv_tensor_store<T>(p, all, 1, row0, rows);
    return;
  }
  const int buffer = turn & (p.buffers - 1), generation = turn >> p.buffer_shift;
  all += buffer * p.slots * size;
  while (*s.generation(buffer) != generation) {  // its group before is not finished yet
  }
  __syncwarp();
  sums.store(all + slot * size);
  __syncwarp();
  int before = 0;
  if (lane == 0) {
    __threadfence_block();
    before = atomicAdd(s.counter(buffer), 1);
    __threadfence_block();
  }
  if (__shfl_sync(0xffffffffu, before, 0) != p.slots - 1) return;
  gemv_tensor_store<T>(p, all, p.slots, row0, rows);
  __syncwarp();
  if (lane == 0) {
    *s.counter(buffer) = 0;
    __threadfence_block();
    *s.generation(buffer) = generation + 1;
  }
}

/// x holds NaN or Inf: this block's rows by plain arithmetic.
template <class T>
__device__ __noinline__ void gemv_tensor_plain(const GemvArgs& p, int rows) {
  const T* x = static_cast<const T*>(p.x);
  for (int row0 = blockIdx.x * rows; row0 < p.n; row0 += gridDim.x * rows) {
    for (int n = row0 + threadIdx.x / 32; n < min(row0 + rows, p.n); n += blockDim.x / 32) {
      float sum = 0.0f;
      for (int k = threadIdx.x % 32; k < p.k; k += 32) {
        sum += to_float(x[k]) * gemv_weight<T>(p, n, k);
      }
      sum = warp_reduce<Sum>(sum);
      if (threadIdx.x % 32 != 0) continue;
      static_cast<T*>(p.y)[n] = from_float<T>(epilogue_value<T>(p.epilogue, sum, 0, 0, n));
    }
  }
}

template <class T, int kBits, int kPairs>
__global__ void __launch_bounds__(32 * gemv_tensor_warps(kBits), 1)
    gemv_tensor(const __grid_constant__ GemvArgs p) {
  extern __shared__ __align__(128) unsigned char memory[];
  using Sums = GemvPairSums<T, kBits, kPairs>;
  launch_dependents();
  GemvMemory s;
  s.base = memory, s.full = shared_address(memory), s.sums = 1024;
  s.x = s.sums + p.sums_bytes, s.x_sums = s.x + p.x_smem_pitch;
  s.stage = p.stages_at;
  const int warp = uniform_warp();
  constexpr int rows = 2 * kPairs;
  if (threadIdx.x < kGemvBuffers) {
    *s.counter(threadIdx.x) = 0;
    *s.generation(threadIdx.x) = 0;
  }
  const int all = (p.n + rows - 1) / rows;
  const int turns = (all - static_cast<int>(blockIdx.x) + gridDim.x - 1) / gridDim.x;
  const std::uint32_t bar = s.full + 8 * warp;
  const int at = s.stage + warp * p.stage_bytes;
  if (elect_lane()) {
    barrier_init(bar, 1 + (kBits != 0 ? 32 : 0));
    barrier_init_done();
  }
  __syncwarp();
  GemvTile tile{warp / p.chunks, warp % p.chunks};
  const auto ask = [&](const GemvTile& t) {
    if (elect_lane()) gemv_tensor_ask(p, t, bar, s.full + at, rows);
    if constexpr (kBits != 0) {
      gemv_tensor_scales<T, kBits>(p, t, bar, s.full + at + p.scales_at, rows);
    }
  };
  if (tile.turn < turns) ask(tile);
  wait_for_previous();  // x is written by the kernel before
  const bool bad =
      gemv_tensor_x<T, kBits>(p, memory + s.x, reinterpret_cast<float*>(memory + s.x_sums));
  if (kBits == 0) {
    __syncthreads();
  } else if (__syncthreads_or(bad)) {
    if (tile.turn < turns) barrier_wait(bar, 0);
    gemv_tensor_plain<T>(p, rows);
    return;
  }
  Sums sums;
  sums.clear();
  int slot = tile.chunk, parity = 0;
  while (tile.turn < turns) {
    barrier_wait(bar, parity);
    parity ^= 1;
    gemv_tensor_tile<T, kBits, kPairs>(p, s, memory + at, tile.chunk, sums);
    __syncwarp();
    GemvTile following = tile;
    following.next(p);
    if (following.turn < turns) ask(following);
    if (following.turn != tile.turn) {
      gemv_tensor_join<T>(p, s, tile.turn, slot, sums, rows);
      sums.clear();
      slot = following.chunk;
    }
    tile = following;
  }
}

}  // namespace rm::cuda_ops
