// Scans mask rows from both ends, so a full mask costs two looks.
#include "ops/sdpa/attended.hpp"

#include <algorithm>
#include <cstring>

namespace rm::cpu {
namespace {

/// Bits of a mask element that hide a key: minus infinity, and the lowest finite number.
template <class Bits>
struct Hidden {
  Bits infinite, lowest;
};

template <class Bits>
KeyRange scan_additive(const Bits* row, int64_t stride, int64_t keys, Hidden<Bits> hidden) {
  bool lowest_seen = false;
  const auto hides = [&](int64_t t) {
    const Bits bits = row[t * stride];
    lowest_seen = lowest_seen || bits == hidden.lowest;
    return bits == hidden.infinite || bits == hidden.lowest;
  };
  int64_t end = keys, begin = 0;
  while (end > 0 && hides(end - 1)) --end;
  if (end == 0) return lowest_seen ? KeyRange{0, keys} : KeyRange{0, 0};
  while (hides(begin)) ++begin;
  return {begin, end};
}

KeyRange scan_bool(const uint8_t* row, int64_t stride, int64_t keys) {
  int64_t end = keys, begin = 0;
  const auto eight = [&](int64_t t) {
    uint64_t word;
    std::memcpy(&word, row + t, 8);
    return word;
  };
  if (stride == 1) {
    while (end >= 8 && eight(end - 8) == 0) end -= 8;
  }
  while (end > 0 && !row[(end - 1) * stride]) --end;
  if (end == 0) return {0, 0};
  if (stride == 1) {
    while (begin + 8 <= end && eight(begin) == 0) begin += 8;
  }
  while (!row[begin * stride]) ++begin;
  return {begin, end};
}

KeyRange scan_row(const SdpaShape& p, const void* mask, int64_t offset, int64_t keys) {
  const int64_t stride = p.m[3];
  switch (p.mask) {
    case DType::boolean:
      return scan_bool(static_cast<const uint8_t*>(mask) + offset, stride, keys);
    case DType::f32:
      return scan_additive<uint32_t>(static_cast<const uint32_t*>(mask) + offset, stride, keys,
                                     {0xff800000u, 0xff7fffffu});
    case DType::bf16:
      return scan_additive<uint16_t>(static_cast<const uint16_t*>(mask) + offset, stride, keys,
                                     {0xff80, 0xff7f});
    case DType::f16:
      return scan_additive<uint16_t>(static_cast<const uint16_t*>(mask) + offset, stride, keys,
                                     {0xfc00, 0xfbff});
    default:
      return {0, keys};
  }
}

}  // namespace

KeyRange attended(const SdpaShape& p, const SdpaData& data, int64_t b, int64_t h0, int64_t h1) {
  const int64_t keys = p.causal ? std::min(p.t, p.s) : p.t;
  if (p.mask == DType::invalid) return {0, keys};
  const int64_t heads = p.m[1] == 0 ? h0 + 1 : h1, rows = p.m[2] == 0 ? 1 : p.s;
  KeyRange all{keys, 0};
  for (int64_t h = h0; h < heads; ++h) {
    for (int64_t s = 0; s < rows; ++s) {
      const int64_t offset = b * p.m[0] + h * p.m[1] + s * p.m[2];
      const KeyRange row = scan_row(p, data.mask, offset, keys);
      if (row.begin == row.end) continue;
      all = {std::min(all.begin, row.begin), std::max(all.end, row.end)};
    }
  }
  return all.begin < all.end ? all : KeyRange{0, 0};
}

}  // namespace rm::cpu
