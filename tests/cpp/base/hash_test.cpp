// Digests: known answers, incremental use, and that every bit counts.
#include "base/hash.hpp"

#include <doctest/doctest.h>

#include <array>
#include <numeric>
#include <random>
#include <vector>

#include "base/blake3.hpp"
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
  // BLAKE3's own test vectors: the empty input, and the bytes 0, 1, ... 250, 0, 1, ... (102400).
  CHECK(rm::hash_bytes("").hex() ==
        "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262");
  std::vector<std::byte> counting(102400);
  for (size_t i = 0; i < counting.size(); ++i) counting[i] = static_cast<std::byte>(i % 251);
  CHECK(rm::hash_bytes(counting).hex() ==
        "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085");
}

TEST_CASE("sizes around blocks, chunks and subtrees give the official digests at every level") {
  using rm::blake3::Level;
  struct Known {
    size_t bytes;
    const char *plain, *keyed;  // the first 8 bytes of the digests
  };
  // Made by the official C implementation (1.3.1): input bytes i % 251, key bytes 0, 1, ... 31.
  const Known known[] = {
    {0, "af1349b9f5f9a1a6", "73492b19995d71cd"},
    {1, "2d3adedff11b61f1", "d08b45c6b127ee94"},
    {63, "e9bc37a594daad83", "e471df92f6f7dee1"},
    {64, "4eed7141ea4a5cd4", "cfaf838ff320e0d8"},
    {65, "de1e5fa0be70df6d", "d8a45528bfa93a0d"},
    {1023, "10108970eeda3eb9", "da1f18069871512a"},
    {1024, "42214739f095a406", "f45a9249a627fdf1"},
    {1025, "d00278ae47eb27b3", "82223147a9b804a0"},
    {2048, "e776b6028c7cd22a", "636bfa717d4f9fc3"},
    {2049, "5f4d72f40d7a5f82", "5442eec85e3fd173"},
    {3072, "b98cb0ff3623be03", "66315151ac08f5cd"},
    {4096, "015094013f57a527", "e8c6e859e0480c4b"},
    {4097, "9b4052b38f1c5fc8", "a3b7fe277011b5ef"},
    {8193, "bab6c09cb8ce8cf4", "c666ccf5fa240c07"},
    {16384, "f875d6646de28985", "8880ce020ab04594"},
    {31744, "62b6960e1a44bcc1", "55253f057bce59e7"},
    {131072, "306baba93b1a393c", "0eed93ee0e31b0d5"},
    {131073, "f837d4254d24ba3d", "9536698737c96a47"},
    {262145, "531c319935cf78f3", "de6b89beb2b41431"},
    {1000000, "5e82c663d164c54e", "13befc238fad4cf7"},
  };
  std::vector<uint8_t> data(1'000'000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i % 251);
  std::array<uint8_t, 32> key;
  std::iota(key.begin(), key.end(), uint8_t{0});
  const auto start_of = [](const rm::blake3::Hasher& hasher) {
    return rm::Digest{hasher.digest()}.hex().substr(0, 16);
  };
  for (Level level : {Level::kBaseline, Level::kAvx2, Level::kAvx512}) {
    if (level > rm::blake3::best_level()) {
      MESSAGE("this processor lacks level ", static_cast<int>(level));
      continue;
    }
    for (const Known& want : known) {
      CAPTURE(static_cast<int>(level));
      CAPTURE(want.bytes);
      rm::blake3::Hasher plain(level), keyed(key, level), split(level);
      plain.update(data.data(), want.bytes);
      CHECK(start_of(plain) == want.plain);
      keyed.update(data.data(), want.bytes);
      CHECK(start_of(keyed) == want.keyed);
      for (size_t at = 0; at < want.bytes;) {  // growing pieces, a digest after each
        const size_t piece = std::min(want.bytes - at, at / 2 + 1);
        split.update(data.data() + at, piece);
        at += piece;
        static_cast<void>(split.digest());
      }
      CHECK(start_of(split) == want.plain);
    }
  }
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
