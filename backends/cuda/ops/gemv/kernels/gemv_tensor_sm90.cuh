// 16-bit x, up to 8 rows (one where w is quantised): the tensor cores multiply, so a weight costs
// less than an instruction. A product's 16 x 16 operand is R = 16 / S neighbouring rows of w, each
// in S segments; its 8 columns are the rows of x in the same segments. Only where the segments
// agree is the result of use. M = 1: S = 8. More: S = 4, and 2 or 4 products for the sets of 2 rows
// of x, because pieces of w below 2 KiB cost copies their speed. So every lane reads 16 bytes
// beside its neighbour's. int8 and int4: a nibble becomes base + nibble by one LOP3 (base 128 in
// bf16, 64 in fp16), the sums start at -base * sum of x, and a group's scale multiplies the group's
// sum. int8 is two nibbles. Where x holds NaN or Inf that would not be right: a plain loop does
// such calls. Every warp owns `depth` stages; none waits for another's.
#pragma once

#include "gemv/kernels/gemv_naive_any.cuh"
#include "gemv/kernels/gemv_ring_sm90.cuh"
#include "gemv/kernels/gemv_unpack_sm90.cuh"

namespace rm::cuda_ops {

/// 16-byte vectors of x that meet 16 bytes of w.
template <int kBits>
inline constexpr int kGemvPlanes = kBits == 0 ? 1 : 16 / kBits;

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
  const int shift = p.seg_shift, all = p.steps * (kGroup << shift), vectors = p.k / 8;
  bool bad = false;
  for (int m = 0; m < p.m; ++m) {
    const auto* x = reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + m * p.x_pitch);
    unsigned char* out = to + m * p.x_smem_pitch;
#pragma unroll 2
    for (int i = threadIdx.x; i - static_cast<int>(threadIdx.x % 32) < all; i += blockDim.x) {
      uint4 v = i < vectors ? x[i] : uint4{0, 0, 0, 0};
      if constexpr (kBits == 0) {
        if (i < all) *reinterpret_cast<uint4*>(out + i * 16) = v;
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
      const int unit = i / kPlanes, plane = i % kPlanes, step = unit >> (shift + 2),
                within = unit & ((4 << shift) - 1);
      if (i >= all) continue;
      *reinterpret_cast<uint4*>(out + (((step * kPlanes + plane) << (shift + 2)) + within) * 16) =
          v;
      if (i % kGroup == 0) {
        constexpr float kFrom = -(kBits == 4 ? kNibbleBase<T> + 8.0f : kNibbleBase<T>);
        sums[step * 8 + (m << shift) + within / 4] = kFrom * sum;
      }
    }
  }
  return bad;
}

/// Where a lane reads: constant through a launch.
template <int kSets>
struct GemvLane {
  int seg, w_at, row_b;       // its segment; its first row's bytes; bytes to its second row
  int rows_a;                 // its first row of a pair
  int x_set[kSets], sums_at;  // of a step
};

/// Adds the products of 16 bytes of two rows to c.
template <class T>
__device__ __forceinline__ void gemv_dense_16(float (&c)[2][4], const uint4& a, const uint4& b,
                                              const uint4& x) {
  mma_16816<T>(c[0], a.x, b.x, a.y, b.y, x.x, x.y);
  mma_16816<T>(c[1], a.z, b.z, a.w, b.w, x.z, x.w);
}

