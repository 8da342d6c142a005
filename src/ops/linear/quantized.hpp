// How quantised weights lie in memory: what quantize writes and quant_linear reads.
//
// Rows are padded to 64 elements. 8 bits: one signed byte each. 4 bits: of 64 elements, byte j
// holds element j in its low and element 32 + j in its high half, so that one load of 32 bytes
// gives two runs of 32.
#pragma once

#include <cstdint>

namespace rm::ops {

struct QuantLayout {
  int64_t k, bits, group;

  int64_t groups() const { return (k + group - 1) / group; }
  int64_t row_bytes() const { return (k + 63) / 64 * 64 * bits / 8; }
  int get(const uint8_t* row, int64_t i) const {
    if (bits == 8) return static_cast<int8_t>(row[i]);
    const uint8_t byte = row[i / 64 * 32 + i % 32];
    return i / 32 % 2 == 0 ? byte & 15 : byte >> 4;
  }
  void put(uint8_t* row, int64_t i, int value) const {
    if (bits == 8) {
      row[i] = static_cast<uint8_t>(value);
      return;
    }
    uint8_t& byte = row[i / 64 * 32 + i % 32];
    byte = static_cast<uint8_t>(i / 32 % 2 == 0 ? (byte & 0xf0) | value : (byte & 15) | value << 4);
  }
};

}  // namespace rm::ops
