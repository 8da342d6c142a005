// A warp a line of up to 256 values, in registers; a block a line of up to 4096 (of eight bytes: 2048),
// in shared memory; longer lines in pieces of a block, merged in global memory, a pass a doubling: each
// item finds its place by bisection of the run beside its own. Bound: latency.
#pragma once

#include "_shim/device_shim.cuh"
#include "_shim/launch_shim.hpp"
#include "_shim/walk_shim.hpp"
#include "sort/kernels/sort_network.hpp"

namespace rm::cuda_ops {

struct SortArgs {
  const void* x;
  void* values;
  std::int64_t* indices;
  DType dtype;
  bool descending;
  Walk<3> lines;  // offsets of x, values and indices
  std::int64_t length, kept;
  std::int64_t x_step, values_step, indices_step;
};

template <class Key>
__device__ __forceinline__ Key sort_key(const void* x, DType t, std::int64_t at) {
  if constexpr (sizeof(Key) == 8) {
    const auto bits = static_cast<const std::uint64_t*>(x)[at];
    return t == DType::f64 ? sort_order_of_float(bits) : sort_order_of_integer(bits);
  } else {
    const auto of_float = [](float v) { return sort_order_of_float(__float_as_uint(v)); };
    const auto of_integer = [](std::int32_t v) {
      return sort_order_of_integer(static_cast<std::uint32_t>(v));
    };
    switch (t) {
      case DType::f32:
        return of_float(static_cast<const float*>(x)[at]);
      case DType::bf16:
        return of_float(to_float(static_cast<const __nv_bfloat16*>(x)[at]));
      case DType::f16:
        return of_float(to_float(static_cast<const __half*>(x)[at]));
      case DType::i32:
        return of_integer(static_cast<const std::int32_t*>(x)[at]);
      case DType::i16:
        return of_integer(static_cast<const std::int16_t*>(x)[at]);
      case DType::i8:
        return of_integer(static_cast<const std::int8_t*>(x)[at]);
      default:  // u8 and bool
        return of_integer(static_cast<const std::uint8_t*>(x)[at]);
    }
  }
}

/// Item `i` of the line whose first value is at `from`.
template <class Item>
__device__ __forceinline__ Item sort_item(const SortArgs& p, std::int64_t from, std::int64_t i) {
  using Key = typename Item::Key;
  const Key key = sort_key<Key>(p.x, p.dtype, from + i * p.x_step);
  return Item::made(p.descending ? static_cast<Key>(~key) : key, static_cast<std::uint32_t>(i));
}

/// The value at `place` of a line comes to `to` of the results: bits as they are.
__device__ __forceinline__ void sort_store(const SortArgs& p, const std::int64_t (&line)[3],
                                           std::int64_t to, std::uint32_t place) {
  const std::int64_t from = line[0] + place * p.x_step, at = line[1] + to * p.values_step;
  switch (p.dtype) {
    case DType::i64:
    case DType::f64:
      static_cast<std::uint64_t*>(p.values)[at] = static_cast<const std::uint64_t*>(p.x)[from];
      break;
    case DType::f32:
    case DType::i32:
      static_cast<std::uint32_t*>(p.values)[at] = static_cast<const std::uint32_t*>(p.x)[from];
      break;
    case DType::bf16:
    case DType::f16:
    case DType::i16:
      static_cast<std::uint16_t*>(p.values)[at] = static_cast<const std::uint16_t*>(p.x)[from];
      break;
    default:
      static_cast<std::uint8_t*>(p.values)[at] = static_cast<const std::uint8_t*>(p.x)[from];
  }
  p.indices[line[2] + to * p.indices_step] = place;
}

__device__ __forceinline__ ShortItem sort_from_lane(ShortItem item, int lanes) {
  return {__shfl_xor_sync(0xffffffffu, item.number, lanes)};
}
__device__ __forceinline__ WideItem sort_from_lane(WideItem item, int lanes) {
  return {__shfl_xor_sync(0xffffffffu, item.key, lanes),
          __shfl_xor_sync(0xffffffffu, item.at, lanes)};
}

/// One step of the network over a warp's items: item e of a lane lies at place 32 e + lane.
template <class Item, int kEach>
__device__ __forceinline__ void sort_warp_step(Item (&item)[kEach], int lane, int size, int stride) {
  if (stride < 32) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const Item other = sort_from_lane(item[e], stride);
      if (sort_keeps_lesser(32 * e + lane, size, stride) == other.before(item[e])) item[e] = other;
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int f = e ^ (stride / 32);
    if (f < e) continue;
    if (sort_keeps_lesser(32 * e, size, stride) == item[f].before(item[e])) {
      const Item kept = item[e];
      item[e] = item[f], item[f] = kept;
    }
  }
}

