// What the kernels sort: a value as an unsigned number of the same order, with its place below it, so
// that no two items are equal and any network sorts stably. And the network: bitonic (Batcher 1968).
// Plain functions, which run on the host, too.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define RM_SORT_BOTH __host__ __device__ __forceinline__
#else
#define RM_SORT_BOTH inline
#endif

namespace rm::cuda_ops {

/// The order of a float or double as an unsigned number of as many bits: -inf .. 0 .. inf, NaN.
template <class U>
RM_SORT_BOTH U sort_order_of_float(U bits) {
  constexpr U kSign = U{1} << (8 * sizeof(U) - 1);
  constexpr U kInfinity = static_cast<U>(sizeof(U) == 4 ? 0x7f800000ull : 0x7ff0000000000000ull);
  const U size = bits & static_cast<U>(~kSign);
  if (size > kInfinity) return static_cast<U>(~U{0});
  if (size == 0) return kSign;  // both zeros
  return bits & kSign ? static_cast<U>(~bits) : static_cast<U>(bits | kSign);
}

/// The order of a signed integer.
template <class U>
RM_SORT_BOTH U sort_order_of_integer(U bits) {
  return bits ^ (U{1} << (8 * sizeof(U) - 1));
}

/// Of values of up to four bytes: order and place in one number.
struct ShortItem {
  std::uint64_t number;
  using Key = std::uint32_t;
  static constexpr int kMost = 4096;  // that a block holds
  RM_SORT_BOTH static ShortItem made(Key key, std::uint32_t place) {
    return {static_cast<std::uint64_t>(key) << 32 | place};
  }
  /// Behind every item: no place is that large.
  RM_SORT_BOTH static ShortItem last() { return {~std::uint64_t{0}}; }
  RM_SORT_BOTH std::uint32_t place() const { return static_cast<std::uint32_t>(number); }
  RM_SORT_BOTH bool before(const ShortItem& other) const { return number < other.number; }
};

/// Of values of eight bytes.
struct WideItem {
  std::uint64_t key;
  std::uint64_t at;
  using Key = std::uint64_t;
  static constexpr int kMost = 2048;
  RM_SORT_BOTH static WideItem made(Key key, std::uint32_t place) { return {key, place}; }
  RM_SORT_BOTH static WideItem last() { return {~std::uint64_t{0}, ~std::uint64_t{0}}; }
  RM_SORT_BOTH std::uint32_t place() const { return static_cast<std::uint32_t>(at); }
  RM_SORT_BOTH bool before(const WideItem& other) const {
    return key < other.key || (key == other.key && at < other.at);
  }
};

/// Whether the item at `place` becomes the lesser of it and the one at place ^ stride, in the step of
/// that stride of the merges to runs of `size`.
RM_SORT_BOTH bool sort_keeps_lesser(int place, int size, int stride) {
  return ((place & size) == 0) == ((place & stride) == 0);
}

/// The lower place of pair `i` of a step.
RM_SORT_BOTH int sort_pair(int i, int stride) { return 2 * i - (i & (stride - 1)); }

/// Items of run[0 .. count) before `item`.
template <class Item>
RM_SORT_BOTH std::int64_t sort_rank(const Item* run, std::int64_t count, const Item& item) {
  std::int64_t low = 0, high = count;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (run[middle].before(item)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Where item `i` of a line goes when neighbouring runs of `width` become one.
template <class Item>
RM_SORT_BOTH std::int64_t sort_merged_place(const Item* line, std::int64_t length,
                                            std::int64_t width, std::int64_t i) {
  const std::int64_t begin = i / (2 * width) * (2 * width);
  const std::int64_t middle = begin + width < length ? begin + width : length;
  const std::int64_t end = middle + width < length ? middle + width : length;
  if (i < middle) return i + sort_rank(line + middle, end - middle, line[i]);
  return i - (middle - begin) + sort_rank(line + begin, middle - begin, line[i]);
}

}  // namespace rm::cuda_ops
