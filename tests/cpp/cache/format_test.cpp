// The .rmc reader: what was written comes back, and nothing else is accepted.
#include "cache/format.hpp"

#include <doctest/doctest.h>

#include <cstring>
#include <random>

#include "base/error.hpp"
#include "support.hpp"

using namespace cache_test;
using rm::cache::Decoded;
using rm::cache::DecodeRules;
using rm::cache::DecodeStatus;

namespace {

std::string file_of(const rm::cache::Key& key, rm::cache::Artefact artefact,
                    const std::optional<rm::Digest>& secret = {}) {
  const auto entry = rm::cache::make_entry(key, std::move(artefact), 12.5);
  const auto encoded = rm::cache::encode_entry(*entry, secret);
  std::string out;
  for (rm::ByteSpan piece : encoded.pieces) {
    out.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  return out;
}

Decoded decode(const std::string& bytes, const DecodeRules& rules = {}) {
  return rm::cache::decode_entry(rm::as_byte_span(bytes), nullptr, rules);
}

}  // namespace

TEST_CASE("an entry comes back as it was written") {
  const auto key = key_of(1);
  const std::string file = file_of(key, artefact_of(1, 9000, R"({"rank":2})"));
  const Decoded decoded = decode(file);
  REQUIRE(decoded.entry);
  CHECK(decoded.entry->key == key.digest);
  CHECK(decoded.entry->kind == rm::cache::ArtefactKind::kProgram);
  CHECK(text_of(*decoded.entry, "program") == content_of(1, 9000));
  CHECK(text_of(*decoded.entry, "log") == "made 1");
  CHECK(decoded.entry->section("other") == nullptr);
  CHECK(decoded.entry->metadata.guards == R"({"rank":2})");
  CHECK(decoded.entry->metadata.compile_ms == 12.5);
  CHECK(decoded.entry->metadata.producer == "test");
  CHECK(decoded.entry->metadata.created_s > 1'600'000'000);
  CHECK(decoded.entry->metadata.fields.size() == key.fields.size());
}

TEST_CASE("sections of large entries start at pages, small entries stay small") {
  const std::string large = file_of(key_of(1), artefact_of(1, 4096));
  const Decoded decoded = decode(large);
  REQUIRE(decoded.entry);
  for (const auto& section : decoded.entry->sections) {
    CHECK((reinterpret_cast<const char*>(section.bytes.data()) - large.data()) % 4096 == 0);
  }
  CHECK(file_of(key_of(1), artefact_of(1, 10)).size() < 2048);
}

TEST_CASE("empty sections, no sections and many sections are entries too") {
  rm::cache::Artefact many;
  for (int i = 0; i < 300; ++i)
    many.sections.push_back({"s" + std::to_string(i), std::string(i, 'x')});
  const std::string file = file_of(key_of(1), many);
  const Decoded decoded = decode(file);
  REQUIRE(decoded.entry);
  CHECK(text_of(*decoded.entry, "s299") == std::string(299, 'x'));
  CHECK(decode(file_of(key_of(1), {})).entry);
}

TEST_CASE("no flipped bit of a file is accepted") {
  const std::string file = file_of(key_of(1), artefact_of(1, 300));
  REQUIRE(decode(file).entry);
  size_t accepted = 0;
  for (size_t bit = 0; bit < file.size() * 8; ++bit) {
    std::string bad = file;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    if (decode(bad).status == DecodeStatus::kOk) ++accepted;
  }
  CHECK(accepted == 0);
}

TEST_CASE("no truncation and no extension of a file is accepted") {
  const std::string file = file_of(key_of(1), artefact_of(1, 5000));
  size_t accepted = 0;
  for (size_t size = 0; size < file.size(); ++size) {
    if (decode(file.substr(0, size)).status == DecodeStatus::kOk) ++accepted;
  }
  CHECK(accepted == 0);
  CHECK(decode(file + '\0').status == DecodeStatus::kCorrupt);
  CHECK(decode(file + file).status == DecodeStatus::kCorrupt);
}

TEST_CASE("an entry of another key or other guards is corrupt") {
  const std::string file = file_of(key_of(1), artefact_of(1, 10, "guards"));
  const auto other = key_of(2);
  DecodeRules rules;
  rules.key = &other.digest;
  CHECK(decode(file, rules).status == DecodeStatus::kCorrupt);
  const rm::Digest none;
  rules = {};
  rules.guard_digest = &none;
  CHECK(decode(file, rules).status == DecodeStatus::kCorrupt);
}

TEST_CASE("another format number with a sound header is incompatible, not corrupt") {
  for (int format : {0, 2, 999}) {
    std::string file = file_of(key_of(1), artefact_of(1, 10));
    const auto number = static_cast<uint16_t>(format);
    std::memcpy(file.data() + 4, &number, sizeof(number));
    CHECK(decode(file).status == DecodeStatus::kCorrupt);  // the header digest does not hold yet
    const rm::Digest digest = rm::hash_bytes(std::string_view(file).substr(0, 128));
    std::memcpy(file.data() + 128, digest.bytes.data(), 32);
    CHECK(decode(file).status == DecodeStatus::kIncompatible);
  }
}

TEST_CASE("a code is demanded when the rules say so and must be of the same secret") {
  const std::optional<rm::Digest> secret = rm::hash_bytes("secret"),
                                  other = rm::hash_bytes("other");
  const std::string plain = file_of(key_of(1), artefact_of(1, 10));
  const std::string coded = file_of(key_of(1), artefact_of(1, 10), secret);
  DecodeRules rules;
  rules.require_code = true;
  rules.secret = &secret;
  CHECK(decode(coded, rules).status == DecodeStatus::kOk);
  CHECK(decode(plain, rules).status == DecodeStatus::kUntrusted);
  rules.secret = &other;
  CHECK(decode(coded, rules).status == DecodeStatus::kUntrusted);
  CHECK(decode(coded).status == DecodeStatus::kOk);  // nobody asked, and the digests hold

  // Who can write but has no secret can make all digests fit; the code still tells.
  std::string forged = file_of(key_of(1), artefact_of(2, 10), other);
  rules.secret = &secret;
  CHECK(decode(forged, rules).status == DecodeStatus::kUntrusted);
  size_t accepted = 0;
  for (size_t bit = 0; bit < 32 * 8; ++bit) {
    std::string bad = coded;
    bad[bad.size() - 32 + bit / 8] ^= static_cast<char>(1 << (bit % 8));
    if (decode(bad, rules).status == DecodeStatus::kOk) ++accepted;
  }
  CHECK(accepted == 0);
}

TEST_CASE("text that is not UTF-8 is refused before it is written") {
  auto artefact = artefact_of(1, 10);
  artefact.guards = "\xff\xfe";
  CHECK_THROWS_AS(rm::cache::make_entry(key_of(1), artefact, 0), rm::Error);
}
