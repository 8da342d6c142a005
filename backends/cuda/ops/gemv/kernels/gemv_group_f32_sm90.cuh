// fp32 weights against one row of x, which is normalised on its way: a block has its rows of w in shared
// memory before it waits for x, where they are few enough (GPT-2's are), else a ring of them. Its rows lie
// together; a warp takes every kWarps-th piece of them, a piece being a row or, of long rows, a part of one,
// so that each lane holds what it needs of x in registers. No warp waits for another one but at the end, when
// sums become elements. Bound: reading w; x comes once for each block.
#pragma once

#include "_shim/async_shim.cuh"
#include "_shim/epilogue_shim.cuh"
#include "gemv/kernels/gemv_group_sm90.cuh"

namespace rm::cuda_ops {

inline constexpr int kGemvF32Warps = 8;
inline constexpr int kGemvF32Held = 8;     // vectors of x a lane holds, at most: pieces of 4 KiB
inline constexpr int kGemvF32AtOnce = 4;   // sums that a warp adds up together
inline constexpr int kGemvF32Scratch = 256;  // bytes in front of the barriers

/// How the weights are cut. Sizes in bytes.
struct GemvF32Args {
  int per, pieces;       // rows of a block; pieces of one: parts, twice where products are gated
  int parts, part;       // of a row; vectors of a part but perhaps the last
  int pieces_shift, parts_shift;  // log2: both are powers of two
  int vectors;           // of a row
  int slots, slot_bytes;  // of a warp
  int slots_at;          // behind the sums
};

/// One block's memory: [scratch 256] [barriers, 8 a slot] [sums of its pieces] [slots].
struct GemvF32Block {
  unsigned char* memory;
  int first, rows, items;  // rows of the result; pieces

  __device__ __forceinline__ float* scratch() const { return reinterpret_cast<float*>(memory); }
  __device__ __forceinline__ std::uint32_t bar(const GemvF32Args&, int slot) const {
    return shared_address(memory) + kGemvF32Scratch + 8 * slot;
  }
  __device__ __forceinline__ float* sums(const GemvF32Args& c) const {
    return reinterpret_cast<float*>(memory + kGemvF32Scratch + 8 * kGemvF32Warps * c.slots);
  }
};

/// Asks for a piece: called by one lane.
__device__ __forceinline__ void gemv_f32_ask(const GemvArgs& p, const GemvGroupArgs& g,
                                             const GemvF32Args& c, const GemvF32Block& s, int item,
                                             int slot) {
  const int piece = item & (c.pieces - 1), part = piece & (c.parts - 1);
  int of = piece >> c.parts_shift, n = s.first + (item >> c.pieces_shift);
  if (!g.gated) of = gemv_part(g, n), n -= g.first[of];
  const int bytes = min(c.part, c.vectors - part * c.part) * 16;
  const std::uint32_t bar = s.bar(c, slot);
  barrier_expect(bar, bytes);
  bulk_copy(shared_address(s.memory) + c.slots_at + slot * c.slot_bytes,
            static_cast<const char*>(g.w[of]) + n * p.w_pitch + part * c.part * 16, bytes, bar);
}

/// Sums over all of x of one value a thread: the warps that share a row's parts are neighbours.
__device__ __forceinline__ float gemv_f32_total(float v, int parts, float* scratch) {
  v = warp_reduce<Sum>(v);
  if (parts == 1) return v;
  const int warp = static_cast<int>(threadIdx.x) / 32, of = warp & ~(parts - 1);
  if (threadIdx.x % 32 == 0) scratch[warp] = v;
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < parts; ++i) sum += scratch[of + i];
  return sum;
}

