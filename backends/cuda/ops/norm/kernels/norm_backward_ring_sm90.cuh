// Gradients of a norm of 16-bit rows: a block a multiprocessor, cut into teams of warps; each team
// owns a ring of rows of h and dy in shared memory that bulk copies fill ahead. A team meets once a
// row, for four sums: tensor cores give those of h. Bound by instructions (about 19 an element) as
// much as by memory. Each thread sums its own columns of dweight and dbias; at the end a block adds
// its teams' up and writes one share. For n a multiple of the vector.
#pragma once

#include "norm/kernels/norm_backward_sm80.cuh"
#include "norm/kernels/norm_moments_sm80.cuh"

namespace rm::cuda_ops {

inline constexpr int kRingHead = 2048;    // barriers, then the warps' shares of sums
inline constexpr int kRingShares = 1024;  // where they begin
inline constexpr int kRingMemory = 227 * 1024;

inline constexpr int kRingMeeting = 512;  // the barrier of what other blocks send

struct RingPlan {
  int warps, teams, stages, pitch;  // warps of a team; bytes of a row's place
  int ranks, received;              // blocks of a cluster; where the others' columns arrive
};

__device__ __forceinline__ std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ std::uint32_t address_in(std::uint32_t rank, std::uint32_t address) {
  std::uint32_t out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(rank));
  return out;
}
/// From this block's memory to another's, whose barrier counts the bytes.
__device__ __forceinline__ void bulk_send(std::uint32_t to, std::uint32_t from, std::uint32_t bytes,
                                          std::uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(bar)
      : "memory");
}

