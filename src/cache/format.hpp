// The .rmc file: one entry, self-contained, data only, verified before anything in it is used.
//
//   160-byte header | metadata (JSON) | padding | sections, each aligned | [32-byte code]
//
// The header digest covers the header, the payload digest everything behind it up to the optional
// message authentication code, and that covers the header (and so the payload digest).
#pragma once

#include <string>
#include <vector>

#include "cache/key.hpp"
#include "cache/types.hpp"

namespace rm::cache {

inline constexpr uint16_t kFormat = 1;
inline constexpr size_t kHeaderBytes = 160;
inline constexpr size_t kSectionAlignment = 4096;  // for mmap; small entries use kSmallAlignment
inline constexpr size_t kSmallAlignment = 64;

/// An entry over the artefact's own bytes: what a writer goes on with after publishing.
EntryPtr make_entry(const Key& key, Artefact artefact, double compile_ms);

/// The file's bytes in order. `head` owns what is not borrowed from the entry's sections.
struct EncodedEntry {
  std::vector<std::string> owned;
  std::vector<ByteSpan> pieces;
};
EncodedEntry encode_entry(const Entry& entry, const std::optional<Digest>& secret);

enum class DecodeStatus { kOk, kCorrupt, kIncompatible, kUntrusted };
struct Decoded {
  DecodeStatus status = DecodeStatus::kCorrupt;
  std::string why;  // empty when kOk
  EntryPtr entry;
};

struct DecodeRules {
  const Digest* key = nullptr;           // the entry must be of this key
  const Digest* guard_digest = nullptr;  // and of these guards
  const std::optional<Digest>* secret = nullptr;
  bool require_code = false;  // no entry without a message authentication code
};
/// Never throws for any content of `bytes`; `storage` keeps them alive. `file`, which has them from
/// its start, is kept open by an artefact of a vendor: its worker maps it.
Decoded decode_entry(ByteSpan bytes, std::shared_ptr<const void> storage, const DecodeRules& rules,
                     const std::shared_ptr<const Fd>& file = nullptr);

/// What the header and the metadata say, the sections unread: for listings.
struct EntryHeader {
  ArtefactKind kind{};
  Digest key, guard_digest;
  uint64_t metadata_bytes = 0, payload_bytes = 0;
  bool has_code = false;
};
/// nullopt unless the header digest holds and format and kind are known.
std::optional<EntryHeader> decode_header(ByteSpan bytes);
/// nullopt when the text is not metadata. The section table in it is not looked at.
std::optional<Metadata> decode_metadata(std::string_view json);

}  // namespace rm::cache
