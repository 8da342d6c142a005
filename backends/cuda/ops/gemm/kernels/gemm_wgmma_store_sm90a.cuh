// The epilogue of the wgmma gemm: from a warp's accumulators of 16 rows by 64 columns to c and aux.
#pragma once

#include <type_traits>

#include "_shim/async_shim.cuh"
#include "_shim/wgmma_shim.cuh"
#include "gemm/kernels/gemm_fast_any.cuh"
#include "gemm/kernels/gemm_wgmma_args.hpp"
#include "gemm/kernels/wgmma_ring_sm90a.cuh"

namespace rm::cuda_ops {

/// 64 columns of a warp's 16 rows, accumulators v, to c or aux.
template <class T>
struct WgmmaStore {
  std::uint32_t buffers;  // two of 2 KiB
  int turn, lane;

  /// 64 columns into a buffer, in the swizzle of 128 bytes.
  __device__ __forceinline__ void fill(std::uint32_t buffer, const float* v) const {
    const int row = lane % 8 + (lane / 8) % 2 * 8;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const std::uint32_t at =
          buffer + static_cast<std::uint32_t>(row * 128 + (((j + lane / 16) ^ (row % 8)) * 16));
      store_matrix_x4(
          at, pack_pair<T>(v[4 * j], v[4 * j + 1]), pack_pair<T>(v[4 * j + 2], v[4 * j + 3]),
          pack_pair<T>(v[4 * j + 4], v[4 * j + 5]), pack_pair<T>(v[4 * j + 6], v[4 * j + 7]));
    }
  }

  /// The buffers may be written: what left from them is on its way.
  __device__ __forceinline__ void drain() const {
    if (lane == 0) store_boxes_wait();
    __syncwarp();
  }

  /// By the copy engine.
  template <int kChunks>
  __device__ __forceinline__ void in_boxes(const WgmmaProblem& p, const float* v, int n, int m,
                                           int batch) const {
    drain();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) fill(buffers + chunk * 2048, v + chunk * 32);
    fence_async_proxy();
    __syncwarp();
    if (lane != 0 || m >= p.m) return;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (n + chunk * 64 < p.n) {
        store_box(&p.c_map, buffers + chunk * 2048, n + chunk * 64, m, batch);
      }
    }
    store_boxes_commit();
  }

  /// Rows of 128 bytes, written 16 bytes a lane. c and its rows lie on 16 bytes.
  template <bool kInside>
  __device__ __forceinline__ void in_lines(T* c, std::int64_t pitch, const WgmmaProblem& p,
                                           const float* v, int n, int m) {
    const std::uint32_t buffer = buffers + (turn & 1) * 2048;
    ++turn;
    fill(buffer, v);
    __syncwarp();
    const int column = n + lane % 8 * 8;
    T* at = c + static_cast<std::int64_t>(m + lane / 8) * pitch + column;
    uint4 line[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = lane / 8 + 4 * i;
      line[i] = load_shared(buffer + r * 128 + ((lane % 8) ^ (r % 8)) * 16);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i, at += 4 * pitch) {
      const int r = lane / 8 + 4 * i;
      if (!kInside && m + r >= p.m) continue;
      if (kInside || column + 8 <= p.n) {
        *reinterpret_cast<uint4*>(at) = line[i];
      } else {
        const T* each = reinterpret_cast<const T*>(&line[i]);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          if (column + k < p.n) at[k] = each[k];
        }
      }
    }
  }

  template <int kChunks>
  __device__ __forceinline__ void all(T* c, std::int64_t pitch, bool lines, const WgmmaProblem& p,
                                      const float* v, int n, int m) {
    const bool inside = n + kChunks * 64 <= p.n && m + 16 <= p.m;
#pragma unroll
    for (int chunk = 0; chunk < kChunks && lines && inside; ++chunk) {
      in_lines<true>(c, pitch, p, v + chunk * 32, n + chunk * 64, m);
    }
    if (lines && inside) return;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (n + chunk * 64 >= p.n) break;
      if (lines) {
        in_lines<false>(c, pitch, p, v + chunk * 32, n + chunk * 64, m);
      } else {
        direct(c, pitch, p, v + chunk * 32, n + chunk * 64, m);
      }
    }
  }

  __device__ __forceinline__ void direct(T* c, std::int64_t pitch, const WgmmaProblem& p,
                                         const float* v, int n, int m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = m + lane / 4 + 8 * i;
      if (row >= p.m) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int column = n + 8 * j + 2 * (lane % 4);
        T* at = c + row * pitch + column;
        if (p.pairs && column + 1 < p.n) {
          *reinterpret_cast<std::uint32_t*>(at) =
              pack_pair<T>(v[4 * j + 2 * i], v[4 * j + 2 * i + 1]);
        } else {
          if (column < p.n) at[0] = from_float<T>(v[4 * j + 2 * i]);
          if (column + 1 < p.n) at[1] = from_float<T>(v[4 * j + 2 * i + 1]);
        }
      }
    }
  }
};

