// A block makes 16 x 32 elements of c; its eight warps share K, and their sums meet in shared memory in
// one order. All of K up to 256 is asked for at once: what bounds such a product is latency. For 64 rows
// and 256 columns there are 32 blocks, and the multiplications take less than the loads.
#pragma once

#include "_shim/epilogue_shim.cuh"
#include "_shim/launch_shim.hpp"
#include "ewise/kernels/ewise_math.cuh"
#include "small_gemm/kernels/small_gemm_args.hpp"

namespace rm::cuda_ops {

inline constexpr int kSmallRows = 16, kSmallColumns = 32, kSmallDepth = 256, kSmallWarps = 8;
// Rows of tiles are padded: neighbours along K lie in other banks, vectors stay on 16 bytes.
inline constexpr int kSmallPitchA = kSmallRows + 4, kSmallPitchB = kSmallColumns + 4;
inline constexpr int kSmallSums = kSmallRows * kSmallColumns;  // of a warp

/// Floats of shared memory for a chunk of K.
__host__ __device__ constexpr int small_floats(int depth) {
  constexpr int kMeet = kSmallWarps * (kSmallSums + kSmallRows);
  const int tiles = depth * (kSmallPitchA + kSmallPitchB);
  return tiles > kMeet ? tiles : kMeet;
}

/// A tile of kRows rows and up to kSmallDepth of K on its way to shared memory, [k][row].
template <int kRows, int kPitch>
struct SmallTile {
  static constexpr int kVectors = kRows * kSmallDepth / 4 / 256;  // of a thread
  float4 held[kVectors];

  __device__ __forceinline__ static void place(const TileOperand& o, int i, int* row, int* k) {
    if (o.read == TileRead::along_vectors) {
      *row = i % kRows, *k = i / kRows * 4;
    } else {
      *row = i % (kRows / 4) * 4, *k = i / (kRows / 4);
    }
  }

  __device__ __forceinline__ void ask(const TileOperand& o, int first, int k0, int depth) {
    if (o.read != TileRead::along_vectors && o.read != TileRead::across_vectors) return;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      int row, k;
      place(o, u * 256 + static_cast<int>(threadIdx.x), &row, &k);
      const bool inside = k < depth && first + row < o.rows;
      held[u] = inside ? *reinterpret_cast<const float4*>(o.data + (first + row) * o.row_step +
                                                          (k0 + k) * o.k_step)
                       : make_float4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ void put(const TileOperand& o, float* tile, int first, int k0,
                                      int depth) {
    const int thread = static_cast<int>(threadIdx.x);
    if (o.read == TileRead::along || o.read == TileRead::across) {
      const int total = kRows * depth;
      for (int i = thread; i < total; i += 256) {
        const bool along = o.read == TileRead::along;
        const int row = along ? i / depth : i % kRows, k = along ? i - row * depth : i / kRows;
        tile[k * kPitch + row] =
            first + row < o.rows ? o.data[(first + row) * o.row_step + (k0 + k) * o.k_step] : 0.0f;
      }
      return;
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      int row, k;
      place(o, u * 256 + thread, &row, &k);
      if (k >= depth) continue;
      if (o.read == TileRead::across_vectors) {
        *reinterpret_cast<float4*>(tile + k * kPitch + row) = held[u];
      } else {
        const float v[4] = {held[u].x, held[u].y, held[u].z, held[u].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) tile[(k + j) * kPitch + row] = v[j];
      }
    }
  }
};

/// The tile (row, column) of p's c; store(value, row, column) gets each of its elements.
template <class Store>
__device__ __forceinline__ void small_product(const SmallProduct& p, int row0, int column0,
                                              float* shared, Store&& store) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int ty = lane / 8, tx = lane % 8;
  const bool sums = p.sums != nullptr && column0 == 0;
  float acc[4][4] = {}, of_a[4] = {};
  for (int k0 = 0; k0 < p.k; k0 += kSmallDepth) {
    const int depth = min(kSmallDepth, p.k - k0);
    float* a = shared;
    float* b = shared + depth * kSmallPitchA;
    SmallTile<kSmallRows, kSmallPitchA> tile_a;
    SmallTile<kSmallColumns, kSmallPitchB> tile_b;
    tile_a.ask(p.a, row0, k0, depth);
    tile_b.ask(p.b, column0, k0, depth);
    if (k0 > 0) __syncthreads();  // the chunk before has been read
    tile_a.put(p.a, a, row0, k0, depth);
    tile_b.put(p.b, b, column0, k0, depth);
    __syncthreads();
#pragma unroll 4
    for (int k = warp; k < depth; k += kSmallWarps) {
      const float4 x = *reinterpret_cast<const float4*>(a + k * kSmallPitchA + 4 * ty);
      const float4 y = *reinterpret_cast<const float4*>(b + k * kSmallPitchB + 4 * tx);
      const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of_a[i] += xs[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] += xs[i] * ys[j];
      }
    }
  }
  __syncthreads();
  float* meet = shared;  // [warp][row][column], then [warp][row]
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<float4*>(meet + warp * kSmallSums + (4 * ty + i) * kSmallColumns + 4 * tx) =
        make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
    if (tx == 0) meet[kSmallWarps * kSmallSums + warp * kSmallRows + 4 * ty + i] = of_a[i];
  }
  __syncthreads();