/// This lane's part of x, normalised. `have`: vectors of the part.
__device__ __forceinline__ void gemv_f32_norm(const GemvArgs& p, const GemvGroupArgs& g,
                                              const GemvF32Args& c, const GemvF32Block& s,
                                              const float4 (&weight)[kGemvF32Held],
                                              const float4 (&shift)[kGemvF32Held], int have,
                                              float4 (&x)[kGemvF32Held]) {
  const int lane = threadIdx.x % 32;
  float mean = 0.0f, squares = 0.0f;
  if (g.centred) {
    float sum = 0.0f;
#pragma unroll
    for (const float4& v : x) sum += (v.x + v.y) + (v.z + v.w);  // zeros behind the row
    mean = gemv_f32_total(sum, c.parts, s.scratch()) / static_cast<float>(p.k);
  }
#pragma unroll
  for (int i = 0; i < kGemvF32Held; ++i) {
    if (lane + 32 * i >= have) continue;
    float4& v = x[i];
    v.x -= mean, v.y -= mean, v.z -= mean, v.w -= mean;
    squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
  }
  squares = gemv_f32_total(squares, c.parts, s.scratch() + kGemvF32Warps);
  const float inverse = rsqrtf(squares / static_cast<float>(p.k) + g.eps), more = g.weight_offset;
#pragma unroll
  for (int i = 0; i < kGemvF32Held; ++i) {
    if (lane + 32 * i >= have) continue;
    float4& v = x[i];
    const float4 &w = weight[i], &b = shift[i];
    v.x = fmaf(v.x * inverse, w.x + more, b.x), v.y = fmaf(v.y * inverse, w.y + more, b.y);
    v.z = fmaf(v.z * inverse, w.z + more, b.z), v.w = fmaf(v.w * inverse, w.w + more, b.w);
  }
}

/// The products of this warp's pieces, [row][piece] into the sums.
__device__ __forceinline__ void gemv_f32_products(const GemvArgs& p, const GemvGroupArgs& g,
                                                  const GemvF32Args& c, const GemvF32Block& s,
                                                  const float4 (&x)[kGemvF32Held], int have) {
  const int warp = uniform_warp(), lane = threadIdx.x % 32;
  int slot = 0, parity = 0;
  for (int item = warp; item < s.items; item += kGemvF32AtOnce * kGemvF32Warps) {
    float sum[kGemvF32AtOnce] = {};
#pragma unroll
    for (int r = 0; r < kGemvF32AtOnce; ++r) {
      const int now = item + r * kGemvF32Warps;
      if (now >= s.items) break;
      const int mine = warp * c.slots + slot;
      barrier_wait(s.bar(c, mine), parity);
      const auto* w = reinterpret_cast<const float4*>(s.memory + c.slots_at + mine * c.slot_bytes) + lane;
      float part[2] = {};
#pragma unroll
      for (int i = 0; i < kGemvF32Held; ++i) {
        if (lane + 32 * i >= have) break;
        const float4 a = w[32 * i];
        part[i % 2] = fmaf(a.x, x[i].x, fmaf(a.y, x[i].y, part[i % 2]));
        part[i % 2] = fmaf(a.z, x[i].z, fmaf(a.w, x[i].w, part[i % 2]));
      }
      sum[r] = part[0] + part[1];
      const int ahead = now + c.slots * kGemvF32Warps;
      if (ahead < s.items) {
        __syncwarp();  // all lanes have read the slot
        if (elect_lane()) gemv_f32_ask(p, g, c, s, ahead, mine);
      }
      if (++slot == c.slots) slot = 0, parity ^= 1;
    }
#pragma unroll
    for (int k = 16; k > 0; k >>= 1) {
#pragma unroll
      for (float& v : sum) v += __shfl_xor_sync(0xffffffffu, v, k);
    }
#pragma unroll
    for (int r = 0; r < kGemvF32AtOnce; ++r) {
      const int now = item + r * kGemvF32Warps;
      if (lane == r && now < s.items) s.sums(c)[now] = sum[r];
    }
  }
}

