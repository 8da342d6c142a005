// Products of up to 128 rows of 16-bit floats, c = epilogue(a b^T), bounded by what a launch waits
// for: a block's tile is 64 rows by kN columns by a part of K, whose operands the copy engine
// brings into shared memory all at once, without a ring. The kParts blocks of a cluster take a part
// of K each; every one sends its sums by st.async to the block that finishes their rows, which adds
// them in the order of the parts. b and the bias come before the stream's earlier kernels have
// ended where they are stable (FewArgs::early).
#pragma once

#include <cstring>
#include <type_traits>

#include "_shim/async_shim.cuh"
#include "_shim/wgmma_shim.cuh"
#include "gemm/kernels/gemm_few_args.hpp"
#include "gemm/kernels/gemm_fast_any.cuh"
#include "gemm/kernels/wgmma_few_sm90a.cuh"
#include "gemm/kernels/wgmma_ring_sm90a.cuh"

namespace rm::cuda_ops {

/// Halves of the cluster's barrier; that barriers are initialised, barrier_init_done has released.
__device__ __forceinline__ void few_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void few_cluster_wait() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

/// Two neighbours of a row of 16-bit floats, asked for where it stands and past the first-level
/// cache: this block may have started before they were written. `count`: of them that exist; the
/// others are 0. kPairs: both exist, on 4 bytes. They become floats where they are needed, so that
/// nothing waits for them before.
template <class T, bool kPairs>
__device__ __forceinline__ std::uint32_t few_load(const T* from, int count) {
  std::uint32_t word = 0;
  if constexpr (kPairs) {
    asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  } else {
    std::uint16_t each[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (count <= i) continue;
      asm volatile("ld.global.cg.b16 %0, [%1];" : "=h"(each[i]) : "l"(from + i) : "memory");
    }
    word = each[0] | static_cast<std::uint32_t>(each[1]) << 16;
  }
  return word;
}
template <class T>
__device__ __forceinline__ float2 few_values(std::uint32_t word) {
  Pack<T, 2> two;
  memcpy(&two, &word, 4);
  return {to_float(two.v[0]), to_float(two.v[1])};
}
template <class T, bool kPairs>
__device__ __forceinline__ void few_store(T* to, int count, float a, float b) {
  if constexpr (kPairs) {
    *reinterpret_cast<std::uint32_t*>(to) = pack_pair<T>(a, b);
  } else {
    if (count > 0) to[0] = from_float<T>(a);
    if (count > 1) to[1] = from_float<T>(b);
  }
}
/// body(bool_constant): the quick way of a whole tile whose rows lie on 4 bytes, or the other one.
template <class Body>
__device__ __forceinline__ void few_either(bool pairs, Body&& body) {
  if (pairs) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

/// The elements that a thread finishes: of item i columns 8 (first + i kStep) + 2 (lane % 4) and
/// the next, rows `row` and (kRows 2) row + 8, as wgmma leaves them. A block has 64 / kParts rows.
template <int kN, int kParts>
struct FewPlace {
  static constexpr int kStep = kParts < 4 ? kParts : 4, kRows = kParts == 8 ? 1 : 2;
  static constexpr int kItems = (kN / 8 + kStep - 1) / kStep;
  static constexpr int kOwned = kFewRows / kParts * kN * 4;  // bytes of sums from one block
  int first, row, column, lane, half;  // half: of the 32 rows that two warps' sums are, which 16

  __device__ __forceinline__ FewPlace(int warp, int lane_, int part, int m0, int n0)
      : first(kParts == 2 ? warp / 2 : warp), column(n0 + lane_ % 4 * 2), lane(lane_),
        half(kParts == 2 ? warp % 2 : 0) {
    row = m0 + lane / 4 + kFewRows / kParts * part + 16 * half;
  }
  __device__ __forceinline__ int item(int i) const { return first + i * kStep; }
  __device__ __forceinline__ bool has(int i) const { return item(i) < kN / 8; }
  __device__ __forceinline__ int at(int i) const { return column + 8 * item(i); }
  /// Adds what came from all blocks, in their order.
  __device__ __forceinline__ void add(const unsigned char* sums,
                                      float (&v)[kItems * kRows * 2]) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!has(i)) continue;
#pragma unroll
      for (int s = 0; s < kParts; ++s) {
        const unsigned char* from = sums + s * kOwned;
        if constexpr (kParts == 8) {
          const float2 x = *reinterpret_cast<const float2*>(from + (item(i) * 32 + lane) * 8);
          v[2 * i] += x.x, v[2 * i + 1] += x.y;
        } else {
          const int place = (half * (kN / 8) + item(i)) * 32 + lane;
          const float4 x = *reinterpret_cast<const float4*>(from + place * 16);
          v[4 * i] += x.x, v[4 * i + 1] += x.y, v[4 * i + 2] += x.z, v[4 * i + 3] += x.w;
        }
      }
    }
  }
};

