// How decoding adds up what its warps and then its blocks have of the same rows. From sm_90 on the
// blocks of a head may be a cluster: each sends every other one its sums of that one's columns,
// which arrive in shared memory and are counted there, so that no block waits for a barrier of all;
// or a second kernel joins what they left in device memory.
#pragma once

#include "sdpa/kernels/sdpa_common.cuh"

namespace rm::cuda_ops {

inline constexpr int kDecodeRows = 16;
inline constexpr int kDecodeCluster = 8;  // blocks of a cluster that a card always takes

/// The shared memory of a block of kBlockWarps warps whose rings take kRing bytes: these, or, when
/// they are done, each warp's [16 rows][kD + 2] floats; then what a cluster's blocks send.
template <int kHeadDim, int kBlockWarps, int kRing>
struct DecodeMemory {
  static constexpr int kD = kHeadDim, kWarps = kBlockWarps, kThreads = kWarps * 32;
  static constexpr int kFloats = kDecodeRows * (kD + 2);
  static constexpr int kSums = kWarps * kFloats * 4, kReceived = kRing > kSums ? kRing : kSums;
  static constexpr int kMemory =
      kReceived + 8 * (kDecodeRows * kD / 2 + kDecodeCluster * (1 + kDecodeRows));
};

/// How the columns of `rows` rows, in pairs, are shared among the blocks of a cluster. A block has
/// `each` pairs from `first` on; it gets every block's sums of them and [maximum, total] of all
/// rows.
struct DecodeShare {
  int pairs, each, first, count;
  std::uint32_t reciprocal;  // of each, for __umulhi
  __device__ __forceinline__ DecodeShare(int rows, int dim, int blocks) {
    pairs = rows * dim / 2, each = (pairs + blocks - 1) / blocks;
    first = static_cast<int>(blockIdx.x) * each, count = max(0, min(each, pairs - first));
    reciprocal = 0xffffffffu / each + 1;  // each is 2 at least
  }
};

/// Before anything else of a block: its barrier learns what will come, and the others that it runs.
__device__ __forceinline__ void decode_join_begin(const SdpaArgs& p, const DecodeShare& share,
                                                  int rows, std::uint32_t bar) {
  if (!kSm90 || !p.cluster || p.splits == 1) return;
  if (threadIdx.x == 0) {
    barrier_init(bar, 1);
    barrier_init_done();
    barrier_expect(bar, p.splits * (share.count + rows) * 8);
  }
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

/// Brings rows of k or v as far as the L2 cache, before the wait for the stream's previous kernel:
/// its writes arrive there too, so nothing old is read later. A warp asks for `count` rows from
/// `first` on, each of `bytes`, a line of 128 a lane: one instruction for many rows, where bulk
/// prefetches are one each.
__device__ __forceinline__ void decode_ask_rows(const void* base, std::int64_t row_bytes, int first,
                                                int count, int bytes, int lane) {
  const int lines = (bytes + 127) / 128;
  for (int i = lane; i < count * lines; i += 32) {
    const int row = i / lines;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(
        static_cast<const char*>(base) + (first + row) * row_bytes + (i - row * lines) * 128));
  }
}

/// Two neighbouring columns of a row of o from their sums, and its log-sum-exp.
template <class T>
__device__ __forceinline__ void decode_store(const SdpaArgs& p, int b, int g, int r, int d,
                                             float top, float total, float2 sum) {
  const int s = p.rows == 1 ? 0 : r / p.ratio, h = g * p.ratio + r - s * p.ratio;
  if (d < p.dim) {
    T* o = static_cast<T*>(p.o) + b * p.o_batch + h * p.o_head + s * p.o_row + d;
    const float scale = total == 0.0f ? 0.0f : __fdividef(1.0f, total);
    o[0] = from_float<T>(sum.x * scale), o[1] = from_float<T>(sum.y * scale);
  }
  if (p.lse && d == 0) {
    p.lse[(static_cast<std::int64_t>(b) * p.heads + h) * p.rows + s] = top / kLog2E + logf(total);
  }
}

/// Parts of a pair of columns become one: maxima and totals of kCount parts, and sums.
template <int kCount>
struct DecodeParts {
  float top[kCount], total[kCount];
  float2 sum[kCount];
  /// Afterwards the first part is all of them.
  __device__ __forceinline__ void join() {
    float high = minus_infinity(), all = 0.0f;
    float2 x = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < kCount; ++n) high = Max{}(high, top[n]);
    const float base = high == minus_infinity() ? 0.0f : high;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const float keep = power_of_2(top[n] - base);
      all += total[n] * keep, x.x += sum[n].x * keep, x.y += sum[n].y * keep;
    }
    top[0] = high, total[0] = all, sum[0] = x;
  }
};

