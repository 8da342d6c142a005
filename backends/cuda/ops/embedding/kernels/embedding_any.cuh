// Forward: a thread moves kV elements of some rows. Backward: the occurrences of an id form a list
// in their order (built by `embedding_links`), and the first one's block adds the rows of the list.
#pragma once

#include "_shim/device_shim.cuh"
#include "_shim/divide_shim.hpp"
#include "_shim/launch_shim.hpp"

namespace rm::cuda_ops {

struct EmbeddingArgs {
  const void *table, *ids;  // backward: table is dy
  void* y;                  // backward: dtable
  int* next;                // backward: [count] the next occurrence of the same id, or -1
  int* head;                // backward: [count] 1 where the id occurs first
  int* out_of_range;        // set to 1 where an id is none of the table's; or null
  std::int64_t count, vocabulary, table_pitch;
  int n;
  FastDivisor by_row;  // forward: packs of a row; count times these is below 2^31
  bool wide_ids;
  // Where id i lies: forward takes ids of two strides (rows that repeat, say). In elements.
  std::int64_t first, ids_inner, ids_outer_step, ids_inner_step;
};

__device__ __forceinline__ std::int64_t id_of(const EmbeddingArgs& p, std::int64_t i) {
  if (p.ids_inner > 0) {
    const std::int64_t at = p.first + i, outer = at / p.ids_inner;
    i = outer * p.ids_outer_step + (at - outer * p.ids_inner) * p.ids_inner_step;
  }
  return p.wide_ids ? static_cast<const std::int64_t*>(p.ids)[i]
                    : static_cast<const std::int32_t*>(p.ids)[i];
}

inline constexpr int kEmbeddingPacks = 4;  // a thread's packs of kV elements

template <class T, int kV>
__global__ void __launch_bounds__(256) embedding_rows(const EmbeddingArgs p) {
  const auto total = static_cast<int>(p.count) * static_cast<int>(p.by_row.d);
  const int first =
      static_cast<int>(blockIdx.x) * 256 * kEmbeddingPacks + static_cast<int>(threadIdx.x);
  overlap_begin(p.table, p.ids);
  Pack<T, kV> v[kEmbeddingPacks];
#pragma unroll
  for (int u = 0; u < kEmbeddingPacks; ++u) {
    const int i = first + u * 256;
    if (i >= total) break;
    const auto row = static_cast<int>(p.by_row.quotient(i));
    const std::int64_t at = (i - row * static_cast<int>(p.by_row.d)) * kV, id = id_of(p, row);
    if (id >= 0 && id < p.vocabulary) {
      v[u] = *reinterpret_cast<const Pack<T, kV>*>(static_cast<const T*>(p.table) +
                                                   id * p.table_pitch + at);
    } else {
#pragma unroll
      for (int j = 0; j < kV; ++j) v[u].v[j] = from_float<T>(__int_as_float(0x7fffffff));
      if (p.out_of_range) *p.out_of_range = 1;
    }
  }
  // y is dense: its packs lie as they are counted
#pragma unroll
  for (int u = 0; u < kEmbeddingPacks; ++u) {
    const std::int64_t i = first + u * 256;
    if (i < total) *reinterpret_cast<Pack<T, kV>*>(static_cast<T*>(p.y) + i * kV) = v[u];
  }
}

/// One warp an occurrence looks through the others, 32 at a time.
__global__ void __launch_bounds__(256) embedding_links(const EmbeddingArgs p) {
  const std::int64_t i = blockIdx.x * 8ll + threadIdx.x / 32;
  if (i >= p.count) return;
  const int lane = threadIdx.x % 32;
  const std::int64_t id = id_of(p, i);
  bool first = id >= 0 && id < p.vocabulary;
  if (!first && lane == 0 && p.out_of_range) *p.out_of_range = 1;
  for (std::int64_t j = 0; first && j < i; j += 32) {
    first = !__any_sync(0xffffffffu, j + lane < i && id_of(p, j + lane) == id);
  }
  std::int64_t next = -1;
  for (std::int64_t j = i + 1; next < 0 && j < p.count; j += 32) {
    const unsigned same =
        __ballot_sync(0xffffffffu, j + lane < p.count && id_of(p, j + lane) == id);
    if (same) next = j + __ffs(static_cast<int>(same)) - 1;
  }
  if (lane == 0) p.head[i] = first, p.next[i] = static_cast<int>(next);
}

template <class T>
__global__ void __launch_bounds__(256) embedding_sums(const EmbeddingArgs p) {
  const std::int64_t i = blockIdx.x;
  if (!p.head[i]) return;
  T* out = static_cast<T*>(p.y) + id_of(p, i) * p.n;
  for (int d = threadIdx.x; d < p.n; d += 256) {
    float sum = 0.0f;
    for (std::int64_t j = i; j >= 0; j = p.next[j]) {
      sum += to_float(static_cast<const T*>(p.table)[j * p.n + d]);
    }
    out[d] = from_float<T>(sum);
  }
}

}  // namespace rm::cuda_ops
