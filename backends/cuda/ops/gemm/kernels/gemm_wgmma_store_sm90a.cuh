// The epilogue of the wgmma gemm: from a warp's accumulators of 16 rows by 64 columns to c and aux.
#pragma once

#include <type_traits>

#include "_shim/async_shim.cuh"
#include "_shim/wgmma_shim.cuh"
#include "gemm/kernels/gemm_fast_any.cuh"
#include "gemm/kernels/gemm_wgmma_args.hpp"
#include "gemm/kernels/wgmma_ring_sm90a.cuh"

namespace rm::cuda_ops {

/// What a turn of the epilogue takes: 32 columns of a warp's 16 rows, 16 values a thread. The code
/// of a turn is short and a loop repeats it: instructions that run once arrive at a third of the
/// speed of those in the cache next to the scheduler.
inline constexpr int kTurnValues = 16;

/// v[16 turn ..] into x: registers have no numbers at run time, so each turn has moves of its own.
template <int kValues>
__device__ __forceinline__ void take_values(const float* v, int turn, float (&x)[kTurnValues]) {
  const auto take = [&](auto at) {
    constexpr int kAt = decltype(at)::value * kTurnValues;
    if constexpr (kAt < kValues) {
#pragma unroll
      for (int i = 0; i < kTurnValues; ++i)
        asm volatile("mov.b32 %0, %1;" : "=f"(x[i]) : "f"(v[kAt + i]));
    }
  };
  switch (turn) {
    case 0:
      return take(std::integral_constant<int, 0>{});
    case 1:
      return take(std::integral_constant<int, 1>{});
    case 2:
      return take(std::integral_constant<int, 2>{});
    case 3:
      return take(std::integral_constant<int, 3>{});
    case 4:
      return take(std::integral_constant<int, 4>{});
    case 5:
      return take(std::integral_constant<int, 5>{});
    case 6:
      return take(std::integral_constant<int, 6>{});
    default:
      return take(std::integral_constant<int, 7>{});
  }
}

/// Where the 32 columns of a turn lie: the first or second half of the 64 from n.
struct WgmmaPlace {
  int m, n, half, batch;
};

/// 64 columns of a warp's 16 rows leave together, through one of two buffers of 2 KiB; where there
/// is aux, it takes the first one and c the second.
template <class T>
struct WgmmaStore {
  std::uint32_t buffers;
  int lane, chunks;  // chunks: of 64 columns that have left so far

  /// kValues a thread, columns from 32 * half, into a buffer in the swizzle of 128 bytes.
  template <int kValues>
  __device__ __forceinline__ void fill(std::uint32_t buffer, int half, const float* v) const {
    const int row = lane % 8 + (lane / 8) % 2 * 8;
#pragma unroll
    for (int j = 0; j < kValues / 4; j += 2) {
      const int sixteen = (4 * half + j + lane / 16) ^ (row % 8);
      store_matrix_x4(
          buffer + static_cast<std::uint32_t>(row * 128 + sixteen * 16),
          pack_pair<T>(v[4 * j], v[4 * j + 1]), pack_pair<T>(v[4 * j + 2], v[4 * j + 3]),
          pack_pair<T>(v[4 * j + 4], v[4 * j + 5]), pack_pair<T>(v[4 * j + 6], v[4 * j + 7]));
    }
  }

  /// c by the copy engine. kAlone: both buffers are c's.
  __device__ __forceinline__ void in_boxes(const WgmmaProblem& p, const WgmmaPlace& at, bool alone,
                                           const float (&v)[kTurnValues]) {
    const std::uint32_t buffer = buffers + (alone ? chunks & 1 : 1) * 2048;
    if (at.half == 0) {  // what left from the buffer before is on its way
      if (lane == 0) alone ? store_boxes_wait<1>() : store_boxes_wait<0>();
      __syncwarp();
    }
    fill<kTurnValues>(buffer, at.half, v);
    if (at.half == 0) return;
    fence_async_proxy();
    __syncwarp();
    ++chunks;
    if (lane != 0 || at.m >= p.m) return;
    store_box(&p.c_map, buffer, at.n, at.m, at.batch);
    store_boxes_commit();
  }

  /// Rows of 128 bytes, written 16 bytes a lane: out and its rows lie on 16 bytes.
  __device__ __forceinline__ void in_lines(T* out, std::int64_t pitch, const WgmmaProblem& p,
                                           const WgmmaPlace& at, const float (&v)[kTurnValues]) {
    __syncwarp();  // the lines before have been read
    fill<kTurnValues>(buffers, at.half, v);
    if (at.half == 0) return;
    __syncwarp();
    const int column = at.n + lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = lane / 8 + 4 * i;
      const uint4 line = load_shared(buffers + r * 128 + ((lane % 8) ^ (r % 8)) * 16);
      if (at.m + r >= p.m) continue;
      T* to = out + static_cast<std::int64_t>(at.m + r) * pitch + column;
      if (column + 8 <= p.n) {
        *reinterpret_cast<uint4*>(to) = line;
      } else {
        const T* each = reinterpret_cast<const T*>(&line);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          if (column + k < p.n) to[k] = each[k];
        }
      }
    }
  }

  /// From registers, wherever out lies.
  __device__ __forceinline__ void direct(T* out, std::int64_t pitch, const WgmmaProblem& p,
                                         const WgmmaPlace& at,
                                         const float (&v)[kTurnValues]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = at.m + lane / 4 + 8 * i;
      if (row >= p.m) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = at.n + at.half * 32 + 8 * j + 2 * (lane % 4);
        T* to = out + row * pitch + column;
        if (p.pairs && column + 1 < p.n) {
          *reinterpret_cast<std::uint32_t*>(to) =
              pack_pair<T>(v[4 * j + 2 * i], v[4 * j + 2 * i + 1]);
        } else {
          if (column < p.n) to[0] = from_float<T>(v[4 * j + 2 * i]);
          if (column + 1 < p.n) to[1] = from_float<T>(v[4 * j + 2 * i + 1]);
        }
      }
    }
  }
};

