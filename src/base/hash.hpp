// Content digests: 32 bytes of BLAKE3.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace rm {

using ByteSpan = std::span<const std::byte>;

/// The bytes of a text, borrowed.
inline ByteSpan as_byte_span(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

struct Digest {
  static constexpr size_t kBytes = 32;
  std::array<uint8_t, kBytes> bytes{};

  auto operator<=>(const Digest&) const = default;
  /// 64 lower-case hexadecimal digits.
  std::string hex() const;
  /// Throws rm::Error unless `text` is exactly 64 hexadecimal digits.
  static Digest from_hex(std::string_view text);
  ByteSpan span() const { return std::as_bytes(std::span(bytes)); }
};

/// Incremental digest. Copyable; not thread safe.
class Hasher {
 public:
  Hasher();
  /// A message authentication code under a 32-byte secret.
  explicit Hasher(const Digest& secret);
  Hasher(const Hasher& other);
  Hasher& operator=(const Hasher& other);
  Hasher(Hasher&&) noexcept;
  Hasher& operator=(Hasher&&) noexcept;
  ~Hasher();

  Hasher& update(ByteSpan data);
  Hasher& update(std::string_view text) { return update(as_byte_span(text)); }
  /// The digest of what was given so far; more may follow.
  Digest digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

Digest hash_bytes(ByteSpan data);
inline Digest hash_bytes(std::string_view text) { return hash_bytes(as_byte_span(text)); }
/// The digest of a file's content, read in pieces. Throws rm::FileError.
Digest hash_file(const std::string& path);
/// "blake3"; part of every cache key's schema.
std::string_view hash_algorithm();

}  // namespace rm

template <>
struct std::hash<rm::Digest> {
  size_t operator()(const rm::Digest& digest) const noexcept {
    size_t value;  // the digest is uniform: its first word is a hash
    std::memcpy(&value, digest.bytes.data(), sizeof(value));
    return value;
  }
};