/// Row `row` of the block's, from its sums. bias, residual: of this row.
__device__ __forceinline__ void gemv_f32_store(const GemvGroupArgs& g, const GemvF32Args& c,
                                               const GemvF32Block& s, int row, float bias,
                                               float residual) {
  const float* sums = s.sums(c) + row * c.pieces;
  float v = bias, u = 0.0f;
  for (int i = 0; i < c.parts; ++i) {
    v += sums[i];
    if (g.gated) u += sums[c.parts + i];
  }
  v = activate<false>(g.activation, v, 0.0f);
  if (g.gated) v *= u;
  const int of = g.gated ? 0 : gemv_part(g, s.first + row);
  static_cast<float*>(g.y[of])[s.first + row - (g.gated ? 0 : g.first[of])] = v + residual;
}
__device__ __forceinline__ float gemv_f32_bias(const GemvGroupArgs& g, int n) {
  if (g.gated) return 0.0f;
  const int of = gemv_part(g, n);
  return g.bias[of] ? __ldg(static_cast<const float*>(g.bias[of]) + n - g.first[of]) : 0.0f;
}
/// The kernel before may still run beside this one: past the L1 cache.
__device__ __forceinline__ float gemv_f32_residual(const GemvGroupArgs& g, int n) {
  return g.residual ? __ldcg(static_cast<const float*>(g.residual) + n) : 0.0f;
}

__device__ __forceinline__ void gemv_f32_block(const GemvArgs& p, const GemvGroupArgs& g,
                                               const GemvF32Args& c) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int results = g.gated ? p.n / 2 : p.n;
  GemvF32Block s;
  s.memory = memory, s.first = static_cast<int>(blockIdx.x) * c.per;
  s.rows = min(c.per, results - s.first), s.items = s.rows * c.pieces;
  const int warp = uniform_warp(), lane = threadIdx.x % 32, part = warp & (c.parts - 1);
  if (elect_lane()) {  // each warp its own slots
    for (int i = 0; i < c.slots; ++i) barrier_init(s.bar(c, warp * c.slots + i), 1);
    barrier_init_done();
    for (int i = 0, item = warp; i < c.slots && item < s.items; ++i, item += kGemvF32Warps) {
      gemv_f32_ask(p, g, c, s, item, warp * c.slots + i);
    }
  }
  launch_dependents();
  __syncwarp();
  const int have = min(c.part, c.vectors - part * c.part), at = part * c.part + lane;
  float4 weight[kGemvF32Held], shift[kGemvF32Held], x[kGemvF32Held];
#pragma unroll
  for (int i = 0; i < kGemvF32Held; ++i) {
    const bool inside = lane + 32 * i < have;
    weight[i] = shift[i] = float4{0, 0, 0, 0};
    if (inside && g.norm) weight[i] = __ldg(static_cast<const float4*>(g.norm) + at + 32 * i);
    if (inside && g.norm_bias) shift[i] = __ldg(static_cast<const float4*>(g.norm_bias) + at + 32 * i);
  }
  const int row = static_cast<int>(threadIdx.x);
  const float bias = row < s.rows ? gemv_f32_bias(g, s.first + row) : 0.0f;
  float residual = 0.0f;
  int once = p.m;  // m is 1; a loop, for the compiler moves loads to their use but not into a loop
#pragma unroll 1
  do {
    wait_for_previous();  // x and the residual are written by kernels before
#pragma unroll
    for (int i = 0; i < kGemvF32Held; ++i) {
      x[i] = lane + 32 * i < have ? __ldcg(static_cast<const float4*>(p.x) + at + 32 * i)
                                  : float4{0, 0, 0, 0};
    }
    if (row < s.rows) residual = gemv_f32_residual(g, s.first + row);
    if (g.norm) gemv_f32_norm(p, g, c, s, weight, shift, have, x);
  } while (--once > 0);
  gemv_f32_products(p, g, c, s, x, have);
  __syncthreads();
  if (row < s.rows) gemv_f32_store(g, c, s, row, bias, residual);
  for (int more = row + static_cast<int>(blockDim.x); more < s.rows; more += blockDim.x) {
    gemv_f32_store(g, c, s, more, gemv_f32_bias(g, s.first + more),
                   gemv_f32_residual(g, s.first + more));
  }
}

__global__ void __launch_bounds__(32 * kGemvF32Warps, 2)
    gemv_group_f32(const __grid_constant__ GemvArgs p, const __grid_constant__ GemvGroupArgs g,
                   const __grid_constant__ GemvF32Args c) {
#if __CUDA_ARCH__ >= 900
  gemv_f32_block(p, g, c);
#else
  __trap();  // why_not keeps older architectures away
#endif
}

}  // namespace rm::cuda_ops
