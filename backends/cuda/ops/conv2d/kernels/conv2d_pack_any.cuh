// Any strides to [N, H, W, G, padded], channels last and whole vectors, through 32 x 32 tiles of
// places by channels. Bound: memory.
#pragma once

#include "_shim/epilogue_shim.cuh"
#include "conv2d/kernels/conv2d_naive_any.cuh"

namespace rm::cuda_ops {

/// Blocks of 32 x 8 threads: x over tiles of rows (image of the inner axis, place), y over tiles of
/// a group's channels, z over outer * groups + g (from `first`).
template <class T>
__global__ void __launch_bounds__(256)
    conv2d_pack(const __grid_constant__ ConvPackArgs p, int first, bool along_channels) {
  __shared__ T tile[32][33];
  overlap_begin();
  const int image = first + blockIdx.z, g = image % p.groups, outer = image / p.groups;
  const int places = p.h * p.wd, rows = p.inner * places, row0 = blockIdx.x * 32,
            c0 = blockIdx.y * 32;
  const std::int64_t base = outer * p.outer_stride + g * p.group_stride;
  for (int r = threadIdx.y; r < 32; r += 8) {
    const int row = row0 + (along_channels ? r : threadIdx.x);
    const int c = c0 + (along_channels ? threadIdx.x : r);
    float v = 0.0f;
    if (row < rows && c < p.in) {
      const int inner = row / places, place = row - inner * places, line = place / p.wd;
      const std::int64_t at = base + inner * p.stride[0] + c * p.stride[1] + line * p.stride[2] +
                              (place - line * p.wd) * p.stride[3];
      v = to_float(static_cast<const T*>(p.src)[at]);
      if (p.aux) {
        v *= activate_slope<sizeof(T) == 2>(p.activation,
                                            to_float(static_cast<const T*>(p.aux)[at]), p.slope);
      }
    }
    tile[row - row0][c - c0] = from_float<T>(v);
  }
  __syncthreads();
  for (int r = threadIdx.y; r < 32; r += 8) {
    const int row = row0 + r, c = c0 + threadIdx.x;
    if (row >= rows || c >= p.padded) continue;
    const std::int64_t at = (static_cast<std::int64_t>(outer) * rows + row) * p.groups + g;
    static_cast<T*>(p.dst)[at * p.padded + c] = tile[r][threadIdx.x];
  }
}

/// Of images dense along the inner axis, in whole vectors both ways (weights for dx): a thread
/// turns vectors of images, one a channel, to vectors of channels. Blocks: x over places, then
/// vectors of channels by vectors of images, y over outer.
template <class T>
__global__ void __launch_bounds__(256) conv2d_turn(const __grid_constant__ ConvPackArgs p) {
  overlap_begin();
  constexpr int V = kVec<T>;
  const int across = p.in / V, images = p.inner / V, places = p.h * p.wd;
  const int i = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  // neighbouring threads: 4 vectors of images by 8 of channels, so both sides are whole sectors
  const int tiles = (across + 7) / 8, tile = i / 32, rest = tile / tiles;
  const int c = (tile - rest * tiles) * 8 + i % 32 / 4, wide = (images + 3) / 4;
  const int place = rest / wide, inner = (rest - place * wide) * 4 + i % 4;
  if (place >= places || c >= across || inner >= images) return;
  const int line = place / p.wd;
  const T* src = static_cast<const T*>(p.src) + blockIdx.y * p.outer_stride + inner * V +
                 c * V * p.stride[1] + line * p.stride[2] + (place - line * p.wd) * p.stride[3];
  Pack<T, V> in[V], out[V];
#pragma unroll
  for (int j = 0; j < V; ++j) in[j] = *reinterpret_cast<const Pack<T, V>*>(src + j * p.stride[1]);
#pragma unroll
  for (int j = 0; j < V; ++j) {
#pragma unroll
    for (int k = 0; k < V; ++k) out[j].v[k] = in[k].v[j];
  }
  const std::int64_t pitch = static_cast<std::int64_t>(places) * p.in;
  T* dst = static_cast<T*>(p.dst) +
           (static_cast<std::int64_t>(blockIdx.y) * p.inner + inner * V) * pitch +
           static_cast<std::int64_t>(place) * p.in + c * V;
#pragma unroll
  for (int j = 0; j < V; ++j) *reinterpret_cast<Pack<T, V>*>(dst + j * pitch) = out[j];
}

/// A thread 16 bytes of the unfolded image.
template <class T>
__global__ void __launch_bounds__(256) conv2d_unfold(const __grid_constant__ ConvUnfoldArgs p) {
  overlap_begin();
  constexpr int V = kVec<T>;
  const int i = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  if (i >= p.vectors) return;
  const std::uint32_t place = p.by_vectors.quotient(i), line = p.by_ow.quotient(place),
                      n = p.by_h.quotient(line);
  const int e0 = static_cast<int>(i - place * p.by_vectors.d) * V;
  const int ow = static_cast<int>(place - line * p.by_ow.d);
  const T* src = static_cast<const T*>(p.src) + n * p.stride[0] +
                 static_cast<int>(line - n * p.by_h.d) * p.stride[2];
  Pack<T, V> out;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const auto tap = static_cast<int>(p.by_in.quotient(e0 + j));
    const int c = e0 + j - tap * p.in;
    const int w = tap < p.kw ? conv_place(p.map, 1, ow, tap, p.wd) : -1;
    out.v[j] = w < 0 ? from_float<T>(0.0f) : src[c * p.stride[1] + w * p.stride[3]];
  }
  reinterpret_cast<Pack<T, V>*>(p.dst)[i] = out;
}

}  // namespace rm::cuda_ops