/// Every value to the block that finishes its row.
template <int kN, int kParts>
__device__ __forceinline__ void few_send_all(const float (&acc)[kN / 2], std::uint32_t sums,
                                             std::uint32_t bar, int part, int warp, int lane) {
  const std::uint32_t mine = sums + part * FewPlace<kN, kParts>::kOwned;
  if constexpr (kParts == 8) {
    const std::uint32_t place = mine + lane * 8;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::uint32_t to = cluster_address(place, 2 * warp + h);
      const std::uint32_t counter = cluster_address(bar, 2 * warp + h);
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
        const float* v = acc + 4 * j + 2 * h;
        cluster_store(make_float2(v[0], v[1]), to + j * 256, counter);
      }
    }
  } else {
    const int owner = kParts == 2 ? warp / 2 : warp, half = kParts == 2 ? warp % 2 : 0;
    const std::uint32_t to = cluster_address(mine + (half * (kN / 8) * 32 + lane) * 16, owner);
    const std::uint32_t counter = cluster_address(bar, owner);
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const float* v = acc + 4 * j;
      cluster_store(make_float4(v[0], v[1], v[2], v[3]), to + j * 512, counter);
    }
  }
}

template <class T, int kN, int kParts, FewKind kKind>
__global__ void __launch_bounds__(128) gemm_few(const __grid_constant__ FewArgs p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Place = FewPlace<kN, kParts>;
  constexpr int kABytes = kFewRows * 128, kBBytes = kN * 128, kSums = kFewRows * kN * 4;
  constexpr int kItems = Place::kItems, kRows = Place::kRows, kValues = kItems * kRows * 2;
  constexpr bool kAny = kKind == FewKind::any;
  static_assert(kParts == 2 || kParts == 4 || kParts == 8);
  launch_dependents();
  extern __shared__ __align__(1024) unsigned char memory[];
  const int warp = uniform_warp(), lane = threadIdx.x % 32, chunks = p.chunks;
  const std::uint32_t a_at = shared_address(memory), b_at = a_at + chunks * kABytes;
  const std::uint32_t sums = b_at + chunks * kBBytes, bars = sums + kSums;
  const std::uint32_t received = bars + kFewMostChunks * 8;
  const int part = static_cast<int>(blockIdx.x) % kParts;
  const int tile = static_cast<int>(blockIdx.x) / kParts;
  const int m0 = tile % p.tiles_m * kFewRows, n0 = tile / p.tiles_m * kN, k0 = part * chunks * 64;
  const EpilogueArgs& e = p.epilogue;
  if (warp == 0) {
    if (lane < chunks) barrier_init(bars + 8 * lane, 1);
    if (lane == 31) barrier_init(received, 1);
    barrier_init_done();
    if (lane < chunks) barrier_expect(bars + 8 * lane, kABytes + kBBytes);
    if (lane == 31) barrier_expect(received, kSums);
  } else if (warp == 1 && elect_lane()) {
    prefetch_map(&p.b);
    prefetch_map(&p.a);
  }
  __syncthreads();
  few_cluster_arrive();
  if (!p.early) wait_for_previous();
  if (elect_lane()) {
#pragma unroll 1
    for (int c = warp; c < chunks; c += 4) {
      load_box(b_at + c * kBBytes, &p.b, bars + 8 * c, k0 + c * 64, n0, 0);
    }
  }
  __syncwarp();
  const Place place(warp, lane, part, m0, n0);
  std::uint32_t bias[kItems] = {};
  const bool whole = !kAny || (p.pairs && n0 + kN <= p.n);
  if (e.bias_kind == static_cast<int>(BiasKind::column)) {
    few_either(whole, [&](auto pairs) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (!place.has(i)) continue;
        const T* from = static_cast<const T*>(e.bias) + place.at(i);
        bias[i] = few_load<T, pairs>(from, p.n - place.at(i));
      }
    });
  }
  few_cluster_wait();  // the barriers of all blocks are there
  wait_for_previous();
  if (elect_lane()) {
#pragma unroll 1
    for (int c = warp; c < chunks; c += 4) {
      load_box(a_at + c * kABytes, &p.a, bars + 8 * c, k0 + c * 64, m0, 0);
    }
  }
  __syncwarp();
  std::uint32_t residual[kItems * kRows] = {}, row_bias[kRows] = {};
  const bool of_row = e.bias_kind == static_cast<int>(BiasKind::row);
  if (kAny && (of_row || e.bias_kind == static_cast<int>(BiasKind::scalar))) {
#pragma unroll
    for (int h = 0; h < kRows; ++h) {
      const int row = place.row + 8 * h;
      if (row >= p.m) continue;
      row_bias[h] = few_load<T, false>(static_cast<const T*>(e.bias) + (of_row ? row : 0), 1);
    }
  }
  if (e.residual) {
    few_either(whole, [&](auto pairs) {
#pragma unroll
      for (int i = 0; i < kItems * kRows; ++i) {
        const int row = place.row + 8 * (i % kRows), item = i / kRows;
        if (row >= p.m || !place.has(item)) continue;
        const T* from = static_cast<const T*>(e.residual) + row * e.residual_pitch + place.at(item);
        residual[i] = few_load<T, pairs>(from, p.n - place.at(item));
      }
    });
  }
  float acc[kN / 2] = {};
