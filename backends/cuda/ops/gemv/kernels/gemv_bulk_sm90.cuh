// Weights streamed by bulk copies into shared memory, started before the previous kernel has ended.
// A tile is 8 KiB: a piece of 8 * kBlocks neighbouring rows of w. The warps of a block take its
// tiles in turn; each owns one stage, asks for its next tile when it has used the last, and never
// waits for another warp. The last warp to finish a group of rows adds the sums up, in an order
// that does not depend on who that is. (A warp that asks for others, or stages that all warps read,
// cost a third of the bandwidth.) 16-bit x: tensor cores, up to 8 rows of x at the cost of one.
// fp32: plain FMAs. Rows of a stage are 128-byte aligned: padded against bank conflicts, copies ran
// at half the speed. For M <= 8, rows of whole 16-byte vectors. Bound: reading w.
#pragma once

#include "gemv/kernels/gemv_ring_sm90.cuh"
#include "gemv/kernels/gemv_unpack_sm90.cuh"

namespace rm::cuda_ops {

/// Bytes of a row in one tile.
__host__ __device__ constexpr int gemv_chunk(int blocks) { return 1024 / blocks; }

template <class T, int kBits>
inline constexpr int kGemvElementBits = kBits == 0 ? 8 * sizeof(T) : kBits;

/// Asks for the tiles of one warp. Called by one lane.
template <class T, int kBits, int kBlocks>
struct GemvAsker {
  static constexpr int kChunk = gemv_chunk(kBlocks), kRows = 8 * kBlocks,
                       kK = kChunk * 8 / kGemvElementBits<T, kBits>;  // elements of a chunk
  const GemvArgs& p;
  std::uint32_t bar, stage;

  __device__ int length(const GemvTile& t) const { return min(kK, p.k - t.chunk * kK); }
  __device__ void weights(const GemvTile& t) const {
    const int row0 = (blockIdx.x + t.turn * gridDim.x) * kRows, rows = min(kRows, p.n - row0);
    const int row_bytes = length(t) * kGemvElementBits<T, kBits> / 8;
    int bytes = row_bytes * rows;
    if (!p.x_resident) bytes += p.m * length(t) * static_cast<int>(sizeof(T));
    barrier_expect(bar, bytes);
    const char* w = static_cast<const char*>(p.w) + row0 * p.w_pitch + t.chunk * kChunk;
#pragma unroll 4
    for (int r = 0; r < rows; ++r, w += p.w_pitch) {
      bulk_copy(stage + r * kChunk, w, row_bytes, bar);
    }
  }
  __device__ void staged_x(const GemvTile& t) const {
    const T* x = static_cast<const T*>(p.x) + t.chunk * kK;
    for (int m = 0; m < p.m; ++m, x += p.x_pitch) {
      bulk_copy(stage + p.x_at + m * p.x_smem_pitch, x, length(t) * sizeof(T), bar);
    }
  }
};

/// Scales of a tile, 16-byte pieces, one a lane and turn; every lane arrives when its own are
/// there.
template <class T, int kBits, int kBlocks>
__device__ __forceinline__ void gemv_ask_scales(const GemvArgs& p, const GemvTile& t,
                                                std::uint32_t bar, std::uint32_t at) {
  using Asker = GemvAsker<T, kBits, kBlocks>;
  const int row0 = (blockIdx.x + t.turn * gridDim.x) * Asker::kRows;
  const int first = t.chunk * Asker::kK >> p.group_shift,
            last = (min((t.chunk + 1) * Asker::kK, p.k) - 1) >> p.group_shift;
  for (int i = threadIdx.x % 32; i < (last - first + 1) * kBlocks; i += 32) {
    const int row = row0 + i % kBlocks * 8;
    if (row >= p.n) continue;
    const T* from = static_cast<const T*>(p.scales) + (first + i / kBlocks) * p.scales_pitch + row;
    copy_16_async(at + i * 16, from, true);
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

/// Sums of one warp over its columns of a group, 16-bit x: lane (g, t) ends with rows 2t, 2t+1 of
/// each block of 8 rows of w against row g of x. Rows of x beyond M repeat the last.
template <class T, int kBits, int kBlocks>
struct GemvTensorSums {
  using Unpack = GemvUnpack<T, kBits>;
  float sum[kBlocks][2][4];  // two chains: a product waits for the one before in its chain
  __device__ void clear() {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[b][0][i] = sum[b][1][i] = 0.0f;
    }
  }
  __device__ static int x_row(const GemvArgs& p) {
    return min(static_cast<int>(threadIdx.x % 32 / 4), p.m - 1) * p.x_smem_pitch;
  }
  /// What a step reads, before anything is computed from it.
  struct Loaded {
    uint4 w[kBlocks], x[Unpack::kPairs / 4];
    Pack<T, 2> scale[kBlocks];
  };
  __device__ __forceinline__ static void load(const GemvArgs&, const unsigned char* w_at,
                                              bool inside, const unsigned char* x_at,
                                              const unsigned char* scales_at, Loaded& out) {
#pragma unroll
    for (int i = 0; i < Unpack::kPairs / 4; ++i) out.x[i] = read_16(x_at + i * 16, inside);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      out.w[b] = read_16(w_at + b * 8 * gemv_chunk(kBlocks), inside);
      if constexpr (kBits != 0) {
        out.scale[b] =
            *reinterpret_cast<const Pack<T, 2>*>(scales_at + b * 16 + threadIdx.x % 4 * 4);
      }
    }
  }
  __device__ __forceinline__ void add(const GemvArgs&, const Loaded& in) {
    std::uint32_t x[Unpack::kPairs];
    gemv_x<kBits>(in.x, x);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      std::uint32_t w[Unpack::kPairs];
      Unpack::weights(in.w[b], w);
      if constexpr (kBits == 0) {
        mma_16816<T>(sum[b][0], x[0], 0, x[1], 0, w[0], w[1]);
        mma_16816<T>(sum[b][1], x[2], 0, x[3], 0, w[2], w[3]);
      } else {
        float part[2][4] = {};
#pragma unroll
        for (int i = 0; i < Unpack::kPairs; i += 2) {
          mma_16816<T>(part[i / 2 % 2], x[i], 0, x[i + 1], 0, w[i], w[i + 1]);
        }
        sum[b][0][0] += (part[0][0] + part[1][0]) * to_float(in.scale[b].v[0]);
        sum[b][0][1] += (part[0][1] + part[1][1]) * to_float(in.scale[b].v[1]);
      }
    }
  }
  __device__ void store(float* sums, int m) {
    const int row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    if (row >= m) return;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      *reinterpret_cast<float2*>(&sums[row * 8 * kBlocks + b * 8 + pair * 2]) =
          make_float2(sum[b][0][0] + sum[b][1][0], sum[b][0][1] + sum[b][1][1]);
    }
  }
};

