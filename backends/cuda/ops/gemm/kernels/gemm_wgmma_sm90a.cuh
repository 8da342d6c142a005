// Products of 16-bit floats by wgmma, fed by the copy engine: tiles of 128 x kN, 64 deep. A block
// is two consumer warpgroups, a warp of which one thread issues the copies, and one that may sum
// columns for somebody else; they meet at a ring of barriers. Blocks are persistent. The blocks of
// a cluster stand below each other and share b's tile, each loading a part of it for all; or they
// take a part of K of one tile each, and each adds up the others' sums for its part of the tile,
// always in the same order. A tile leaves through shared memory, a warp's 16 rows of 64 columns at
// a time.
#pragma once

#include <cstddef>

#include "_shim/async_shim.cuh"
#include "gemm/kernels/gemm_wgmma_args.hpp"
#include "gemm/kernels/gemm_wgmma_store_sm90a.cuh"
#include "gemm/kernels/wgmma_ring_sm90a.cuh"
#include "gemm/kernels/wgmma_sm90a.cuh"

namespace rm::cuda_ops {

inline constexpr int kWgmmaM = 128, kWgmmaK = 64;

/// What the two consumer warpgroups do: 64 rows each of the same tile; the same of a part of its K;
/// or a tile each in turns, so that one's epilogue runs beside the other's products.
enum class WgmmaMode { together, parts, turns };

template <int kN, WgmmaMode kMode>
struct WgmmaLayout {
  static constexpr bool kSplit = kMode == WgmmaMode::parts, kTurns = kMode == WgmmaMode::turns;
  static constexpr int kTall = kTurns ? 2 : 1;  // times 64 rows of a consumer warpgroup
  // more than 168 registers a consumer: a whole warpgroup gives its own up
  static constexpr bool kWide = kN * kTall == 256;
  static constexpr int kChunks = kSplit ? 1 : 2;  // of 64 columns, in a turn of the epilogue
  static constexpr int kThreads = kWide ? 384 : 320;
  static constexpr int kA = kWgmmaM * kWgmmaK * 2, kB = kN * kWgmmaK * 2;
  static constexpr int kStages = kN == 256 ? 4 : kN == 128 ? (kSplit ? 4 : 6) : kSplit ? 6 : 8;
  static constexpr int kOut = kStages * (kA + kB);   // two buffers of 2 KiB a consumer warp
  static constexpr int kSums = kOut + 8 * 2 * 2048;  // the accumulators that others will add up
  static constexpr int kBias = kSums + (kSplit ? kWgmmaM * kN * 4 : 0);  // one a warpgroup
  static constexpr int kBarriers = kBias + 2 * kN * 4;
  static constexpr int kBytes = kBarriers + 2 * kStages * 8;
};

/// The tile of a unit of work in this block.
struct WgmmaTile {
  int m, n, batch;
};
template <int kN>
__device__ __forceinline__ WgmmaTile wgmma_tile(const WgmmaProblem& p, int unit, int rank) {
  const int in_batch = p.units_m * p.units_n, batch = unit / in_batch;
  const int at = unit - batch * in_batch, in_group = p.group * p.units_n;
  const int group = at / in_group, first = group * p.group, rest = at - group * in_group;
  const int rows = min(p.units_m - first, p.group), column = rest / rows;
  const int row = (first + rest - column * rows) * p.share + (p.share > 1 ? rank : 0);
  return {row * kWgmmaM, column * kN, batch};
}

/// Where a thread stands in the ring.
struct Ring {
  std::uint32_t full, empty;  // the first barriers
  int stage = 0;
  std::uint32_t phase = 0;
  template <int kStages>
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
  template <int kStages>
  __device__ __forceinline__ void skip(int blocks) {
    const int at = stage + blocks;
    stage = at % kStages, phase ^= static_cast<std::uint32_t>(at / kStages) & 1;
  }
};

/// One thread: all of a tile's operands into the ring.
template <int kN, WgmmaMode kMode>
__device__ __forceinline__ void wgmma_produce(const WgmmaProblem& p, const WgmmaTile& tile,
                                              Ring& ring, std::uint32_t shared, int rank) {
  using L = WgmmaLayout<kN, kMode>;
  const int az = p.a_batched ? tile.batch : 0, bz = p.b_batched ? tile.batch : 0;
  const int share = p.share, first = share > 1 ? rank : 0, columns = kN / share;
  const unsigned mask = (1u << share) - 1;
  int k = L::kSplit && p.split ? rank * p.k_blocks * kWgmmaK : 0;
  for (int block = 0; block < p.k_blocks; ++block, k += kWgmmaK) {
    const std::uint32_t a = shared + ring.stage * (L::kA + L::kB), b = a + L::kA;
    const std::uint32_t full = ring.full + ring.stage * 8;
    ring_wait(ring.empty + ring.stage * 8, ring.phase ^ 1);
    barrier_expect(full, L::kA + L::kB);
    if (p.trans_a) {
      load_box(a, &p.a, full, tile.m, k, az);
      load_box(a + 8192, &p.a, full, tile.m + 64, k, az);
    } else {
      load_box(a, &p.a, full, k, tile.m, az);
    }
    if (share == 1) {
      if (p.trans_b) {
#pragma unroll
        for (int i = 0; i < kN / 64; ++i) {
          load_box(b + i * 8192, &p.b, full, tile.n + i * 64, k, bz);
        }
      } else {
        load_box(b, &p.b, full, k, tile.n, bz);
      }
    } else if (p.trans_b) {  // rows of 64 columns: whole slabs, or a part of one
      const int rows = columns < 64 ? columns : 64;
      for (int row = first * columns; row < (first + 1) * columns; row += rows) {
        load_box_all(b + row * 128, &p.b, full, tile.n + row / 64 * 64, k + row % 64, bz, mask);
      }
    } else {
      load_box_all(b + first * columns * 128, &p.b, full, k, tile.n + first * columns, bz, mask);
    }
    ring.next<L::kStages>();
  }
}

/// A stage has been read, says one thread to each block of the cluster.
__device__ __forceinline__ void wgmma_release(const Ring& ring, int stage, int cluster,
                                              int thread) {
  if (thread >= cluster) return;
  const std::uint32_t empty = ring.empty + stage * 8;
  if (cluster == 1) {
    barrier_arrive(empty);
  } else {
    arrive_in_block(empty, thread);
  }
}

/// A warpgroup: acc = the product of its 64 rows.
template <class T, int kN, WgmmaMode kMode, int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_consume(const WgmmaProblem& p,
                                              float (&acc)[WgmmaLayout<kN, kMode>::kTall][kN / 2],
                                              Ring& ring, std::uint32_t shared, int group,
                                              int cluster, int thread, bool more) {
  using L = WgmmaLayout<kN, kMode>;
  int blocks = p.k_blocks;
  float zero = 0.0f;
  asm volatile(""
               : "+r"(blocks), "+f"(zero));  // in registers: ptxas would read, compute in the loop
#pragma unroll
  for (int r = 0; r < L::kTall; ++r) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) acc[r][i] = zero;
  }
  int previous = 0;
  for (int block = 0; block < blocks; ++block) {
    const std::uint32_t a = shared + ring.stage * (L::kA + L::kB);
    const std::uint64_t da =
        wgmma_descriptor(a + (L::kTurns ? 0 : group * 8192), kTransA ? 8192 : 16);
    const std::uint64_t db = wgmma_descriptor(a + L::kA, kTransB ? 8192 : 16);
    ring_wait(ring.full + ring.stage * 8, ring.phase);
    if (L::kTurns && more && block + 1 == blocks) named_barrier_arrive(3 + (group ^ 1), 256);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int r = 0; r < L::kTall; ++r) {
        Wgmma<T, kN, kTransA, kTransB>::run(acc[r], da + k * (kTransA ? 128 : 2) + r * (8192 / 16),
                                            db + k * (kTransB ? 128 : 2));
      }
    }
    wgmma_commit();
    wgmma_wait<1>();  // the block before this one has been read
    if (block > 0) wgmma_release(ring, previous, cluster, thread);
    previous = ring.stage;
    ring.next<L::kStages>();
  }
  wgmma_wait<0>();
  wgmma_release(ring, previous, cluster, thread);
}

