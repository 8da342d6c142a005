// A block makes a tile of c; its eight warps share K, and their sums meet in shared memory in one order.
// All of K up to 256 is asked for at once: what bounds such a product is latency. Tiles of 8 x 16 spread
// 64 rows and 256 columns over 128 multiprocessors (4.5 us on an H200; by 16 x 32, 32 blocks, 5.9); where
// there are more than a card runs at once, tiles of 16 x 32 read less.
#pragma once

#include "_shim/epilogue_shim.cuh"
#include "_shim/launch_shim.hpp"
#include "ewise/kernels/ewise_math.cuh"
#include "small_gemm/kernels/small_gemm_args.hpp"

namespace rm::cuda_ops {

inline constexpr int kSmallDepth = 256, kSmallWarps = 8, kProductThreads = 32 * kSmallWarps;

template <int kRowsOfTile, int kColumnsOfTile>
struct SmallShape {
  static constexpr int kRows = kRowsOfTile, kColumns = kColumnsOfTile;
  // Rows of tiles are padded: neighbours along K lie in other banks, vectors stay on 16 bytes.
  static constexpr int kPitchA = kRows + 4, kPitchB = kColumns + 4;
  static constexpr int kSums = kRows * kColumns;  // of a warp

  /// Bytes of shared memory for a chunk of K.
  __host__ __device__ static constexpr int bytes(int depth) {
    constexpr int kMeet = kSmallWarps * (kSums + kRows);
    const int tiles = depth * (kPitchA + kPitchB);
    return 4 * (tiles > kMeet ? tiles : kMeet);
  }
};
using SmallTiles = SmallShape<8, 16>;
using LargeTiles = SmallShape<16, 32>;

/// A tile of kRows rows and up to kSmallDepth of K on its way to shared memory, [k][row].
template <int kRows, int kPitch>
struct SmallTile {
  static constexpr int kVectors = kRows * kSmallDepth / 4 / kProductThreads;  // of a thread
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
      place(o, u * kProductThreads + static_cast<int>(threadIdx.x), &row, &k);
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
      for (int i = thread; i < total; i += kProductThreads) {
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
      place(o, u * kProductThreads + thread, &row, &k);
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
template <class Shape, class Store>
__device__ __forceinline__ void small_product(const SmallProduct& p, int row0, int column0,
                                              float* shared, Store&& store) {
  constexpr int kI = Shape::kRows / 4, kJ = Shape::kColumns / 8;  // elements of a thread
  struct alignas(4 * kI) OfA {
    float v[kI];
  };
  struct alignas(4 * kJ) OfB {
    float v[kJ];
  };
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int ty = lane / 8, tx = lane % 8;
  const bool sums = p.sums != nullptr && column0 == 0;
  float acc[kI][kJ] = {}, of_a[kI] = {};
  for (int k0 = 0; k0 < p.k; k0 += kSmallDepth) {
    const int depth = min(kSmallDepth, p.k - k0);
    float* a = shared;
    float* b = shared + depth * Shape::kPitchA;
    SmallTile<Shape::kRows, Shape::kPitchA> tile_a;
    SmallTile<Shape::kColumns, Shape::kPitchB> tile_b;
    tile_a.ask(p.a, row0, k0, depth);
    tile_b.ask(p.b, column0, k0, depth);
    if (k0 > 0) __syncthreads();  // the chunk before has been read
    tile_a.put(p.a, a, row0, k0, depth);
    tile_b.put(p.b, b, column0, k0, depth);
    __syncthreads();
#pragma unroll 4
    for (int k = warp; k < depth; k += kSmallWarps) {
      const OfA x = *reinterpret_cast<const OfA*>(a + k * Shape::kPitchA + kI * ty);
      const OfB y = *reinterpret_cast<const OfB*>(b + k * Shape::kPitchB + kJ * tx);
#pragma unroll
      for (int i = 0; i < kI; ++i) {
        of_a[i] += x.v[i];
#pragma unroll
        for (int j = 0; j < kJ; ++j) acc[i][j] += x.v[i] * y.v[j];
      }
    }
  }
  __syncthreads();
  float* meet = shared;  // [warp][row][column], then [warp][row]
#pragma unroll
  for (int i = 0; i < kI; ++i) {
    OfB row;
#pragma unroll
    for (int j = 0; j < kJ; ++j) row.v[j] = acc[i][j];
    *reinterpret_cast<OfB*>(meet + warp * Shape::kSums + (kI * ty + i) * Shape::kColumns + kJ * tx) = row;
    if (tx == 0) meet[kSmallWarps * Shape::kSums + warp * Shape::kRows + kI * ty + i] = of_a[i];
  }
  __syncthreads();
#pragma unroll
  for (int at = thread; at < Shape::kSums; at += kProductThreads) {
    float sum = meet[at];
#pragma unroll
    for (int w = 1; w < kSmallWarps; ++w) sum += meet[w * Shape::kSums + at];
    const int row = row0 + at / Shape::kColumns, column = column0 + at % Shape::kColumns;
    if (row < p.a.rows && column < p.b.rows) store(sum, row, column);
  }
  if (sums && thread < Shape::kRows && row0 + thread < p.a.rows) {
    const float* of = meet + kSmallWarps * Shape::kSums + thread;
    float sum = of[0];
#pragma unroll
    for (int w = 1; w < kSmallWarps; ++w) sum += of[w * Shape::kRows];
    p.sums[row0 + thread] = sum;
  }
}

__device__ __forceinline__ float run_program(const ProductProgram& p, float product, int row, int column) {
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

template <class Shape, bool kProgram>
__global__ void __launch_bounds__(kProductThreads, 2) small_gemm_tiles(const __grid_constant__ SmallGemmArgs p) {
  extern __shared__ float4 small_shared[];
  overlap_begin(p.product.a.data, p.product.b.data);
  const int block = static_cast<int>(blockIdx.x);
  const int row = block / p.product.columns, column = block - row * p.product.columns;
  small_product<Shape>(p.product, row * Shape::kRows, column * Shape::kColumns,
                       reinterpret_cast<float*>(small_shared), [&](float sum, int m, int n) {
                         float v = epilogue_value<float>(p.epilogue, sum, 0, m, n);
                         if constexpr (kProgram) v = run_program(p.program, v, m, n);
                         p.product.c[m * p.product.c_row + n] = v;
                       });
}

static __global__ void __launch_bounds__(kProductThreads, 2) slopes_tiles(const __grid_constant__ SlopesArgs p) {
  extern __shared__ float4 small_shared[];
  using Shape = LargeTiles;
  overlap_begin(p.product[0].a.data, p.product[0].b.data);
  int i = 0;
  while (i + 1 < p.count && p.product[i + 1].first_block <= static_cast<int>(blockIdx.x)) ++i;
  const SmallProduct& of = p.product[i];
  const int block = static_cast<int>(blockIdx.x) - of.first_block;
  const int row = block / of.columns, column = block - row * of.columns;
  small_product<Shape>(of, row * Shape::kRows, column * Shape::kColumns, reinterpret_cast<float*>(small_shared),
                       [&](float sum, int m, int n) { of.c[m * of.c_row + n] = sum; });
}

}  // namespace rm::cuda_ops
