// Products of 16-bit floats by wgmma, fed by the copy engine: tiles of 128 x kN, 64 deep. A block
// is two consumer warpgroups, a warp of which one thread issues the copies, and one that may sum
// columns for somebody else; they meet at a ring of barriers. Blocks are persistent. The blocks of
// a cluster stand below each other and share b's tile, each loading a part of it for all; or they
// take a part of K of one tile each, and each adds up the others' sums for its part of the tile,
// always in the same order. A tile leaves through shared memory, a warp's 16 rows of 64 columns at
// a time.
#pragma once

#include <cstddef>

#include "gemm/kernels/gemm_wgmma_parts_sm90a.cuh"
#include "gemm/kernels/gemm_wgmma_store_sm90a.cuh"
#include "gemm/kernels/gemm_wgmma_tiles_sm90a.cuh"

namespace rm::cuda_ops {

/// Parameters come from memory when they are first read, one line after the other: all at once
/// here, by a warp that waits anyway. What is read at addresses known to the compiler it leaves
/// out.
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
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = WgmmaLayout<kN, kMode>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const std::uint32_t shared = shared_address(memory);
  std::uint32_t cluster, rank;
  asm("mov.u32 %0, %%cluster_nctarank;\n" : "=r"(cluster));
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  Ring ring{shared + L::kBarriers, shared + L::kBarriers + L::kStages * 8};
  const int warp = uniform_warp(), lane = threadIdx.x % 32;
  const int shift = static_cast<int>(cluster >> 1);  // of 1, 2 or 4
  const int step = static_cast<int>(gridDim.x) >> shift;
  const int start = static_cast<int>(blockIdx.x) >> shift;
  const auto tile_of = [&](int unit) {
    const int units0 = args.problem[0].units;
    const bool second = unit >= units0;
    return wgmma_tile<kN>(args.problem[second], second ? unit - units0 : unit, rank);
  };
  ClusterMeeting meeting;
  if (warp >= 8) {
    if constexpr (L::kWide) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    // Instructions arrive late, the first time: what leads to the first copies is short and comes
    // first. Not before the branch: ptxas would take the consumers' addresses for different in each
    // lane.
    int filled = 0;
    if (warp == 8 && elect_lane()) {
      const WgmmaProblem& p = args.problem[0];
      prefetch_map(&p.a);
      prefetch_map(&p.b);
      for (int i = 0; i < L::kStages; ++i) {
        barrier_init(ring.full + i * 8, 1);
        barrier_init(ring.empty + i * 8, (L::kTurns ? 1 : 2) * static_cast<int>(cluster));
      }
      barrier_init_done();
      if (cluster == 1 && start < p.units) {
        const WgmmaTile tile = wgmma_tile<kN>(p, start, 0);
        filled = min(p.k_blocks, L::kStages);
        wait_for_previous();
        Ring first = ring;
        wgmma_produce<kN, kMode>(p, tile, first, shared, 0, 0, filled);
      }
    }
    __syncwarp();
    // the copies of a single block need not wait for the others: nobody reads the barriers yet
    cluster == 1 ? named_barrier_arrive(5, L::kThreads) : cluster_start();
    const auto meet = [&](int unit) {  // as WgmmaSums
      const int units0 = args.problem[0].units;
      if (args.problem[unit >= units0].split) meeting.write(), meeting.read(), meeting.leave();
    };
    const auto count = [&] {
      return args.problem[0].units + (args.problems > 1 ? args.problem[1].units : 0);
    };
    if (warp == 8 && elect_lane()) {
      if (shared % 1024 != 0) __trap();
      wait_for_previous();
      ring.skip<L::kStages>(filled);
      const int units = count();
      for (int unit = start; unit < units; unit += step, filled = 0) {
        const WgmmaProblem& p = args.problem[unit >= args.problem[0].units];
        const WgmmaTile tile = tile_of(unit);
        if (p.share == 1) {
          wgmma_produce<kN, kMode>(p, tile, ring, shared, rank, filled, p.k_blocks);
        } else {
          wgmma_produce_shared<kN, kMode>(p, tile, ring, shared, rank);
        }
        if constexpr (L::kSplit) meet(unit);
      }
    } else {
      if (warp == 9) {
        if (args.problem[0].c_lines && elect_lane()) prefetch_map(&args.problem[0].c_map);
        launch_dependents();
        wgmma_touch(args.problem[cluster >> 8]);
        wait_for_previous();
        wgmma_column_sums<T>(args.sums);
      }
      if constexpr (L::kSplit) {
        const int units = count();
        for (int unit = start; unit < units; unit += step) meet(unit);
      }
    }
  } else {
    if constexpr (L::kWide) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int units0 = args.problem[0].units;
    const int units = units0 + (args.problems > 1 ? args.problem[1].units : 0);
    WgmmaTile tile = tile_of(start);
    cluster == 1 ? named_barrier(5, L::kThreads) : cluster_start();
    launch_dependents();
    wait_for_previous();
    const int group = warp / 4, thread = threadIdx.x % 128;
    float* bias = reinterpret_cast<float*>(memory + L::kBias) + group * kN;
    WgmmaStore<T> store{shared + L::kOut + warp * 4096, lane, 0};
    WgmmaSums<kN> sums{shared + L::kSums, static_cast<int>(cluster), static_cast<int>(rank), group,
                       thread};
    // kept in registers: ptxas would find out where the block lies in every turn of a loop
    asm volatile("" : "+r"(ring.full), "+r"(ring.empty));
    float acc[L::kTall][kN / 2];
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
      // looked up beside the products, as the bias is
      float scale = e.scale;
      int kind = e.activation, rows = p.m, columns = p.n;
      int plain = p.plain;
      const CUtensorMap* map = &p.c_map;
      const bool halves = plain && (kind == static_cast<int>(Activation::gelu) ||
                                    kind == static_cast<int>(Activation::gelu_tanh));
      const float half = halves ? 0.5f : 1.0f;
      scale *= half;
      asm volatile("" : "+f"(scale), "+r"(kind), "+r"(rows), "+r"(columns), "+r"(plain), "+l"(map));
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
        if (i * 128 + thread < kN) bias[i * 128 + thread] = to_float(column_bias[i]) * half;
      }
      named_barrier(1 + group, 128);
      const int top = tile.m + (L::kTurns ? 0 : group) * 64 + warp % 4 * 16;
      if (plain) {
        const WgmmaPlace at{top, tile.n, 0, tile.batch};
        const auto finish = [&](auto kind) {
          finish_plain<T, decltype(kind)::value, L::kValues, L::kTurns>(map, acc[0], scale, bias,
                                                                        store, at, rows, columns);
        };
        switch (static_cast<Activation>(kind)) {
          case Activation::relu:
            finish(std::integral_constant<Activation, Activation::relu>{});
            break;
          case Activation::gelu:
            finish(std::integral_constant<Activation, Activation::gelu>{});
            break;
          case Activation::gelu_tanh:
            finish(std::integral_constant<Activation, Activation::gelu_tanh>{});
            break;
          case Activation::silu:
            finish(std::integral_constant<Activation, Activation::silu>{});
            break;
          default:
            finish(std::integral_constant<Activation, Activation::none>{});
        }
        continue;
      }
      float2 row_bias[L::kTall];
#pragma unroll
      for (int r = 0; r < L::kTall; ++r) row_bias[r] = wgmma_row_bias<T>(p, top + r * 64, lane);
#pragma unroll 1
      for (int i = 0; i < L::kValues / kTurnValues; ++i) {
        const int r = i / (kN / 32), chunk = i % (kN / 32) / 2;
        const WgmmaPlace at{top + r * 64, tile.n + chunk * 64, i % 2, tile.batch};
        if (at.n >= p.n || (split && !sums.owns(chunk))) continue;
        float x[kTurnValues];
        take_values<L::kValues>(acc[0], i, x);
        wgmma_epilogue<T>(p, x, bias + chunk * 64, r ? row_bias[L::kTall - 1] : row_bias[0], store,
                          at);
      }
    }
  }
  if (warp < 8 && lane == 0) store_boxes_wait<0>();
  if (L::kSplit) meeting.write();
  if (cluster > 1) meeting.read();  // the other block may still write here
#else
  __trap();  // why_not keeps other architectures away
#endif
}

}  // namespace rm::cuda_ops
