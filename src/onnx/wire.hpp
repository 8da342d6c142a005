// Reads the wire format of protocol buffers: a message is a run of (field number, wire type, value).
//
// Views into the caller's bytes, nothing is copied. Every length is checked against what is left, so
// bytes of any content end in an error, never in a read outside.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace rm::onnx {

struct Field {
  uint64_t number = 0;
  int wire = 0;             // 0 varint, 1 eight bytes, 2 bytes, 5 four bytes
  uint64_t value = 0;       // wire 0, 1, 5
  std::string_view bytes;   // wire 2

  int64_t integer() const { return static_cast<int64_t>(value); }
  float real() const;       // wire 5
  std::string_view text() const;  // throws unless wire 2
  std::string name() const;       // throws unless it is UTF-8 as well
};

class Message {
 public:
  explicit Message(std::string_view bytes) : rest_(bytes) {}
  /// False at the end. Throws rm::Error(RM_INVALID_ARGUMENT) for bytes that are no message.
  bool next(Field* field);

 private:
  std::string_view rest_;
};

/// Integers of a repeated field: one, or all of a packed run, are appended.
void append_integers(const Field& field, std::vector<int64_t>* out);
/// The same for 32-bit floats.
void append_floats(const Field& field, std::vector<double>* out);
/// The same for doubles.
void append_doubles(const Field& field, std::vector<double>* out);

}  // namespace rm::onnx
