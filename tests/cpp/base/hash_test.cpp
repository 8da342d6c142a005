// Digests: known answers, incremental use, and that every bit counts.
#include "base/hash.hpp"

#include <doctest/doctest.h>

#include <random>
#include <vector>

#include "base/error.hpp"

namespace {

std::vector<std::byte> random_bytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

}  // namespace

TEST_CASE("the digest of known input is the published one") {
  if (rm::hash_algorithm() != "blake3") return;
  // BLAKE3's own test vectors: the empty input, and the bytes 0, 1, ... 250, 0, 1, ... (102400).
  CHECK(rm::hash_bytes("").hex() ==
        "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262");
  std::vector<std::byte> counting(102400);
  for (size_t i = 0; i < counting.size(); ++i) counting[i] = static_cast<std::byte>(i % 251);
  CHECK(rm::hash_bytes(counting).hex() ==
        "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085");
}

TEST_CASE("pieces give the digest of the whole, whatever their sizes") {
  const auto data = random_bytes(3'500'001, 7);
  const rm::Digest whole = rm::hash_bytes(data);
  for (size_t step : {1'000u, 4'096u, 1u << 20, 3'000'000u}) {
    rm::Hasher hasher;
    for (size_t at = 0; at < data.size(); at += step) {
      hasher.update(rm::ByteSpan(data).subspan(at, std::min<size_t>(step, data.size() - at)));
    }
    CHECK(hasher.digest() == whole);
  }
}

TEST_CASE("one flipped bit gives another digest") {
  auto data = random_bytes(100'000, 8);
  const rm::Digest before = rm::hash_bytes(data);
  std::mt19937 random(9);
  for (int round = 0; round < 200; ++round) {
    std::byte& byte = data[random() % data.size()];
    const std::byte bit{static_cast<uint8_t>(1u << (random() % 8))};
    byte ^= bit;
    CHECK(rm::hash_bytes(data) != before);
    byte ^= bit;
  }
  CHECK(rm::hash_bytes(data) == before);
}

TEST_CASE("a code under another secret is another code") {
  const rm::Digest a = rm::hash_bytes("a"), b = rm::hash_bytes("b");
  CHECK(rm::Hasher(a).update("text").digest() == rm::Hasher(a).update("text").digest());
  CHECK(rm::Hasher(a).update("text").digest() != rm::Hasher(b).update("text").digest());
  CHECK(rm::Hasher(a).update("text").digest() != rm::hash_bytes("text"));
}

TEST_CASE("hexadecimal text goes both ways and nothing else is a digest") {
  const rm::Digest digest = rm::hash_bytes("x");
  CHECK(rm::Digest::from_hex(digest.hex()) == digest);
  CHECK_THROWS_AS(rm::Digest::from_hex("abc"), rm::Error);
  CHECK_THROWS_AS(rm::Digest::from_hex(std::string(64, 'g')), rm::Error);
  CHECK_THROWS_AS(rm::Digest::from_hex(digest.hex() + "0"), rm::Error);
}

TEST_CASE("a copied hasher continues on its own") {
  rm::Hasher first;
  first.update("common");
  rm::Hasher second = first;
  second.update("more");
  CHECK(first.digest() == rm::hash_bytes("common"));
  CHECK(second.digest() == rm::hash_bytes("commonmore"));
}