#pragma unroll
  for (float& v : acc) asm volatile("" : "+f"(v)::"memory");  // they are 0 before the products
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    // Not the wait that traps: beside its branch ptxas waits for each chunk's products (C7517).
    barrier_wait(bars + 8 * c, 0);
    wgmma_fence();
    const std::uint64_t a = wgmma_descriptor(a_at + c * kABytes);
    const std::uint64_t b = wgmma_descriptor(b_at + c * kBBytes);
#pragma unroll
    for (int s = 0; s < 4; ++s) FewWgmma<T, kN>::run(acc, a + 2 * s, b + 2 * s);
    wgmma_commit();
  }
  wgmma_wait<0>();
#pragma unroll
  for (float& v : acc) asm volatile("" : "+f"(v));  // nothing reads them before the wait
  few_send_all<kN, kParts>(acc, sums, received, part, warp, lane);
  barrier_wait_or_trap(received, 0);
  float v[kValues] = {};
  place.add(memory + (sums - a_at), v);
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const float2 b = few_values<T>(bias[i / (2 * kRows)]);
    const float of_its_row = few_values<T>(row_bias[i / 2 % kRows]).x;
    v[i] = v[i] * e.scale + (i % 2 ? b.y : b.x) + of_its_row;
  }
  const auto store = [&](void* to, std::int64_t pitch) {
    few_either(whole, [&](auto pairs) {
#pragma unroll
      for (int i = 0; i < kItems * kRows; ++i) {
        const int row = place.row + 8 * (i % kRows), item = i / kRows;
        if (row >= p.m || !place.has(item)) continue;
        T* at = static_cast<T*>(to) + row * pitch + place.at(item);
        few_store<T, pairs>(at, p.n - place.at(item), v[2 * i], v[2 * i + 1]);
      }
    });
  };
  if (kAny && e.aux) store(e.aux, e.aux_pitch);
  if constexpr (kAny) {
    activate_kind<T>(e, v);
  } else if constexpr (kKind == FewKind::gelu) {
    activate_all<Activation::gelu, kValues, std::is_same_v<T, __half>>(v, 0.0f);
  }
#pragma unroll
  for (int i = 0; i < kItems * kRows; ++i) {
    const float2 r = few_values<T>(residual[i]);
    v[2 * i] += r.x, v[2 * i + 1] += r.y;
  }
  store(p.c, p.c_pitch);
#else
  __trap();
#endif
}

}  // namespace rm::cuda_ops
