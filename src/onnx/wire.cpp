#include "onnx/wire.hpp"

#include <cstring>

#include "base/error.hpp"

namespace rm::onnx {
namespace {

[[noreturn]] void damaged(const char* what) {
  throw Error(RM_INVALID_ARGUMENT,
              std::string("[onnx] expected a whole ONNX file, got ") + what + "; try writing it again",
              "RM340");
}

uint64_t take_varint(std::string_view* rest) {
  uint64_t value = 0;
  for (unsigned shift = 0; shift < 70; shift += 7) {
    if (rest->empty()) damaged("an end within a number");
    const auto byte = static_cast<unsigned char>(rest->front());
    rest->remove_prefix(1);
    if (shift < 64) value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if ((byte & 0x80) == 0) return value;
  }
  damaged("a number of more than ten bytes");
}

std::string_view take(std::string_view* rest, uint64_t size) {
  if (size > rest->size()) damaged("a field longer than its message");
  std::string_view out = rest->substr(0, static_cast<size_t>(size));
  rest->remove_prefix(static_cast<size_t>(size));
  return out;
}

uint64_t fixed(std::string_view bytes) {
  uint64_t value = 0;
  std::memcpy(&value, bytes.data(), bytes.size());  // little endian, as the host is
  return value;
}

template <class T>
void append_fixed(const Field& field, int wire, std::vector<double>* out) {
  T value;
  if (field.wire == wire) {
    std::memcpy(&value, &field.value, sizeof(T));
    out->push_back(static_cast<double>(value));
    return;
  }
  std::string_view bytes = field.text();
  if (bytes.size() % sizeof(T) != 0) damaged("half a number");
  for (size_t i = 0; i < bytes.size(); i += sizeof(T)) {
    std::memcpy(&value, bytes.data() + i, sizeof(T));
    out->push_back(static_cast<double>(value));
  }
}

}  // namespace

float Field::real() const {
  if (wire != 5) damaged("another kind of field");
  float out;
  const auto low = static_cast<uint32_t>(value);
  std::memcpy(&out, &low, sizeof(out));
  return out;
}

std::string_view Field::text() const {
  if (wire != 2) damaged("another kind of field");
  return bytes;
}

std::string Field::name() const {
  std::string_view rest = text();
  while (!rest.empty()) {
    const auto lead = static_cast<unsigned char>(rest[0]);
    const size_t more = lead < 0x80                    ? 0
                        : lead >= 0xc2 && lead < 0xe0  ? 1
                        : lead >= 0xe0 && lead < 0xf0  ? 2
                        : lead >= 0xf0 && lead <= 0xf4 ? 3
                                                       : rest.size();
    if (more >= rest.size()) damaged("a name that is no text");
    for (size_t k = 1; k <= more; ++k) {
      if ((static_cast<unsigned char>(rest[k]) & 0xc0) != 0x80) damaged("a name that is no text");
    }
    const unsigned second = more == 0 ? 0 : static_cast<unsigned char>(rest[1]);
    if ((lead == 0xe0 && second < 0xa0) || (lead == 0xed && second > 0x9f) ||
        (lead == 0xf0 && second < 0x90) || (lead == 0xf4 && second > 0x8f)) {
      damaged("a name that is no text");
    }
    rest.remove_prefix(more + 1);
  }
  return std::string(bytes);
}

bool Message::next(Field* field) {
  if (rest_.empty()) return false;
  const uint64_t tag = take_varint(&rest_);
  *field = {tag >> 3, static_cast<int>(tag & 7), 0, {}};
  if (field->number == 0) damaged("a field without a number");
  switch (field->wire) {
    case 0: field->value = take_varint(&rest_); break;
    case 1: field->value = fixed(take(&rest_, 8)); break;
    case 2: field->bytes = take(&rest_, take_varint(&rest_)); break;
    case 5: field->value = fixed(take(&rest_, 4)); break;
    default: damaged("a field of an unknown kind");
  }
  return true;
}

void append_integers(const Field& field, std::vector<int64_t>* out) {
  if (field.wire == 0) {
    out->push_back(field.integer());
    return;
  }
  std::string_view rest = field.text();
  while (!rest.empty()) out->push_back(static_cast<int64_t>(take_varint(&rest)));
}

void append_floats(const Field& field, std::vector<double>* out) {
  append_fixed<float>(field, 5, out);
}
void append_doubles(const Field& field, std::vector<double>* out) {
  append_fixed<double>(field, 1, out);
}

}  // namespace rm::onnx