/// The same for fp32: lane (g, t) sums row g of each block over its own 4 columns of a step.
template <int kBlocks>
struct GemvFloatSums {
  float sum[kBlocks][kGemvMaxM];
  __device__ void clear() {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int m = 0; m < kGemvMaxM; ++m) sum[b][m] = 0.0f;
    }
  }
  __device__ static int x_row(const GemvArgs&) { return 0; }
  struct Loaded {
    float w[kBlocks][4];
    const unsigned char* x;
  };
  __device__ __forceinline__ static void load(const GemvArgs&, const unsigned char* w_at,
                                              bool inside, const unsigned char* x_at,
                                              const unsigned char*, Loaded& out) {
    out.x = inside ? x_at : nullptr;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      load_vec(reinterpret_cast<const float*>(w_at + b * 8 * gemv_chunk(kBlocks)), out.w[b]);
    }
  }
  __device__ __forceinline__ void add(const GemvArgs& p, const Loaded& in) {
    if (in.x == nullptr) return;
#pragma unroll
    for (int m = 0; m < kGemvMaxM; ++m) {
      if (m >= p.m) break;
      float x[4];
      load_vec(reinterpret_cast<const float*>(in.x + m * p.x_smem_pitch), x);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        sum[b][m] += in.w[b][0] * x[0] + in.w[b][1] * x[1] + in.w[b][2] * x[2] + in.w[b][3] * x[3];
      }
    }
  }
  __device__ void store(float* sums, int m) {
    const int row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kGemvMaxM; ++i) {
        if (i >= m) break;
        float v = sum[b][i];
        v += __shfl_xor_sync(0xffffffffu, v, 1);
        v += __shfl_xor_sync(0xffffffffu, v, 2);
        if (threadIdx.x % 4 == 0) sums[i * 8 * kBlocks + b * 8 + row] = v;
      }
    }
  }
};

/// One warp's sums over a tile that has arrived. A step is 64 bytes of each row.
template <class T, int kBits, int kBlocks, class Sums>
__device__ __forceinline__ void gemv_tile(const GemvArgs& p, const unsigned char* stage,
                                          const unsigned char* x, int chunk, Sums& sums) {
  using Asker = GemvAsker<T, kBits, kBlocks>;
  constexpr int kElementBits = kGemvElementBits<T, kBits>, kSteps = Asker::kChunk / 64;
  constexpr int kAhead = kBits == 0 ? 4 : 2;  // steps read before the first is used
  constexpr int kStepK = 64 * 8 / kElementBits, kXStep = kStepK * static_cast<int>(sizeof(T));
  const int row = threadIdx.x % 32 / 4, part = threadIdx.x % 4;
  const int k0 = chunk * Asker::kK, row_bytes = min(Asker::kK, p.k - k0) * kElementBits / 8;
  const unsigned char* w = stage + row * Asker::kChunk + part * 16;
  x += Sums::x_row(p) + part * (kXStep / 4);
  const int first_group = kBits == 0 ? 0 : k0 >> p.group_shift;
  const auto scales = [&](int i) {
    if constexpr (kBits == 0) return stage;
    const int k = k0 + i * kStepK;
    return stage + p.scales_at + ((k >> p.group_shift) - first_group) * 16 * kBlocks;
  };
  if (row_bytes == Asker::kChunk) {
    typename Sums::Loaded loaded[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      Sums::load(p, w + i * 64, true, x + i * kXStep, scales(i), loaded[i]);
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      sums.add(p, loaded[i % kAhead]);
      if (i + kAhead >= kSteps) continue;
      const int j = i + kAhead;
      Sums::load(p, w + j * 64, true, x + j * kXStep, scales(j), loaded[j % kAhead]);
    }
  } else {
    for (int i = 0; i * 64 < row_bytes; ++i) {
      typename Sums::Loaded loaded;
      Sums::load(p, w + i * 64, i * 64 + part * 16 < row_bytes, x + i * kXStep, scales(i), loaded);
      sums.add(p, loaded);
    }
  }
}