/// Where all threads of a cluster meet and see what the others have written. Not by barriers in
/// shared memory: compute-sanitizer's racecheck follows this one.
struct ClusterMeeting {
  bool left = false;  // this thread has said that it has read the others' parts

  __device__ __forceinline__ void arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  }
  __device__ __forceinline__ void wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  }
  __device__ __forceinline__ void write() {  // once all have left the unit before
    if (left) wait();
    left = false;
  }
  __device__ __forceinline__ void read() { arrive(), wait(); }
  __device__ __forceinline__ void leave() { arrive(), left = true; }
};

/// The parts of K that a tile was cut into meet: afterwards acc holds the sums in the chunks of 64
/// columns that this block owns.
template <int kN>
struct WgmmaSums {
  std::uint32_t memory;
  int cluster, rank, group, thread;

  __device__ __forceinline__ bool owns(int chunk) const {
    return (chunk + group * (kN / 64)) % cluster == rank;
  }
  __device__ __forceinline__ std::uint32_t place(int chunk, int i) const {
    return memory + ((chunk * 8 + i) * 256 + group * 128 + thread) * 16;
  }
  __device__ __forceinline__ void run(float (&acc)[kN / 2], ClusterMeeting& meeting) {
    meeting.write();
#pragma unroll
    for (int c = 0; c < kN / 64; ++c) {
      if (owns(c)) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) store_shared(place(c, i), acc + c * 32 + i * 4);
    }
    meeting.read();
#pragma unroll
    for (int c = 0; c < kN / 64; ++c) {
      if (!owns(c)) continue;
      for (int other = 0; other < cluster; ++other) {
        if (other == rank) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float4 v = load_in_block(place(c, i), other);
          float* sum = acc + c * 32 + i * 4;
          sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
        }
      }
    }
    meeting.leave();
  }
};

