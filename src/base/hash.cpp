// Digest and Hasher over base/blake3.hpp.
#include "base/hash.hpp"

#include <vector>

#include "base/blake3.hpp"
#include "base/error.hpp"
#include "base/file.hpp"

namespace rm {

struct Hasher::State {
  blake3::Hasher hasher;
};

Hasher::Hasher() : state_(std::make_unique<State>()) {}

Hasher::Hasher(const Digest& secret)
    : state_(std::make_unique<State>(State{blake3::Hasher(std::span(secret.bytes))})) {}

Hasher& Hasher::update(ByteSpan data) {
  state_->hasher.update(reinterpret_cast<const uint8_t*>(data.data()), data.size());
  return *this;
}

Digest Hasher::digest() const { return {state_->hasher.digest()}; }

std::string_view hash_algorithm() { return "blake3"; }

Hasher::Hasher(const Hasher& other) : state_(std::make_unique<State>(*other.state_)) {}
Hasher& Hasher::operator=(const Hasher& other) {
  *state_ = *other.state_;
  return *this;
}
Hasher::Hasher(Hasher&&) noexcept = default;
Hasher& Hasher::operator=(Hasher&&) noexcept = default;
Hasher::~Hasher() = default;

Digest hash_bytes(ByteSpan data) { return Hasher().update(data).digest(); }

Digest hash_file(const std::string& path) {
  constexpr size_t kPieceBytes = size_t{1} << 20;  // in L2, and long enough for every SIMD width
  const Fd file = open_file(path, OpenFor::kRead);
  std::vector<std::byte> piece(kPieceBytes);
  Hasher hasher;
  for (uint64_t offset = 0;;) {
    const size_t got = read_at(file, offset, piece, path);
    if (got == 0) return hasher.digest();
    hasher.update(ByteSpan(piece).first(got));
    offset += got;
  }
}

std::string Digest::hex() const {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * kBytes);
  for (uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

Digest Digest::from_hex(std::string_view text) {
  const auto value = [](char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
  };
  Digest out;
  bool valid = text.size() == 2 * kBytes;
  for (size_t i = 0; valid && i < kBytes; ++i) {
    const int high = value(text[2 * i]), low = value(text[2 * i + 1]);
    valid = high >= 0 && low >= 0;
    if (valid) out.bytes[i] = static_cast<uint8_t>(high * 16 + low);
  }
  if (!valid) {
    throw_invalid("[digest] expected 64 hexadecimal digits, got '" +
                  std::string(text.substr(0, 80)) + "'");
  }
  return out;
}

}  // namespace rm
