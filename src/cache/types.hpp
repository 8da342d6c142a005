// What the cache holds: entries of named byte sections under a key. It knows bytes, not graphs.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.hpp"
#include "base/hash.hpp"

namespace rm::cache {

/// Stored in entries and keys: numbers are never reused (3, 4 and 7 were).
enum class ArtefactKind : uint16_t {
  kProgram = 1,     // a program after all passes
  kVendor = 2,      // an artefact of a vendor's compiler
  kVerdict = 5,     // the result of a parity check
  kFront = 6,       // call signature of a module -> digest of its canonical program
  kFileDigest = 8,  // identity of a file -> digest of its content
};
std::string_view kind_name(ArtefactKind kind);
std::optional<ArtefactKind> kind_from_name(std::string_view name);
std::optional<ArtefactKind> kind_from_number(uint16_t number);

struct FieldDigest {
  std::string field;
  Digest digest;
  bool operator==(const FieldDigest&) const = default;
};

struct Section {
  std::string name;
  ByteSpan bytes;
  /// Where the same bytes lie in a file, for another process to map; nullptr where they do not.
  std::shared_ptr<const Fd> file = {};
  uint64_t offset = 0;
};

/// What a compile function returns. Section bytes are moved, never copied.
struct Artefact {
  struct OwnedSection {
    std::string name;
    std::string bytes;
    /// Set for bytes that lie elsewhere, immutable, instead of in `bytes`.
    std::shared_ptr<const void> owner = {};
    ByteSpan view = {};
    std::shared_ptr<const Fd> file = {};  ///< that holds them from its start; or nullptr
    ByteSpan span() const { return owner ? view : as_byte_span(bytes); }
  };
  std::vector<OwnedSection> sections;
  /// Conditions under which the entry may serve, opaque to the cache. Entries of one key with
  /// different guards live side by side.
  std::string guards;
  std::string producer;
  /// What check_compat of a backend wants to see before it loads the sections.
  std::string compat;
};

struct Metadata {
  std::vector<FieldDigest> fields;
  std::string guards, producer, compat;
  int64_t created_s = 0;  // Unix time
  double compile_ms = 0;
};

/// One immutable entry; its bytes stay valid, mapped or owned, as long as it lives.
struct Entry : std::enable_shared_from_this<Entry> {
  ArtefactKind kind{};
  Digest key;
  Digest guard_digest;  // zero without guards
  Metadata metadata;
  std::vector<Section> sections;
  uint64_t stored_bytes = 0;  // its size as a file
  std::shared_ptr<const void> storage;

  /// nullptr when there is none of that name.
  const Section* section(std::string_view name) const;
};
using EntryPtr = std::shared_ptr<const Entry>;

/// What the caller thinks of an entry whose bytes are sound.
enum class Verdict { kAccept, kGuardMiss, kIncompatible };
/// Runs outside all locks. An rm::Error from it means the content is not what it should be: the
/// entry is quarantined and the lookup goes on.
using CheckFn = std::function<Verdict(const Entry&)>;

using CounterMap = std::map<std::string, uint64_t>;

}  // namespace rm::cache