#pragma unroll
  for (int at = thread; at < kSmallSums; at += 256) {
    float sum = meet[at];
#pragma unroll
    for (int w = 1; w < kSmallWarps; ++w) sum += meet[w * kSmallSums + at];
    const int row = row0 + at / kSmallColumns, column = column0 + at % kSmallColumns;
    if (row < p.a.rows && column < p.b.rows) store(sum, row, column);
  }
  if (sums && thread < kSmallRows && row0 + thread < p.a.rows) {
    const float* of = meet + kSmallWarps * kSmallSums + thread;
    float sum = of[0];
#pragma unroll
    for (int w = 1; w < kSmallWarps; ++w) sum += of[w * kSmallRows];
    p.sums[row0 + thread] = sum;
  }
}

__device__ __forceinline__ float run_program(const SmallProgram& p, float product, int row, int column) {
  float value[1 + kMostSmallOperands + kMostSmallInstructions];
  value[0] = product;
  for (int i = 0; i < p.operands; ++i) {
    value[1 + i] = p.operand[i][row * p.row_step[i] + column * p.column_step[i]];
  }
  float out = product;
  for (int s = 0; s < p.steps; ++s) {
    const auto& step = p.step[s];
    out = step.opcode == kConst
              ? step.imm
              : apply_float<float>(step.opcode, value[step.a], value[step.b], value[step.c]);
    value[1 + p.operands + s] = out;
  }
  return out;
}

template <bool kProgram>
__global__ void __launch_bounds__(256, 2) small_gemm_tiles(const __grid_constant__ SmallGemmArgs p) {
  extern __shared__ float4 small_shared[];
  overlap_begin(p.product.a.data, p.product.b.data);
  const int block = static_cast<int>(blockIdx.x);
  const int row = block / p.product.columns, column = block - row * p.product.columns;
  small_product(p.product, row * kSmallRows, column * kSmallColumns,
                reinterpret_cast<float*>(small_shared), [&](float sum, int m, int n) {
                  float v = epilogue_value<float>(p.epilogue, sum, 0, m, n);
                  if constexpr (kProgram) v = run_program(p.program, v, m, n);
                  p.product.c[m * p.product.c_row + n] = v;
                });
}

static __global__ void __launch_bounds__(256, 2) slopes_tiles(const __grid_constant__ SlopesArgs p) {
  extern __shared__ float4 small_shared[];
  overlap_begin(p.product[0].a.data, p.product[0].b.data);
  int i = 0;
  while (i + 1 < p.count && p.product[i + 1].first_block <= static_cast<int>(blockIdx.x)) ++i;
  const SmallProduct& of = p.product[i];
  const int block = static_cast<int>(blockIdx.x) - of.first_block;
  const int row = block / of.columns, column = block - row * of.columns;
  small_product(of, row * kSmallRows, column * kSmallColumns,
                reinterpret_cast<float*>(small_shared),
                [&](float sum, int m, int n) { of.c[m * of.c_row + n] = sum; });
}

}  // namespace rm::cuda_ops
