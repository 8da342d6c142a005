// Digest and Hasher over BLAKE3's C sources, or over OpenSSL's SHA-256 as a two-level tree.
#include "base/hash.hpp"

#include <vector>

#include "base/error.hpp"
#include "base/file.hpp"

#ifdef RM_HASH_BLAKE3
#include <blake3.h>
#else
#include <openssl/evp.h>
#include <openssl/hmac.h>
#endif

namespace rm {

#ifdef RM_HASH_BLAKE3

struct Hasher::State {
  blake3_hasher hasher;
};

Hasher::Hasher() : state_(std::make_unique<State>()) { blake3_hasher_init(&state_->hasher); }

Hasher::Hasher(const Digest& secret) : state_(std::make_unique<State>()) {
  blake3_hasher_init_keyed(&state_->hasher, secret.bytes.data());
}

Hasher& Hasher::update(ByteSpan data) {
  blake3_hasher_update(&state_->hasher, data.data(), data.size());
  return *this;
}

Digest Hasher::digest() const {
  Digest out;
  blake3_hasher_finalize(&state_->hasher, out.bytes.data(), out.bytes.size());
  return out;
}

std::string_view hash_algorithm() { return "blake3"; }

#else

// Leaves of 1 MiB, prefix 0; root over the leaves' digests and the total length, prefix 1. With a
// secret the root is an HMAC. The prefixes keep a leaf from passing as a root.
struct Hasher::State {
  static constexpr size_t kLeafBytes = size_t{1} << 20;
  std::vector<std::byte> pending;
  std::vector<uint8_t> leaves;
  uint64_t total_bytes = 0;
  bool keyed = false;
  Digest secret;

  static void sha256(uint8_t prefix, ByteSpan data, uint8_t* out) {
    std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(),
                                                                    &EVP_MD_CTX_free);
    if (!context || EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) != 1 ||
        EVP_DigestUpdate(context.get(), &prefix, 1) != 1 ||
        EVP_DigestUpdate(context.get(), data.data(), data.size()) != 1 ||
        EVP_DigestFinal_ex(context.get(), out, nullptr) != 1) {
      throw Error(RM_INTERNAL, "[hash] expected OpenSSL to provide SHA-256, got a failure");
    }
  }

  static void add_leaf(ByteSpan data, std::vector<uint8_t>& leaves) {
    leaves.resize(leaves.size() + Digest::kBytes);
    sha256(0, data, leaves.data() + leaves.size() - Digest::kBytes);
  }
};

Hasher::Hasher() : state_(std::make_unique<State>()) {}

Hasher::Hasher(const Digest& secret) : Hasher() {
  state_->keyed = true;
  state_->secret = secret;
}

Hasher& Hasher::update(ByteSpan data) {
  State& state = *state_;
  state.total_bytes += data.size();
  while (!data.empty()) {
    if (state.pending.empty() && data.size() >= State::kLeafBytes) {
      State::add_leaf(data.first(State::kLeafBytes), state.leaves);
      data = data.subspan(State::kLeafBytes);
      continue;
    }
    const size_t take = std::min(data.size(), State::kLeafBytes - state.pending.size());
    state.pending.insert(state.pending.end(), data.begin(), data.begin() + take);
    data = data.subspan(take);
    if (state.pending.size() == State::kLeafBytes) {
      State::add_leaf(state.pending, state.leaves);
      state.pending.clear();
    }
  }
  return *this;
}

Digest Hasher::digest() const {
  std::vector<uint8_t> root = state_->leaves;
  if (!state_->pending.empty()) State::add_leaf(state_->pending, root);
  for (int shift = 0; shift < 64; shift += 8) {
    root.push_back(static_cast<uint8_t>(state_->total_bytes >> shift));
  }
  Digest out;
  State::sha256(1, std::as_bytes(std::span(root)), out.bytes.data());
  if (state_->keyed) {
    unsigned size = Digest::kBytes;
    Digest mac;
    HMAC(EVP_sha256(), state_->secret.bytes.data(), Digest::kBytes, out.bytes.data(),
         Digest::kBytes, mac.bytes.data(), &size);
    return mac;
  }
  return out;
}

std::string_view hash_algorithm() { return "sha256-tree-1m"; }

#endif

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
