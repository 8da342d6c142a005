// Channels last in whole vectors. A block has a chunk of a sample's places and all of its channels,
// so that every line of memory is read whole however few channels a group has; the first kernel
// leaves a mean and a sum of squares a chunk and group, the second joins them (Chan et al. 1979) and
// writes. Bound: memory.
#pragma once

#include "_shim/words_shim.cuh"
#include "group_norm/kernels/group_norm_any.cuh"

namespace rm::cuda_ops {

inline constexpr int kGroupNormThreads = 256;

/// Lanes along the channels and rows of places of a block.
struct GroupNormBlock {
  int vectors, lanes, rows, lane, row;
};
template <class T>
__device__ __forceinline__ GroupNormBlock group_norm_block(const GroupNormArgs& p) {
  GroupNormBlock b;
  b.vectors = p.channels / kVec<T>;
  b.lanes = min(b.vectors, kGroupNormThreads), b.rows = kGroupNormThreads / b.lanes;
  b.lane = static_cast<int>(threadIdx.x) % b.lanes, b.row = static_cast<int>(threadIdx.x) / b.lanes;
  return b;
}

/// Floats of shared memory of the first kernel: sums and squares a row of places and channel.
__host__ __device__ inline int group_norm_floats(int channels, int vector) {
  const int vectors = channels / vector, lanes = vectors < kGroupNormThreads ? vectors
                                                                             : kGroupNormThreads;
  return 2 * (kGroupNormThreads / lanes) * channels;
}

/// Blocks: x chunks, y samples. Distances are taken from the group's first element, so that a mean
/// far from zero costs no digits.
template <class T>
__global__ void __launch_bounds__(kGroupNormThreads)
    group_norm_parts(const __grid_constant__ GroupNormArgs p) {
  constexpr int V = kVec<T>;
  extern __shared__ float group_norm_sums[];  // [rows][channels], then the same of squares
  overlap_begin();
  const GroupNormBlock b = group_norm_block<T>(p);
  const int first = static_cast<int>(blockIdx.x) * p.places_a_chunk;
  const int last = min(p.places, first + p.places_a_chunk);
  const T* x = static_cast<const T*>(p.x) + blockIdx.y * p.x_sample;
  float* squares = group_norm_sums + b.rows * p.channels;
  for (int vector = b.lane; b.row < b.rows && vector < b.vectors; vector += b.lanes) {
    float from[V], sum[V] = {}, square[V] = {};
#pragma unroll
    for (int j = 0; j < V; ++j) {
      from[j] = to_float(x[(vector * V + j) / p.per_group * p.per_group]);
    }
    const T* column = x + vector * V;
#pragma unroll 4
    for (int place = first + b.row; place < last; place += b.rows) {
      float v[V];
      unpack<T>(*reinterpret_cast<const uint4*>(column + place * p.x_place), v);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float d = v[j] - from[j];
        sum[j] += d, square[j] += d * d;
      }
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      group_norm_sums[b.row * p.channels + vector * V + j] = sum[j];
      squares[b.row * p.channels + vector * V + j] = square[j];
    }
  }
  __syncthreads();
  // A warp a group; its lanes' sums are added in a fixed order.
  const float count = static_cast<float>(last - first) * static_cast<float>(p.per_group);
  for (int g = static_cast<int>(threadIdx.x) / 32; g < p.groups; g += kGroupNormThreads / 32) {
    float sum = 0.0f, square = 0.0f;
    for (int i = static_cast<int>(threadIdx.x) % 32; i < b.rows * p.per_group; i += 32) {
      const int row = i / p.per_group, at = row * p.channels + g * p.per_group + i % p.per_group;
      sum += group_norm_sums[at], square += squares[at];
    }
    sum = warp_reduce<Sum>(sum), square = warp_reduce<Sum>(square);
    if (threadIdx.x % 32 == 0) {
      float* part = p.parts + ((static_cast<std::int64_t>(blockIdx.y) * p.chunks + blockIdx.x) *
                                   p.groups + g) * 2;
      part[0] = to_float(x[g * p.per_group]) + sum / count;
      part[1] = square - sum * (sum / count);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kGroupNormThreads)
    group_norm_write(const __grid_constant__ GroupNormArgs p) {
  constexpr int V = kVec<T>;
  extern __shared__ float group_norm_facts[];  // [groups] means, then factors
  overlap_begin();
  const float* parts = p.parts + static_cast<std::int64_t>(blockIdx.y) * p.chunks * p.groups * 2;
  const auto count_of = [&](int chunk) {
    return static_cast<float>(min(p.places - chunk * p.places_a_chunk, p.places_a_chunk)) *
           static_cast<float>(p.per_group);
  };
  const float all = static_cast<float>(p.places) * static_cast<float>(p.per_group);
  for (int g = static_cast<int>(threadIdx.x) / 32; g < p.groups; g += kGroupNormThreads / 32) {
    float mean = 0.0f, square = 0.0f;
    for (int i = static_cast<int>(threadIdx.x) % 32; i < p.chunks; i += 32) {
      mean += parts[(i * p.groups + g) * 2] * (count_of(i) / all);
    }
    mean = warp_reduce<Sum>(mean);
    for (int i = static_cast<int>(threadIdx.x) % 32; i < p.chunks; i += 32) {
      const float d = parts[(i * p.groups + g) * 2] - mean;
      square += parts[(i * p.groups + g) * 2 + 1] + count_of(i) * d * d;
    }
    square = warp_reduce<Sum>(square);
    if (threadIdx.x % 32 == 0) {
      group_norm_facts[g] = mean;
      group_norm_facts[p.groups + g] = rsqrtf(fmaxf(square, 0.0f) / all + p.eps);
    }
  }
  __syncthreads();
  const GroupNormBlock b = group_norm_block<T>(p);
  const int first = static_cast<int>(blockIdx.x) * p.places_a_chunk;
  const int last = min(p.places, first + p.places_a_chunk);
  const T* x = static_cast<const T*>(p.x) + blockIdx.y * p.x_sample;
  T* y = static_cast<T*>(p.y) + blockIdx.y * p.y_sample;
  for (int vector = b.lane; b.row < b.rows && vector < b.vectors; vector += b.lanes) {
    float mean[V], factor[V], shift[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int c = vector * V + j, g = c / p.per_group;
      mean[j] = group_norm_facts[g], factor[j] = group_norm_facts[p.groups + g];
      if (p.weight) factor[j] *= to_float(static_cast<const T*>(p.weight)[c]);
      shift[j] = p.bias ? to_float(static_cast<const T*>(p.bias)[c]) : 0.0f;
    }
#pragma unroll 4
    for (int place = first + b.row; place < last; place += b.rows) {
      float v[V];
      unpack<T>(*reinterpret_cast<const uint4*>(x + vector * V + place * p.x_place), v);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        v[j] = (v[j] - mean[j]) * factor[j] + shift[j];
        if (p.silu) v[j] = norm_silu(v[j]);
      }
      store_vec<T, V>(y + vector * V + place * p.y_place, v);
    }
  }
}

}  // namespace rm::cuda_ops
