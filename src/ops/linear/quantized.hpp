// How quantised weights lie in memory: what quantize writes and quant_linear reads.
//
// Rows are padded to 64 elements. 8 bits: one signed byte each. 4 bits: of 64 elements, byte j
// holds element j in its low and element 32 + j in its high half, so that one load of 32 bytes
// gives two runs of 32. With tiles, eight rows lie as one: four bytes of each row in turn, and a
// scale of each; rows behind the last whole tile lie as they do without. In pairs (what GPUs read):
// byte j of a row of 4 bits holds elements 2j and 2j + 1, and the scales of a group lie as one.
#pragma once

#include <cstdint>

namespace rm::ops {

struct QuantLayout {
  static constexpr int64_t kTile = 8;
  int64_t k, bits, group;
  int64_t rows = 0;  // of the weight; only tiles depend on them
  int64_t tile = 1;  // 1 or kTile
  bool pairs = false;

  int64_t groups() const { return (k + group - 1) / group; }
  int64_t row_bytes() const { return (k + 63) / 64 * 64 * bits / 8; }
  /// Where row r's scale of group g lies.
  int64_t scale_at(int64_t r, int64_t g) const {
    if (pairs) return g * rows + r;
    return in_tile(r) ? (r / kTile * groups() + g) * kTile + r % kTile : r * groups() + g;
  }
  int get(const uint8_t* q, int64_t r, int64_t i) const {
    const uint8_t byte = q[byte_at(r, i)];
    if (bits == 8) return static_cast<int8_t>(byte);
    return is_low(i) ? byte & 15 : byte >> 4;
  }
  void put(uint8_t* q, int64_t r, int64_t i, int value) const {
    uint8_t& byte = q[byte_at(r, i)];
    if (bits == 8) {
      byte = static_cast<uint8_t>(value);
      return;
    }
    byte = static_cast<uint8_t>(is_low(i) ? (byte & 0xf0) | value : (byte & 15) | value << 4);
  }

 private:
  bool is_low(int64_t i) const { return (pairs ? i : i / 32) % 2 == 0; }
  bool in_tile(int64_t r) const { return tile == kTile && r < rows / kTile * kTile; }
  int64_t byte_at(int64_t r, int64_t i) const {
    const int64_t b = bits == 8 ? i : pairs ? i / 2 : i / 64 * 32 + i % 32;
    if (!in_tile(r)) return r * row_bytes() + b;
    return r / kTile * kTile * row_bytes() + (b / 4 * kTile + r % kTile) * 4 + b % 4;
  }
};

}  // namespace rm::ops
