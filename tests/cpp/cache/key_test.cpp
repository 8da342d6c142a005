// Keys: every field counts, framing cannot be forged, order does not matter.
#include "cache/key.hpp"

#include <doctest/doctest.h>

#include <set>

#include "base/error.hpp"

using rm::cache::ArtefactKind;
using rm::cache::Key;
using rm::cache::KeyBuilder;
using rm::cache::KeyField;

namespace {

Key key_with(KeyField field, std::string_view bytes) {
  return KeyBuilder(ArtefactKind::kProgram).set(field, bytes).finish();
}

}  // namespace

TEST_CASE("each field and the kind change the key, and only their own field digest") {
  const Key empty = KeyBuilder(ArtefactKind::kProgram).finish();
  std::set<std::string> digests = {empty.digest.hex()};
  for (std::string_view name : rm::cache::field_names()) {
    if (name == "schema") continue;
    const Key key = key_with(rm::cache::field_from_name(name), "x");
    CHECK(digests.insert(key.digest.hex()).second);
    for (size_t i = 0; i < key.fields.size(); ++i) {
      CHECK((key.fields[i].digest != empty.fields[i].digest) == (key.fields[i].field == name));
    }
  }
  for (auto kind : {ArtefactKind::kVendor, ArtefactKind::kVerdict, ArtefactKind::kFront,
                    ArtefactKind::kFileDigest}) {
    CHECK(digests.insert(KeyBuilder(kind).finish().digest.hex()).second);
  }
}

TEST_CASE("bytes cannot move from one field or value to the next") {
  const auto key = [](std::string_view program, std::string_view signature) {
    return KeyBuilder(ArtefactKind::kProgram)
        .set(KeyField::kProgram, program)
        .set(KeyField::kSignature, signature)
        .finish()
        .digest;
  };
  CHECK(key("ab", "c") != key("a", "bc"));
  CHECK(key("abc", "") != key("", "abc"));
  const auto values = [](const std::map<std::string, std::string>& map) {
    return KeyBuilder(ArtefactKind::kProgram).set(KeyField::kBackend, map).finish().digest;
  };
  CHECK(values({{"a", "bc"}}) != values({{"ab", "c"}}));
  CHECK(values({{"a", ""}, {"b", ""}}) != values({{"a", "b"}}));
  CHECK(values({}) != KeyBuilder(ArtefactKind::kProgram).finish().digest);
}

TEST_CASE("the order in which fields are set does not matter") {
  const Key a = KeyBuilder(ArtefactKind::kProgram)
                    .set(KeyField::kProgram, "p")
                    .set(KeyField::kTarget, "t")
                    .finish();
  const Key b = KeyBuilder(ArtefactKind::kProgram)
                    .set(KeyField::kTarget, "t")
                    .set(KeyField::kProgram, "p")
                    .finish();
  CHECK(a.digest == b.digest);
}

TEST_CASE("a key is the same in every build with this schema") {
  // Golden value: it changes with kKeySchema, the tags or the digest algorithm, and only then.
  const Key key =
      KeyBuilder(ArtefactKind::kProgram)
          .set(KeyField::kProgram, "program")
          .set(KeyField::kOptions, std::map<std::string, std::string>{{"b", "2"}, {"a", "1"}})
          .finish();
  CHECK(key.digest.hex() == "07a71e1f7a8cd695c0c284c2a5183285bf5958f34411498e985a044edcd07eca");
}

TEST_CASE("a field set twice, the schema field and unknown names are refused") {
  KeyBuilder builder(ArtefactKind::kProgram);
  builder.set(KeyField::kProgram, "p");
  CHECK_THROWS_AS(builder.set(KeyField::kProgram, "p"), rm::Error);
  CHECK_THROWS_AS(builder.set(KeyField::kSchema, "s"), rm::Error);
  CHECK_THROWS_WITH_AS(rm::cache::field_from_name("programme"), doctest::Contains("signature"),
                       rm::Error);
}

TEST_CASE("the first bypass reason is kept") {
  CHECK(KeyBuilder(ArtefactKind::kProgram).bypass("a").bypass("b").finish().bypass == "a");
  CHECK(KeyBuilder(ArtefactKind::kProgram).finish().bypass.empty());
}