/// The same for int4: 32 values, four vectors of x; a word's two products go to two chains.
template <class T>
__device__ __forceinline__ void gemv_nibbles_16(float (&c)[4], float (&d)[4], const uint4& a,
                                                const uint4& b, const uint4 (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t u = word_of(a, i), v = word_of(b, i);
    mma_16816<T>(c, nibble_pair<T, 0, false>(u), nibble_pair<T, 0, false>(v),
                 nibble_pair<T, 1, false>(u), nibble_pair<T, 1, false>(v), x[i].x, x[i].y);
    mma_16816<T>(d, nibble_pair<T, 2, false>(u), nibble_pair<T, 2, false>(v),
                 nibble_pair<T, 3, false>(u), nibble_pair<T, 3, false>(v), x[i].z, x[i].w);
  }
}
/// And int8: 16 values, low nibbles into lo, high ones into hi.
template <class T>
__device__ __forceinline__ void gemv_bytes_16(float (&lo)[4], float (&hi)[4], const uint4& a,
                                              const uint4& b, const uint4 (&x)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t u = word_of(a, i), v = word_of(b, i);
    const std::uint32_t x0 = word_of(x[i / 2], i % 2 * 2), x1 = word_of(x[i / 2], i % 2 * 2 + 1);
    mma_16816<T>(lo, nibble_pair<T, 0, false>(u), nibble_pair<T, 0, false>(v),
                 nibble_pair<T, 2, false>(u), nibble_pair<T, 2, false>(v), x0, x1);
    mma_16816<T>(hi, nibble_pair<T, 1, true>(u), nibble_pair<T, 1, true>(v),
                 nibble_pair<T, 3, true>(u), nibble_pair<T, 3, true>(v), x0, x1);
  }
}

/// Sums of one warp: kPairs groups of R rows, or one group and kSets sets of 8 / S rows of x.
template <class T, int kBits, int kPairs, int kSets>
struct GemvPairSums {
  static_assert(kPairs == 1 || kSets == 1);
  static constexpr int kChains = kBits == 0 ? 2 : 1;
  float sum[kPairs * kSets][kChains][4];
  __device__ void clear() {
#pragma unroll
    for (int p = 0; p < kPairs * kSets; ++p) {
#pragma unroll
      for (int i = 0; i < 4 * kChains; ++i) sum[p][i / 4][i % 4] = 0.0f;
    }
  }
  /// [m][rows of the tile][segment]
  __device__ __forceinline__ void store(float* to, const GemvArgs& p) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int shift = kPairs == 4 ? 3 : p.seg_shift, segs = 1 << shift, rows = 16 >> shift;
#pragma unroll
    for (int es = 0; es < 2 * kSets; ++es) {
      const int e = es % 2, n = 2 * t + e, m = (es / 2 << (3 - shift)) + (n >> shift);
      if (((n ^ g) & (segs - 1)) != 0 || m >= p.m) continue;
      float* out = to + ((m * kPairs * rows + (g >> shift)) << shift) + (g & (segs - 1));
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float v = sum[i + es / 2][0][2 * half + e];
          if constexpr (kChains == 2) v += sum[i + es / 2][1][2 * half + e];
          out[(i * rows + half * (rows / 2)) << shift] = v;
        }
      }
    }
  }
};