/// What came from the blocks of the cluster becomes rows of o.
template <class T, class Shape>
__device__ __forceinline__ void decode_join_received(const SdpaArgs& p, int b, int g, int row0,
                                                     int rows, const DecodeShare& share,
                                                     const unsigned char* memory,
                                                     std::uint32_t bar) {
  constexpr int kPairs = Shape::kD / 2;
  const float2* received = reinterpret_cast<const float2*>(memory + Shape::kReceived);
  barrier_wait(bar, 0);
  for (int i = threadIdx.x; i < share.count; i += Shape::kThreads) {
    const int r = (share.first + i) / kPairs, d = (share.first + i) % kPairs * 2;
    DecodeParts<kDecodeCluster> parts;
#pragma unroll
    for (int n = 0; n < kDecodeCluster; ++n) {
      const float2* of = received + min(n, p.splits - 1) * (share.each + rows);
      const float2 row = of[share.each + r];
      const bool is = n < p.splits;
      parts.top[n] = is ? row.x : minus_infinity(), parts.total[n] = is ? row.y : 0.0f;
      parts.sum[n] = is ? of[i] : float2{0.0f, 0.0f};
    }
    parts.join();
    decode_store<T>(p, b, g, row0 + r, d, parts.top[0], parts.total[0], parts.sum[0]);
  }
}

/// What the warps have of rows row0 .. of a key head becomes the block's, and then rows of o or the
/// block's part of them. `memory`: each warp's sums, as DecodeMemory says.
template <class T, class Shape>
__device__ __forceinline__ void decode_join(const SdpaArgs& p, const DecodeShare& share, int b,
                                            int g, int row0, int rows, unsigned char* memory,
                                            std::uint32_t bar) {
  constexpr int kD = Shape::kD, kWarps = Shape::kWarps, kPairs = kD / 2;
  const bool cluster = kSm90 && p.splits > 1 && p.cluster;
  const std::uint32_t mine =
      shared_address(memory) + Shape::kReceived + blockIdx.x * (share.each + rows) * 8;
  float* partial = p.partial + row0 * (kD + 2) +
                   (static_cast<std::int64_t>(blockIdx.y) * p.splits + blockIdx.x) * Shape::kFloats;
  __syncthreads();
  if (cluster) asm volatile("barrier.cluster.wait;" ::: "memory");  // all have their barriers
  for (int i = threadIdx.x; i < share.pairs; i += Shape::kThreads) {
    const int r = i / kPairs, d = i % kPairs * 2;
    const float* from = reinterpret_cast<const float*>(memory) + r * (kD + 2);
    DecodeParts<kWarps> parts;
#pragma unroll
    for (int n = 0; n < kWarps; ++n, from += Shape::kFloats) {
      parts.top[n] = from[kD], parts.total[n] = from[kD + 1];
      parts.sum[n] = *reinterpret_cast<const float2*>(from + d);
    }
    parts.join();
    const float2 sum = parts.sum[0], row = {parts.top[0], parts.total[0]};
    if (p.splits == 1) {
      decode_store<T>(p, b, g, row0 + r, d, row.x, row.y, sum);
    } else if (cluster) {
      const int owner = static_cast<int>(__umulhi(i, share.reciprocal));
      cluster_send(sum, mine + (i - owner * share.each) * 8, bar, owner);
      if (d == 0) {
        for (int n = 0; n < p.splits; ++n) cluster_send(row, mine + (share.each + r) * 8, bar, n);
      }
    } else {
      *reinterpret_cast<float2*>(partial + r * (kD + 2) + d) = sum;
      if (d == 0) *reinterpret_cast<float2*>(partial + r * (kD + 2) + kD) = row;
    }
  }
  if (cluster) decode_join_received<T, Shape>(p, b, g, row0, rows, share, memory, bar);
}

/// The blocks' parts in device memory become rows of o: one block of kD / 2 threads a row.
template <class T, int kD>
__global__ void __launch_bounds__(kD / 2) sdpa_join(const SdpaArgs p) {
  const int r = blockIdx.x, b = blockIdx.y / p.groups, g = blockIdx.y % p.groups;
  const int d = static_cast<int>(threadIdx.x) * 2;
  wait_for_previous();
  const float* from =
      p.partial + (static_cast<std::int64_t>(blockIdx.y) * p.splits * kDecodeRows + r) * (kD + 2);
  const std::int64_t step = static_cast<std::int64_t>(kDecodeRows) * (kD + 2);
  float top = minus_infinity(), total = 0.0f;
  float2 sum = {0.0f, 0.0f};
#pragma unroll 8
  for (int n = 0; n < p.splits; ++n) top = Max{}(top, from[n * step + kD]);
  const float base = top == minus_infinity() ? 0.0f : top;
#pragma unroll 8
  for (int n = 0; n < p.splits; ++n) {
    const float keep = power_of_2(from[n * step + kD] - base);
    const float2 x = *reinterpret_cast<const float2*>(from + n * step + d);
    total += from[n * step + kD + 1] * keep;
    sum.x += x.x * keep, sum.y += x.y * keep;
  }
  decode_store<T>(p, b, g, r, d, top, total, sum);
}

}  // namespace rm::cuda_ops