/// Parameters come from memory when they are first read, one line after the other: all at once
/// here.
__device__ __forceinline__ void wgmma_touch(const WgmmaProblem& p) {
#pragma unroll
  for (int at = offsetof(WgmmaProblem, m); at < static_cast<int>(sizeof p); at += 32) {
    asm volatile("" ::"r"(*reinterpret_cast<const int*>(reinterpret_cast<const char*>(&p) + at)));
  }
}

/// An idle warp: the column sums that came as partial sums, in a fixed order.
template <class T>
__device__ __forceinline__ void wgmma_column_sums(const ColumnSums& sums) {
  const int step = static_cast<int>(gridDim.x) * 32;
  for (int n = blockIdx.x * 32 + threadIdx.x % 32; n < sums.columns; n += step) {
    float sum = 0.0f;
    for (int i = 0; i < sums.count; ++i) {
      sum += sums.partial[static_cast<std::int64_t>(i) * sums.columns + n];
    }
    static_cast<T*>(sums.out)[n] = from_float<T>(sum);
  }
}

template <class T, int kN, WgmmaMode kMode>
__global__ void __launch_bounds__(WgmmaLayout<kN, kMode>::kThreads, 1)
    gemm_wgmma(const __grid_constant__ WgmmaArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere why_not says that it does not run
  using L = WgmmaLayout<kN, kMode>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const std::uint32_t shared = shared_address(memory);
  std::uint32_t cluster, rank;
  asm("mov.u32 %0, %%cluster_nctarank;\n" : "=r"(cluster));
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  Ring ring{shared + L::kBarriers, shared + L::kBarriers + L::kStages * 8};
  if (threadIdx.x == 0) {
    if (shared % 1024 != 0) __trap();
    for (int i = 0; i < L::kStages; ++i) {
      barrier_init(ring.full + i * 8, 1);
      barrier_init(ring.empty + i * 8, (L::kTurns ? 1 : 2) * static_cast<int>(cluster));
    }
    barrier_init_done();
  }
  if (threadIdx.x == 256) {
    prefetch_map(&args.problem[0].a);
    prefetch_map(&args.problem[0].b);
    if (args.problem[0].c_lines) prefetch_map(&args.problem[0].c_map);
  }
  const int step = gridDim.x / cluster, start = blockIdx.x / cluster;
  const int units0 = args.problem[0].units;
  const int units = units0 + (args.problems > 1 ? args.problem[1].units : 0);
  const auto tile_of = [&](int unit) {
    const bool second = unit >= units0;
    return wgmma_tile<kN>(args.problem[second], second ? unit - units0 : unit, rank);
  };
  wgmma_touch(args.problem[start >= units0]);
  WgmmaTile tile = tile_of(start);
  if (cluster == 1) {
    __syncthreads();
  } else {  // barrier_init_done has released what the others must see
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
  }
  wait_for_previous();
  launch_dependents();
  const int warp = uniform_warp(), lane = threadIdx.x % 32;
  ClusterMeeting meeting;
  if (warp >= 8) {
    if constexpr (L::kWide) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 9) wgmma_column_sums<T>(args.sums);
    const auto meet = [&](int unit) {  // as WgmmaSums
      if (args.problem[unit >= units0].split) meeting.write(), meeting.read(), meeting.leave();
    };
    if (warp == 8 && elect_lane()) {
      for (int unit = start; unit < units; unit += step) {
        if (unit != start) tile = tile_of(unit);
        wgmma_produce<kN, kMode>(args.problem[unit >= units0], tile, ring, shared, rank);
        if constexpr (L::kSplit) meet(unit);
      }
    } else if constexpr (L::kSplit) {
      for (int unit = start; unit < units; unit += step) meet(unit);
    }
  } else {
    if constexpr (L::kWide) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = warp / 4, thread = threadIdx.x % 128;
    float* bias = reinterpret_cast<float*>(memory + L::kBias) + group * kN;
    WgmmaStore<T> store{shared + L::kOut + warp * 4096, 0, lane};
    WgmmaSums<kN> sums{shared + L::kSums, static_cast<int>(cluster), static_cast<int>(rank), group,
                       thread};
    // kept in registers: ptxas would find out where the block lies in every turn of a loop
    asm volatile("" : "+r"(ring.full), "+r"(ring.empty));
    float acc[L::kTall][kN / 2];
    float* const v = acc[0];
    constexpr int kPart = L::kChunks * 32, kParts = L::kTall * kN / 2 / kPart;
    constexpr int kBias = (kN + 127) / 128;
    int turn = 0;
    for (int unit = start; unit < units; unit += step, turn ^= 1) {
      const WgmmaProblem& p = args.problem[unit >= units0];
      if (L::kTurns && turn != group) {
        ring.skip<L::kStages>(p.k_blocks);
        continue;
      }
      const bool more = unit + step < units;
      if (unit != start) tile = tile_of(unit);
      const EpilogueArgs& e = p.epilogue;
      T column_bias[kBias];  // on its way beside the products
#pragma unroll
      for (int i = 0; i < kBias; ++i) {
        const int n = tile.n + i * 128 + thread;
        const bool there = e.bias_kind == static_cast<int>(BiasKind::column) && n < p.n;
        column_bias[i] = there ? static_cast<const T*>(e.bias)[n] : from_float<T>(0.0f);
      }
      // the ring tells a turn of the barriers from the next, no more: the other has seen all its
      // own
      if (L::kTurns && unit != start) named_barrier(3 + group, 256);
      if (p.trans_a) {
        if (p.trans_b) {
          wgmma_consume<T, kN, kMode, 1, 1>(p, acc, ring, shared, group, cluster, thread, more);
        } else {
          wgmma_consume<T, kN, kMode, 1, 0>(p, acc, ring, shared, group, cluster, thread, more);
        }
      } else if (p.trans_b) {
        wgmma_consume<T, kN, kMode, 0, 1>(p, acc, ring, shared, group, cluster, thread, more);
      } else {
        wgmma_consume<T, kN, kMode, 0, 0>(p, acc, ring, shared, group, cluster, thread, more);
      }
      const bool split = L::kSplit && p.split;
      if (split) sums.run(acc[0], meeting);
      named_barrier(1 + group, 128);  // the last tile's bias has been read
#pragma unroll
      for (int i = 0; i < kBias; ++i) {
        if (i * 128 + thread < kN) bias[i * 128 + thread] = to_float(column_bias[i]);
      }
      named_barrier(1 + group, 128);
      // a short loop over what lies in the first registers: code that runs once waits for itself
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        const int m = tile.m + (L::kTurns ? part : group) * 64 + warp % 4 * 16;
        const int chunk = L::kTurns ? 0 : part * L::kChunks, n = tile.n + chunk * 64;
        if (part > 0) {
#pragma unroll
          for (int i = 0; i < (kParts - 1) * kPart; ++i) v[i] = v[i + kPart];
        }
        if (n >= p.n || (split && !sums.owns(chunk))) continue;
        float row_bias[2];
        wgmma_row_bias<T>(p, m, lane, row_bias);
        wgmma_epilogue<T, L::kChunks>(p, v, bias + chunk * 64, row_bias, store, n, m, tile.batch);
      }
    }
  }
  if (warp < 8 && lane == 0) store_boxes_wait();
  if (L::kSplit) meeting.write();
  if (cluster > 1) meeting.read();  // the other block may still write here
#endif
}

}  // namespace rm::cuda_ops