/// Lines of up to 32 kEach values.
template <class Item, int kEach>
__global__ void __launch_bounds__(128) sort_warps(const __grid_constant__ SortArgs p) {
  overlap_begin();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t i = blockIdx.x * 4ll + threadIdx.x / 32; i < p.lines.total; i += gridDim.x * 4ll) {
    std::int64_t line[3];
    walk_offsets(p.lines, i, line);
    Item item[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int place = 32 * e + lane;
      item[e] = place < p.length ? sort_item<Item>(p, line[0], place) : Item::last();
    }
#pragma unroll
    for (int size = 2; size <= 32 * kEach; size *= 2) {
#pragma unroll
      for (int stride = size / 2; stride > 0; stride /= 2) sort_warp_step(item, lane, size, stride);
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (32 * e + lane < p.kept) sort_store(p, line, 32 * e + lane, item[e].place());
    }
  }
}

/// `first`: of the line's values, of which the block takes up to `places`, a power of two.
template <class Item>
__device__ __forceinline__ void sort_block(const SortArgs& p, std::int64_t from, std::int64_t first,
                                           int places, Item* items) {
  for (int i = static_cast<int>(threadIdx.x); i < places; i += static_cast<int>(blockDim.x)) {
    items[i] = first + i < p.length ? sort_item<Item>(p, from, first + i) : Item::last();
  }
  for (int size = 2; size <= places; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < places / 2; i += static_cast<int>(blockDim.x)) {
        const int low = sort_pair(i, stride), high = low + stride;
        const Item a = items[low], b = items[high];
        if (sort_keeps_lesser(low, size, stride) == b.before(a)) items[low] = b, items[high] = a;
      }
    }
  }
  __syncthreads();
}

/// Lines of up to `places` <= Item::kMost values.
template <class Item>
__global__ void __launch_bounds__(512) sort_blocks(const __grid_constant__ SortArgs p, int places) {
  __shared__ Item items[Item::kMost];
  overlap_begin();
  for (std::int64_t i = blockIdx.x; i < p.lines.total; i += gridDim.x) {
    std::int64_t line[3];
    walk_offsets(p.lines, i, line);
    sort_block(p, line[0], 0, places, items);
    for (std::int64_t to = threadIdx.x; to < p.kept; to += blockDim.x) {
      sort_store(p, line, to, items[to].place());
    }
    __syncthreads();  // items are read
  }
}

/// Runs of Item::kMost values of every line, to `out` [lines, length].
template <class Item>
__global__ void __launch_bounds__(512) sort_runs(const __grid_constant__ SortArgs p, Item* out) {
  __shared__ Item items[Item::kMost];
  overlap_begin();
  const std::int64_t runs = (p.length + Item::kMost - 1) / Item::kMost;
  for (std::int64_t i = blockIdx.x; i < p.lines.total * runs; i += gridDim.x) {
    const std::int64_t number = i / runs, first = (i - number * runs) * Item::kMost;
    std::int64_t line[3];
    walk_offsets(p.lines, number, line);
    sort_block(p, line[0], first, Item::kMost, items);
    for (std::int64_t to = threadIdx.x; to < Item::kMost && first + to < p.length; to += blockDim.x) {
      out[number * p.length + first + to] = items[to];
    }
    __syncthreads();  // items are read
  }
}

/// Neighbouring runs of `width` become one, in `to`, or, where kLast, the results.
template <class Item, bool kLast>
__global__ void __launch_bounds__(256)
    sort_merge(const __grid_constant__ SortArgs p, const Item* from, Item* to, std::int64_t width) {
  overlap_begin();
  const std::int64_t total = p.lines.total * p.length, stride = gridDim.x * 256ll;
  for (std::int64_t e = blockIdx.x * 256ll + threadIdx.x; e < total; e += stride) {
    const std::int64_t number = e / p.length, i = e - number * p.length;
    const Item* items = from + number * p.length;
    const std::int64_t place = sort_merged_place(items, p.length, width, i);
    if constexpr (kLast) {
      if (place >= p.kept) continue;
      std::int64_t line[3];
      walk_offsets(p.lines, number, line);
      sort_store(p, line, place, items[i].place());
    } else {
      to[number * p.length + place] = items[i];
    }
  }
}

}  // namespace rm::cuda_ops