template <class T>
__device__ __forceinline__ void add_residual(const WgmmaProblem& p, float* v, int n, int m,
                                             int batch, int lane) {
  const EpilogueArgs& e = p.epilogue;
  const T* residual = static_cast<const T*>(e.residual) + batch * e.residual_batch;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = m + lane / 4 + 8 * i;
    if (row >= p.m) continue;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int column = n + 8 * j + 2 * (lane % 4);
      const T* at = residual + row * e.residual_pitch + column;
      float r[2] = {};
      if (p.pairs && column + 1 < p.n) {
        load_vec<T, 2>(at, r);
      } else {
        if (column < p.n) r[0] = to_float(at[0]);
        if (column + 1 < p.n) r[1] = to_float(at[1]);
      }
      v[4 * j + 2 * i] += r[0], v[4 * j + 2 * i + 1] += r[1];
    }
  }
}

template <class T>
__device__ __forceinline__ void wgmma_row_bias(const WgmmaProblem& p, int m, int lane,
                                               float (&out)[2]) {
  const EpilogueArgs& e = p.epilogue;
  out[0] = out[1] = 0.0f;
  if (e.bias_kind == static_cast<int>(BiasKind::row)) {
    for (int i = 0; i < 2; ++i) {
      const int row = m + lane / 4 + 8 * i;
      if (row < p.m) out[i] = to_float(static_cast<const T*>(e.bias)[row]);
    }
  } else if (e.bias_kind == static_cast<int>(BiasKind::scalar)) {
    out[0] = out[1] = to_float(static_cast<const T*>(e.bias)[0]);
  }
}

/// kChunks times 64 columns of a warp's rows: v is what the product left. `bias`: of these columns.
/// One step over all of them after the other: the code of what a launch does lies together.
template <class T, int kChunks>
__device__ __forceinline__ void wgmma_epilogue(const WgmmaProblem& p, float* v, const float* bias,
                                               const float (&row_bias)[2], WgmmaStore<T>& store,
                                               int n, int m, int batch) {
  constexpr int kCount = kChunks * 32;
  const EpilogueArgs& e = p.epilogue;
  const int lane = store.lane;
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float2 b = *reinterpret_cast<const float2*>(bias + 8 * j + 2 * (lane % 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) v[4 * j + i] = v[4 * j + i] * e.scale + (i % 2 ? b.y : b.x);
  }
  if (e.bias_kind == static_cast<int>(BiasKind::row) ||
      e.bias_kind == static_cast<int>(BiasKind::scalar)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] += row_bias[i / 2 % 2];
  }
  if (e.aux) {
    if (p.c_lines) store.drain();
    T* aux = static_cast<T*>(e.aux) + batch * e.aux_batch;
    store.template all<kChunks>(aux, e.aux_pitch, p.aux_lines, p, v, n, m);
  }
  constexpr bool kFine = std::is_same_v<T, __half>;
  switch (static_cast<Activation>(e.activation)) {
    case Activation::none:
      break;
    case Activation::relu:
      activate_all<Activation::relu, kCount, kFine>(v, 0.0f);
      break;
    case Activation::leaky_relu:
      activate_all<Activation::leaky_relu, kCount, kFine>(v, e.slope);
      break;
    case Activation::gelu:
      activate_all<Activation::gelu, kCount, kFine>(v, 0.0f);
      break;
    case Activation::gelu_tanh:
      activate_all<Activation::gelu_tanh, kCount, kFine>(v, 0.0f);
      break;
    case Activation::silu:
      activate_all<Activation::silu, kCount, kFine>(v, 0.0f);
      break;
    case Activation::sigmoid:
      activate_all<Activation::sigmoid, kCount, kFine>(v, 0.0f);
      break;
    case Activation::tanh:
      activate_all<Activation::tanh, kCount, kFine>(v, 0.0f);
      break;
  }
  if (e.residual) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) add_residual<T>(p, v + c * 32, n + c * 64, m, batch, lane);
  }
  if (p.c_lines) {
    store.template in_boxes<kChunks>(p, v, n, m, batch);
  } else {
    store.template all<kChunks>(static_cast<T*>(p.c) + batch * p.c_batch, p.c_pitch, false, p, v, n,
                                m);
  }
}

}  // namespace rm::cuda_ops