/// Sums over one tile that has arrived; `chunk` of its rows.
template <class T, int kBits, int kPairs, int kSets>
__device__ __forceinline__ void gemv_tensor_tile(const GemvArgs& p, const GemvMemory& s,
                                                 const unsigned char* stage, int chunk,
                                                 const GemvLane<kSets>& at,
                                                 GemvPairSums<T, kBits, kPairs, kSets>& sums) {
  constexpr int kPlanes = kGemvPlanes<kBits>;
  const int shift = kPairs == 4 ? 3 : p.seg_shift, step_bytes = 64 << shift, rows = 16 >> shift;
  const int bytes = min(p.chunk_bytes, p.row_bytes - chunk * p.chunk_bytes);
  const int first_step = chunk * (p.chunk_bytes / step_bytes);
  const unsigned char* w = stage + at.w_at;
  const unsigned char* x = s.base + s.x + first_step * step_bytes * kPlanes;
  const int pair_bytes = rows * p.chunk_bytes;
  if constexpr (kBits == 0) {
    const int whole = bytes / step_bytes;
    const auto step = [&](int i, const uint4(&a)[kPairs], const uint4(&b)[kPairs]) {
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        const uint4 xs = shared_16(x + i * step_bytes + at.x_set[set]);
#pragma unroll
        for (int r = 0; r < kPairs; ++r) gemv_dense_16<T>(sums.sum[r + set], a[r], b[r], xs);
      }
    };
#pragma unroll(kSets == 1 ? 4 : 2)
    for (int i = 0; i < whole; ++i) {
      uint4 a[kPairs], b[kPairs];
#pragma unroll
      for (int r = 0; r < kPairs; ++r) {
        a[r] = shared_16(w + r * pair_bytes + i * step_bytes);
        b[r] = shared_16(w + r * pair_bytes + i * step_bytes + at.row_b);
      }
      step(i, a, b);
    }
    if (whole * step_bytes < bytes) {  // what lies behind the row may be anything
      const int lane_at = (at.seg * 4 + threadIdx.x % 4) * 16;
      const bool inside = whole * step_bytes + lane_at < bytes;
      uint4 a[kPairs], b[kPairs];
#pragma unroll
      for (int r = 0; r < kPairs; ++r) {
        const unsigned char* from = w + r * pair_bytes + whole * step_bytes;
        a[r] = read_16(from, inside), b[r] = read_16(from + at.row_b, inside);
      }
      step(whole, a, b);
    }
  } else {
    constexpr int kUnitK = kBits == 4 ? 128 : 64;  // values of a segment
    const int steps = (bytes + step_bytes - 1) / step_bytes;
    const int k0 = first_step * (kUnitK << shift);
    const int first_group = k0 >> p.group_shift;
    const float* from =
        reinterpret_cast<const float*>(s.base + s.x_sums) + first_step * 8 + at.sums_at;
    for (int i = 0; i < steps; ++i) {
      uint4 xs[kPlanes];
#pragma unroll
      for (int j = 0; j < kPlanes; ++j)
        xs[j] = shared_16(x + at.x_set[0] + (i * kPlanes + j) * step_bytes);
      const float2 start = *reinterpret_cast<const float2*>(from + i * 8);
      const int k = k0 + ((i << shift) + at.seg) * kUnitK;
      const auto* scales = reinterpret_cast<const T*>(stage + p.scales_at) +
                           ((k >> p.group_shift) - first_group) * (rows * kPairs) + at.rows_a;
      Pack<T, 8> all_scales;  // kPairs == 4: eight rows, one read
      if constexpr (kPairs == 4) {
        const uint4 v = read_16(reinterpret_cast<const unsigned char*>(scales), k < p.k);
        memcpy(&all_scales, &v, 16);
      }
#pragma unroll
      for (int r = 0; r < kPairs; ++r) {
        const unsigned char* row = w + r * pair_bytes + i * step_bytes;
        const uint4 a = shared_16(row), b = shared_16(row + at.row_b);
        float scale_a, scale_b;
        if constexpr (kPairs == 4) {
          scale_a = to_float(all_scales.v[2 * r]), scale_b = to_float(all_scales.v[2 * r + 1]);
        } else {
          scale_a = k < p.k ? to_float(scales[0]) : 0.0f;
          scale_b = k < p.k ? to_float(scales[rows / 2]) : 0.0f;
        }
        float c[4] = {start.x, start.y, start.x, start.y};
        if constexpr (kBits == 4) {
          float d[4] = {};
          gemv_nibbles_16<T>(c, d, a, b, xs);
#pragma unroll
          for (int j = 0; j < 4; ++j) c[j] += d[j];
        } else {
          constexpr float kMore = (kNibbleBase<T> + 8.0f) / kNibbleBase<T>;
          float hi[4] = {start.x * kMore, start.y * kMore, start.x * kMore, start.y * kMore};
          gemv_bytes_16<T>(c, hi, a, b, xs);
#pragma unroll
          for (int j = 0; j < 4; ++j) c[j] += 16.0f * hi[j];
        }
        sums.sum[r][0][0] += c[0] * scale_a, sums.sum[r][0][1] += c[1] * scale_a;
        sums.sum[r][0][2] += c[2] * scale_b, sums.sum[r][0][3] += c[3] * scale_b;
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

/// Scales of a tile, 16-byte pieces, one a lane and turn; every lane arrives when its own are
/// there.
template <class T, int kBits>
__device__ __forceinline__ void gemv_tensor_scales(const GemvArgs& p, const GemvTile& t,
                                                   std::uint32_t bar, std::uint32_t at, int rows) {
  const int row0 = (blockIdx.x + t.turn * gridDim.x) * rows, more = rows >> 4;  // pieces: 1 or 2
  const int k0 = t.chunk * p.chunk_bytes * (8 / kBits),
            k1 = min(k0 + p.chunk_bytes * (8 / kBits), p.k);
  const int first = k0 >> p.group_shift, last = (k1 - 1) >> p.group_shift;
  for (int i = threadIdx.x % 32; i < (last - first + 1) << more; i += 32) {
    const int row = row0 + (i & more) * 8;
    if (row >= p.n) continue;
    const T* from = static_cast<const T*>(p.scales) + (first + (i >> more)) * p.scales_pitch + row;
    copy_16_async(at + i * 16, from, true);
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

/// The elements of a finished group of rows: the slots' sums, in order.
template <class T>
__device__ __forceinline__ void gemv_tensor_store(const GemvArgs& p, const float* all, int slots,
                                                  int row0, int rows) {
  const int count = p.m * rows, shift = 31 - __clz(rows), segs = 1 << p.seg_shift;
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    const int m = i >> shift, n = row0 + (i & (rows - 1));
    float v = 0.0f;
    for (int k = 0; k < slots; ++k) {
      const float* from = all + ((k * count + i) << p.seg_shift);
      if (segs == 8) {
        const float4 a = *reinterpret_cast<const float4*>(from),
                     b = *reinterpret_cast<const float4*>(from + 4);
        v += ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
      } else {
        for (int j = 0; j < segs; ++j) v += from[j];
      }
    }
    if (n >= p.n) continue;
    if (!p.plain) v = epilogue_value<T>(p.epilogue, v, 0, m, n);
    static_cast<T*>(p.y)[m * p.y_pitch + n] = from_float<T>(v);
  }
}

template <class T, class Sums>
__device__ __forceinline__ void gemv_tensor_join(const GemvArgs& p, const GemvMemory& s, int turn,
                                                 int slot, Sums& sums, int rows) {
  const int lane = threadIdx.x % 32, size = (p.m * rows) << p.seg_shift;
  const int row0 = (blockIdx.x + turn * gridDim.x) * rows;
  float* all = reinterpret_cast<float*>(s.base + s.sums);
  if (p.chunks == 1) {
    all += static_cast<int>(threadIdx.x / 32) * size;
    __syncwarp();
    sums.store(all, p);
    __syncwarp();
    gemv_tensor_store<T>(p, all, 1, row0, rows);
    return;
  }
  const int buffer = turn & (p.buffers - 1), generation = turn >> p.buffer_shift;
  all += buffer * p.slots * size;
  while (*s.generation(buffer) != generation) {  // its group before is not finished yet
  }
  __syncwarp();
  sums.store(all + slot * size, p);
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
  for (int row0 = blockIdx.x * rows; row0 < p.n; row0 += gridDim.x * rows) {
    for (int i = threadIdx.x / 32; i < rows * p.m; i += blockDim.x / 32) {
      const int n = row0 + i % rows, m = i / rows;
      if (n >= p.n) continue;
      const T* x = static_cast<const T*>(p.x) + m * p.x_pitch;
      float sum = 0.0f;
      for (int k = threadIdx.x % 32; k < p.k; k += 32)
        sum += to_float(x[k]) * gemv_weight<T>(p, n, k);
      sum = warp_reduce<Sum>(sum);
      if (threadIdx.x % 32 != 0) continue;
      static_cast<T*>(p.y)[m * p.y_pitch + n] =
          from_float<T>(epilogue_value<T>(p.epilogue, sum, 0, m, n));
    }
  }
}

template <class T, int kBits, int kPairs, int kSets>
__global__ void __launch_bounds__(kGemvMaxWarps * 32, 1)
    gemv_tensor(const __grid_constant__ GemvArgs p) {
  extern __shared__ __align__(128) unsigned char memory[];
  using Sums = GemvPairSums<T, kBits, kPairs, kSets>;
  launch_dependents();
  GemvMemory s;
  s.base = memory, s.full = shared_address(memory), s.sums = 1024;
  s.x = s.sums + p.sums_bytes, s.x_sums = s.x + p.m * p.x_smem_pitch;
  s.stage = p.stages_at;
  const int warp = uniform_warp(), lane = threadIdx.x % 32, depth = p.depth;
  const int rows = (16 >> p.seg_shift) * kPairs;
  if (threadIdx.x < kGemvBuffers) {
    *s.counter(threadIdx.x) = 0;
    *s.generation(threadIdx.x) = 0;
  }
  const int all = (p.n + rows - 1) / rows;
  const int turns = (all - static_cast<int>(blockIdx.x) + gridDim.x - 1) / gridDim.x;
  const std::uint32_t bars = s.full + 8 * warp * depth;
  const int stages = s.stage + warp * depth * p.stage_bytes;
  if (elect_lane()) {
    for (int i = 0; i < depth; ++i) barrier_init(bars + 8 * i, 1 + (kBits != 0 ? 32 : 0));
    barrier_init_done();
  }
  __syncwarp();
  GemvTile tile{warp / p.chunks, warp % p.chunks}, ahead = tile;
  const auto ask = [&](const GemvTile& t, int stage) {
    const std::uint32_t to = s.full + stages + stage * p.stage_bytes;
    if (elect_lane()) gemv_tensor_ask(p, t, bars + 8 * stage, to, rows);
    if constexpr (kBits != 0) {
      gemv_tensor_scales<T, kBits>(p, t, bars + 8 * stage, to + p.scales_at, rows);
    }
  };
  int asked = 0;
  for (; asked < depth && ahead.turn < turns; ++asked, ahead.next(p)) ask(ahead, asked);
  wait_for_previous();  // x is written by the kernel before
  const bool bad =
      gemv_tensor_x<T, kBits>(p, memory + s.x, reinterpret_cast<float*>(memory + s.x_sums));
  if (kBits == 0) {
    __syncthreads();
  } else if (__syncthreads_or(bad)) {
    for (int i = 0; i < asked; ++i) barrier_wait(bars + 8 * i, 0);
    gemv_tensor_plain<T>(p, rows);
    return;
  }
  GemvLane<kSets> at;
  {
    const int g = lane / 4, t = lane % 4, segs = 1 << p.seg_shift;
    at.seg = g & (segs - 1), at.rows_a = g >> p.seg_shift;
    at.w_at = at.rows_a * p.chunk_bytes + (at.seg * 4 + t) * 16;
    at.row_b = (8 >> p.seg_shift) * p.chunk_bytes;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {  // rows beyond M repeat the last
      const int m = min((set << (3 - p.seg_shift)) + (g >> p.seg_shift), p.m - 1);
      at.x_set[set] = m * p.x_smem_pitch + (at.seg * 4 + t) * 16;
    }
    at.sums_at = 2 * t;
  }
  Sums sums;
  sums.clear();
  int slot = tile.chunk, parity = 0, stage = 0;
  while (tile.turn < turns) {
    barrier_wait(bars + 8 * stage, parity);
    gemv_tensor_tile<T, kBits, kPairs, kSets>(p, s, memory + stages + stage * p.stage_bytes,
                                              tile.chunk, at, sums);
    __syncwarp();
    if (ahead.turn < turns) {
      ask(ahead, stage);
      ahead.next(p);
    }
    GemvTile following = tile;
    following.next(p);
    if (following.turn != tile.turn) {
      gemv_tensor_join<T>(p, s, tile.turn, slot, sums, rows);
      sums.clear();
      slot = following.chunk;
    }
    tile = following;
    if (++stage == depth) stage = 0, parity ^= 1;
  }
}

}  // namespace rm::cuda_ops