template <class T>
__device__ __forceinline__ void add_residual(const WgmmaProblem& p, float (&v)[kTurnValues],
                                             const WgmmaPlace& at, int lane) {
  const EpilogueArgs& e = p.epilogue;
  const T* residual = static_cast<const T*>(e.residual) + at.batch * e.residual_batch;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = at.m + lane / 4 + 8 * i;
    if (row >= p.m) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = at.n + at.half * 32 + 8 * j + 2 * (lane % 4);
      const T* from = residual + row * e.residual_pitch + column;
      float r[2] = {};
      if (p.pairs && column + 1 < p.n) {
        load_vec<T, 2>(from, r);
      } else {
        if (column < p.n) r[0] = to_float(from[0]);
        if (column + 1 < p.n) r[1] = to_float(from[1]);
      }
      v[4 * j + 2 * i] += r[0], v[4 * j + 2 * i + 1] += r[1];
    }
  }
}

/// What each row of a thread's adds: of the rows lane / 4 and 8 below.
template <class T>
__device__ __forceinline__ float2 wgmma_row_bias(const WgmmaProblem& p, int m, int lane) {
  const EpilogueArgs& e = p.epilogue;
  const T* bias = static_cast<const T*>(e.bias);
  float2 out{};
  if (e.bias_kind == static_cast<int>(BiasKind::row)) {
    const int row = m + lane / 4;
    if (row < p.m) out.x = to_float(bias[row]);
    if (row + 8 < p.m) out.y = to_float(bias[row + 8]);
  } else if (e.bias_kind == static_cast<int>(BiasKind::scalar)) {
    out.x = out.y = to_float(bias[0]);
  }
  return out;
}

/// A tile without aux, residual and biases of rows whose c leaves by the copy engine: nothing is
/// looked at on the way, since each look at a parameter takes as long as twenty elements; scale and
/// bias are halved for gelus. Turns of
/// 128 columns, in the registers of the first; kDown: the second turn lies 64 rows below instead.
template <class T, Activation kKind, int kValues, bool kDown>
__device__ __forceinline__ void finish_plain(const CUtensorMap* map, float* v, float scale,
                                             const float* bias, const WgmmaStore<T>& store,
                                             WgmmaPlace at, int rows, int columns) {
  constexpr int kTurn = kValues < 64 ? kValues : 64;
  const int lane = store.lane;
  bias += 2 * (lane % 4);
#pragma unroll 1
  for (int done = 0; done < kValues; done += kTurn) {
    if (done > 0) {
#pragma unroll
      for (int i = 0; i < kValues - kTurn; ++i) v[i] = v[i + kTurn];
      kDown ? at.m += 64 : at.n += 128;
      if (!kDown) bias += 128;
    }
    if (at.n >= columns) return;
#pragma unroll
    for (int j = 0; j < kTurn / 4; ++j) {
      const float2 b = *reinterpret_cast<const float2*>(bias + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[4 * j + i] = v[4 * j + i] * scale + (i % 2 ? b.y : b.x);
    }
    activate_halves<kKind, kTurn, std::is_same_v<T, __half>>(v);
#pragma unroll
    for (int chunk = 0; chunk < kTurn / 32; ++chunk) {
      const std::uint32_t buffer = store.buffers + chunk * 2048;
      if (lane == 0) store_boxes_wait<kTurn / 32 - 1>();  // what left from this buffer before
      __syncwarp();
      store.template fill<32>(buffer, 0, v + chunk * 32);
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) {
        if (at.m < rows && at.n + chunk * 64 < columns) {
          store_box(map, buffer, at.n + chunk * 64, at.m, at.batch);
        }
        store_boxes_commit();
      }
    }
  }
}

/// A turn: v is what the product left. `bias`: of the 64 columns.
template <class T>
__device__ __forceinline__ void wgmma_epilogue(const WgmmaProblem& p, float (&v)[kTurnValues],
                                               const float* bias, float2 row_bias,
                                               WgmmaStore<T>& store, const WgmmaPlace& at) {
  const EpilogueArgs& e = p.epilogue;
  const int lane = store.lane;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 b = *reinterpret_cast<const float2*>(bias + at.half * 32 + 8 * j + 2 * (lane % 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) v[4 * j + i] = v[4 * j + i] * e.scale + (i % 2 ? b.y : b.x);
  }
  if (e.bias_kind == static_cast<int>(BiasKind::row) ||
      e.bias_kind == static_cast<int>(BiasKind::scalar)) {
#pragma unroll
    for (int i = 0; i < kTurnValues; ++i) v[i] += i / 2 % 2 ? row_bias.y : row_bias.x;
  }
  if (e.aux) {
    T* aux = static_cast<T*>(e.aux) + at.batch * e.aux_batch;
    if (p.aux_lines) {
      store.in_lines(aux, e.aux_pitch, p, at, v);
    } else {
      store.direct(aux, e.aux_pitch, p, at, v);
    }
  }
  activate_kind<T>(e, v);
  if (e.residual) add_residual<T>(p, v, at, lane);
  if (p.c_lines) {
    store.in_boxes(p, at, e.aux == nullptr, v);
  } else {
    store.direct(static_cast<T*>(p.c) + at.batch * p.c_batch, p.c_pitch, p, at, v);
  }
}

}  // namespace rm::cuda_ops