template <class T, int kBits, int kBlocks>
__device__ void gemv_run(const GemvArgs& p, const GemvMemory& s) {
  using Asker = GemvAsker<T, kBits, kBlocks>;
  using Sums =
      std::conditional_t<sizeof(T) == 4, GemvFloatSums<kBlocks>, GemvTensorSums<T, kBits, kBlocks>>;
  const int warp = uniform_warp(), lane = threadIdx.x % 32;
  const int all = (p.n + Asker::kRows - 1) / Asker::kRows;
  const int turns = (all - static_cast<int>(blockIdx.x) + gridDim.x - 1) / gridDim.x;
  const int at = s.stage + warp * p.stage_bytes;
  const unsigned char* stage = s.base + at;
  const Asker ask{p, s.full + 8 * warp, shared_address(s.base) + at};
  GemvTile tile{warp / p.chunks, warp % p.chunks};
  const auto ask_weights = [&](const GemvTile& t) {
    if (elect_lane()) ask.weights(t);
    if constexpr (kBits != 0) {
      gemv_ask_scales<T, kBits, kBlocks>(p, t, ask.bar, ask.stage + p.scales_at);
    }
  };
  if (tile.turn < turns) ask_weights(tile);
  wait_for_previous();  // x is written by the kernel before
  if (p.x_resident && p.x_small) {
    gemv_load_x<T>(p, s.base + s.x);
    __syncthreads();
  } else if (p.x_resident) {
    for (int m = warp; lane == 0 && m < p.m; m += blockDim.x / 32) {
      barrier_expect(s.x_bar, p.k * sizeof(T));
      bulk_copy(shared_address(s.base) + s.x + m * p.x_smem_pitch,
                static_cast<const T*>(p.x) + m * p.x_pitch, p.k * sizeof(T), s.x_bar);
    }
    barrier_wait(s.x_bar, 0);
  } else if (tile.turn < turns) {
    if (elect_lane()) ask.staged_x(tile);
  }
  Sums sums;
  sums.clear();
  int slot = tile.chunk, parity = 0;
  while (tile.turn < turns) {
    barrier_wait(ask.bar, parity);
    parity ^= 1;
    const unsigned char* x =
        p.x_resident ? s.base + s.x + tile.chunk * Asker::kK * static_cast<int>(sizeof(T))
                     : stage + p.x_at;
    gemv_tile<T, kBits, kBlocks>(p, stage, x, tile.chunk, sums);
    __syncwarp();
    GemvTile following = tile;
    following.next(p);
    if (following.turn < turns) {
      ask_weights(following);
      if (!p.x_resident && elect_lane()) ask.staged_x(following);
    }
    if (following.turn != tile.turn) {
      gemv_join<T, Asker::kRows>(p, s, tile.turn, slot, sums);
      sums.clear();
      slot = following.chunk;
    }
    tile = following;
  }
}

template <class T, int kBits, int kBlocks>
__global__ void __launch_bounds__(kGemvMaxWarps * 32, 1)
    gemv_bulk(const __grid_constant__ GemvArgs p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  GemvMemory s;
  s.base = memory;
  s.full = shared_address(memory);
  s.x_bar = s.full + 8 * kGemvMaxWarps;
  s.sums = 1024;
  s.x = s.sums + p.sums_bytes;
  s.stage = s.x + (p.x_resident ? p.m * p.x_smem_pitch : 0);
  launch_dependents();
  if (threadIdx.x < kGemvBuffers) {
    *s.counter(threadIdx.x) = 0;
    *s.generation(threadIdx.x) = 0;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < static_cast<int>(blockDim.x / 32); ++i) {
      barrier_init(s.full + 8 * i, 1 + (kBits != 0 ? 32 : 0));
    }
    barrier_init(s.x_bar, p.m);
    barrier_init_done();
  }
  __syncthreads();
  gemv_run<T, kBits, kBlocks>(p, s);
#else
  __trap();  // why_not keeps older architectures away
#endif
}

}  // namespace rm::cuda_ops