/// norm_share of a cluster: a block gets a part of the columns of all blocks, which halves
/// what goes through device memory. The copies are counted where they arrive, so that
/// nobody waits for stores of dx; the last meeting keeps what they read alive.
template <class T, int kPer>
__device__ __forceinline__ void norm_share_joined(const NormBackwardArgs& p, const RingPlan& plan,
                                                  unsigned char* memory, int team, int thread,
                                                  int threads, const float (&dw)[kPer][kVec<T>],
                                                  const float (&db)[kPer][kVec<T>]) {
  constexpr int V = kVec<T>, kQuads = kPer * V / 4;
  auto* all = reinterpret_cast<float4*>(memory + kRingHead);
  const auto* others = reinterpret_cast<const float4*>(memory + plan.received);
  const std::uint32_t bar = shared_address(memory) + kRingMeeting;
  const int rank = static_cast<int>(cluster_rank()), each = 2 * kQuads / plan.ranks;
  const std::uint32_t bytes = each * threads * 16;
  float4* mine = all + team * 2 * kQuads * threads + thread;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const float *w = &dw[q / (V / 4)][q % (V / 4) * 4], *b = &db[q / (V / 4)][q % (V / 4) * 4];
    mine[q * threads] = float4{w[0], w[1], w[2], w[3]};
    mine[(kQuads + q) * threads] = float4{b[0], b[1], b[2], b[3]};
  }
  if (plan.teams > 1) {
    __syncthreads();
    for (int q = team; q < 2 * kQuads; q += plan.teams) {
      float4 sum = all[q * threads + thread];
      for (int t = 1; t < plan.teams; ++t) {
        const float4 v = all[(t * 2 * kQuads + q) * threads + thread];
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      all[q * threads + thread] = sum;
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    barrier_expect(bar, (plan.ranks - 1) * bytes);
    for (int r = 1; r < plan.ranks; ++r) {
      const int peer = (rank + r) % plan.ranks, place = rank < peer ? rank : rank - 1;
      bulk_send(address_in(peer, shared_address(memory) + plan.received + place * bytes),
                shared_address(all + peer * each * threads), bytes, address_in(peer, bar));
    }
  }
  barrier_wait(bar, 0);
  float* share = p.partial + blockIdx.x / plan.ranks * 2 * static_cast<std::int64_t>(p.n);
  for (int e = team; e < each; e += plan.teams) {
    const int q = rank * each + e, quad = q % kQuads;
    const int i = (thread + quad / (V / 4) * threads) * V + quad % (V / 4) * 4;
    float4 sum{};
    for (int r = 0; r < plan.ranks; ++r) {
      const float4 v = r == rank ? all[q * threads + thread]
                                 : others[((r < rank ? r : r - 1) * each + e) * threads + thread];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    if (i < p.n) *reinterpret_cast<float4*>(share + (q < kQuads ? 0 : p.n) + i) = sum;
  }
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::
                   : "memory");
}

/// Threads of a block: what the registers hold.
__host__ __device__ constexpr int norm_ring_threads(int per) { return per == 1 ? 768 : 512; }

template <class T, bool kRms, int kPer>
__global__ void __launch_bounds__(norm_ring_threads(kPer), 1)
    norm_backward_ring(const NormBackwardArgs p, const RingPlan plan) {
#if __CUDA_ARCH__ >= 900
  constexpr int V = kVec<T>;
  extern __shared__ __align__(128) unsigned char ring_memory[];
  const std::uint32_t bars = shared_address(ring_memory);
  const int threads = plan.warps * 32, team = uniform_warp() / plan.warps;
  const int thread = threadIdx.x - team * threads, warp = uniform_warp() - team * plan.warps;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * plan.teams;
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * plan.teams + team;
  unsigned char* ring = ring_memory + kRingHead + 2 * team * plan.stages * plan.pitch;
  const std::uint32_t my_bars = bars + team * plan.stages * 8;
  const std::uint32_t bytes = p.n * static_cast<int>(sizeof(T));
  if (threadIdx.x == 0) {
    for (int i = 0; i < plan.teams * plan.stages; ++i) barrier_init(bars + 8 * i, 1);
    barrier_init(bars + kRingMeeting, 1);
    barrier_init_done();
  }
  if (kPer == 2 && plan.ranks > 1) {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  } else {
    __syncthreads();
  }
  const T* next_h = static_cast<const T*>(p.h) + row * p.h_pitch;
  const T* next_dy = static_cast<const T*>(p.dy) + row * p.dy_pitch;
  if (warp == 0 && elect_lane()) {
    for (int s = 0; s < plan.stages && row + s * step < p.rows; ++s) {
      overlap_ask(next_h + s * step * p.h_pitch, bytes);
      overlap_ask(next_dy + s * step * p.dy_pitch, bytes);
    }
  }
  overlap_begin(p.h, p.dy, p.weight);
  std::int64_t asked = row;
  const auto ask = [&](int stage) {  // by the team's first warp
    if (asked < p.rows && elect_lane()) {
      const std::uint32_t bar = my_bars + 8 * stage;
      const std::uint32_t to = shared_address(ring) + 2 * stage * plan.pitch;
      barrier_expect(bar, 2 * bytes);
      bulk_copy(to, next_h, bytes, bar);
      bulk_copy(to + plan.pitch, next_dy, bytes, bar);
    }
    next_h += step * p.h_pitch, next_dy += step * p.dy_pitch, asked += step;
  };
  if (warp == 0) {
    for (int s = 0; s < plan.stages; ++s) ask(s);
  }
  const float inv_n = 1.0f / static_cast<float>(p.n);
  float dw[kPer][V] = {}, db[kPer][V] = {}, weight[kPer][V];
  bool inside[kPer];
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    const int i = (thread + k * threads) * V;
    inside[k] = i < p.n;
#pragma unroll
    for (int j = 0; j < V; ++j) weight[k][j] = 1.0f;
    if (p.weight == nullptr || !inside[k]) continue;
    load_vec(static_cast<const T*>(p.weight) + i, weight[k]);
#pragma unroll
    for (int j = 0; j < V; ++j) weight[k][j] += p.weight_offset;
  }
  T* dx = static_cast<T*>(p.dx) + row * p.dx_pitch + thread * V;
  float* shares = reinterpret_cast<float*>(ring_memory + kRingShares) + team * plan.warps * 4;
  int stage = 0, parity = 0, slot = 0;
  const auto meet = [&] { named_barrier(team + 1, threads); };
  for (; row < p.rows; row += step, dx += step * p.dx_pitch) {
    barrier_wait(my_bars + 8 * stage, parity);
    const uint4* from = reinterpret_cast<const uint4*>(ring + 2 * stage * plan.pitch) + thread;
    const uint4* from_dy =
        reinterpret_cast<const uint4*>(ring + (2 * stage + 1) * plan.pitch) + thread;
    RowWords<T, kPer> h, dy;
    RowMoments<T> moments;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      h.v[k] = dy.v[k] = uint4{0, 0, 0, 0};
      if (inside[k]) h.v[k] = from[k * threads], dy.v[k] = from_dy[k * threads];
      moments.add(h.v[k]);
    }
    float x[kPer][V], g[kPer][V], sums[4] = {};  // of h, h^2, g, g h
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        x[k][j] = h.value(k, j);
        g[k][j] = dy.value(k, j) * weight[k][j];
        if constexpr (!kRms) sums[2] += g[k][j];
        sums[3] += g[k][j] * x[k][j];
      }
      dy.forget(k);
    }
    sums[0] = moments.sum(), sums[1] = moments.squares();
    team_sums<false>(sums, shares + slot * 128, warp, plan.warps, meet);
    slot ^= 1;
    if (warp == 0) ask(stage);  // all have read this stage
    if (++stage == plan.stages) stage = 0, parity ^= 1;
    const float mean = kRms ? 0.0f : sums[0] * inv_n;
    float variance = sums[1] * inv_n - mean * mean, product = sums[3] - mean * sums[2];
    if (!kRms && !(mean * mean <= kNormFar * variance)) {  // the same in all threads of the team
      float again[2] = {};
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        if (!inside[k]) continue;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float d = x[k][j] - mean;
          again[0] += d * d;
          again[1] += g[k][j] * d;
        }
      }
      team_sums<false>(again, shares + slot * 128, warp, plan.warps, meet);
      slot ^= 1;
      variance = again[0] * inv_n, product = again[1];
    }
    const float rstd = rsqrtf(variance + p.eps), centre = -mean * rstd;
    const float slope = -product * inv_n * rstd * rstd * rstd;  // of out over h - mean
    const float shift = (kRms ? 0.0f : -sums[2] * inv_n * rstd) - mean * slope;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      float out[V];
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float d = dy.value(k, j);
        dw[k][j] += d * (x[k][j] * rstd + centre);
        db[k][j] += d;
        out[j] = g[k][j] * rstd + (x[k][j] * slope + shift);
      }
      if (!inside[k]) continue;
      if (p.dsum) {
        RowWords<T, 1> more;
        more.v[0] = *reinterpret_cast<const uint4*>(
            static_cast<const T*>(p.dsum) + row * p.dsum_pitch + (thread + k * threads) * V);
#pragma unroll
        for (int j = 0; j < V; ++j) out[j] += more.value(0, j);
      }
      store_words(dx + k * threads * V, out);
    }
  }
  if (p.partial == nullptr) return;
  __syncthreads();  // no team reads its ring any more
  if constexpr (kPer == 2) {
    if (plan.ranks > 1) {
      return norm_share_joined<T, kPer>(p, plan, ring_memory, team, thread, threads, dw, db);
    }
  }
  norm_share<T, kPer>(p, reinterpret_cast<float4*>(ring_memory + kRingHead), team, plan.teams,
                      thread, threads, dw, db);
#else
  __trap();  // why_not keeps older architectures away
#endif
}

}  // namespace rm::cuda_ops
