// A block's tiles in the wgmma gemm: where they lie, one thread that copies their operands into the
// ring, warpgroups that multiply what is there.
#pragma once

#include "_shim/async_shim.cuh"
#include "gemm/kernels/gemm_wgmma_args.hpp"
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
  // The second warpgroup waits before its last blocks of K until the first is through with its own,
  // so that one epilogue runs beside products and the other has the schedulers alone.
  static constexpr int kLate = kMode == WgmmaMode::together && kN == 256 ? 3 : 0;
  static constexpr int kTall = kTurns ? 2 : 1;  // times 64 rows of a consumer warpgroup
  // more than 168 registers a consumer: a whole warpgroup gives its own up
  static constexpr bool kWide = kN * kTall == 256;
  static constexpr int kValues = kTall * kN / 2;  // a consumer's accumulators
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
  const int batch = static_cast<int>(p.in_batch.quotient(unit));
  const int at = unit - batch * static_cast<int>(p.in_batch.d);
  const int group = static_cast<int>(p.in_group.quotient(at)), first = group * p.group;
  const int rest = at - group * static_cast<int>(p.in_group.d);
  const FastDivisor rows = first + p.group > p.units_m ? p.last_rows : p.whole_rows;
  const int column = static_cast<int>(rows.quotient(rest));
  const int row =
      (first + rest - column * static_cast<int>(rows.d)) * p.share + (p.share > 1 ? rank : 0);
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

/// One thread: a tile's operands into the ring, blocks of K from `block` to `end`;
/// `load_b(address, barrier, k)` copies b's.
template <int kN, WgmmaMode kMode, class LoadB>
__device__ __forceinline__ void wgmma_fill(const WgmmaProblem& p, const WgmmaTile& tile, Ring& ring,
                                           std::uint32_t shared, int rank, int block, int end,
                                           LoadB&& load_b) {
  using L = WgmmaLayout<kN, kMode>;
  const int az = p.a_batched ? tile.batch : 0;
  int k = (block + (L::kSplit && p.split ? rank * p.k_blocks : 0)) * kWgmmaK;
#pragma unroll 1
  for (; block < end; ++block, k += kWgmmaK) {
    const std::uint32_t a = shared + ring.stage * (L::kA + L::kB);
    const std::uint32_t full = ring.full + ring.stage * 8;
    barrier_wait_or_trap(ring.empty + ring.stage * 8, ring.phase ^ 1);
    barrier_expect(full, L::kA + L::kB);
    if (p.trans_a) {
      load_box(a, &p.a, full, tile.m, k, az);
      load_box(a + 8192, &p.a, full, tile.m + 64, k, az);
    } else {
      load_box(a, &p.a, full, k, tile.m, az);
    }
    load_b(a + L::kA, full, k);
    ring.next<L::kStages>();
  }
}

template <int kN, WgmmaMode kMode>
__device__ __forceinline__ void wgmma_produce(const WgmmaProblem& p, const WgmmaTile& tile,
                                              Ring& ring, std::uint32_t shared, int rank, int block,
                                              int end) {
  const int bz = p.b_batched ? tile.batch : 0;
  wgmma_fill<kN, kMode>(p, tile, ring, shared, rank, block, end,
                        [&](std::uint32_t b, std::uint32_t full, int k) {
                          if (!p.trans_b) return load_box(b, &p.b, full, k, tile.n, bz);
#pragma unroll
                          for (int i = 0; i < kN / 64; ++i) {
                            load_box(b + i * 8192, &p.b, full, tile.n + i * 64, k, bz);
                          }
                        });
}

/// The same where the cluster's blocks load a part of b each, for all of them.
template <int kN, WgmmaMode kMode>
__device__ __forceinline__ void wgmma_produce_shared(const WgmmaProblem& p, const WgmmaTile& tile,
                                                     Ring& ring, std::uint32_t shared, int rank) {
  const int bz = p.b_batched ? tile.batch : 0;
  const int columns = p.share == 2 ? kN / 2 : kN / 4, from = rank * columns;
  const unsigned mask = (1u << p.share) - 1;
  wgmma_fill<kN, kMode>(
      p, tile, ring, shared, rank, 0, p.k_blocks, [&](std::uint32_t b, std::uint32_t full, int k) {
        if (!p.trans_b) {
          return load_box_all(b + from * 128, &p.b, full, k, tile.n + from, bz, mask);
        }
        const int rows =
            columns < 64 ? columns : 64;  // of 64 columns: whole slabs, or a part of one
        for (int row = from; row < from + columns; row += rows) {
          load_box_all(b + row * 128, &p.b, full, tile.n + row / 64 * 64, k + row % 64, bz, mask);
        }
      });
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
  // where K is shorter, the first could arrive for a tile before the second has left the last one
  const int late = L::kLate && blocks > L::kLate ? blocks - L::kLate : -1;
  for (int block = 0; block < blocks; ++block) {
    const std::uint32_t a = shared + ring.stage * (L::kA + L::kB);
    const std::uint64_t da =
        wgmma_descriptor(a + (L::kTurns ? 0 : group * 8192), kTransA ? 8192 : 16);
    const std::uint64_t db = wgmma_descriptor(a + L::kA, kTransB ? 8192 : 16);
    barrier_wait_or_trap(ring.full + ring.stage * 8, ring.phase);
    if (L::kTurns && more && block + 1 == blocks) named_barrier_arrive(3 + (group ^ 1), 256);
    if (L::kLate && group == 1 && block == late) named_barrier(3, 256);
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
    if (L::kLate && late >= 0 && group == 0 && block + 1 == blocks) {
      named_barrier_arrive(3, 256);
    }
    previous = ring.stage;
    ring.next<L::kStages>();
  }
  wgmma_wait<0>();
  wgmma_release(ring, previous, cluster, thread);
}

}  // namespace rm::cuda_ops
