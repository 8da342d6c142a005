// Reader and writer of .rmc. Everything read is checked against the file's real size before use;
// a file with sound digests but a wrong table is refused too.
#include "cache/format.hpp"

#include <bit>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/error.hpp"

namespace rm::cache {
namespace {

static_assert(std::endian::native == std::endian::little, "the header is written as it lies");

constexpr uint32_t kFlagCode = 1;
constexpr size_t kHeaderDigestAt = 128;

struct Header {
  char magic[4];
  uint16_t format, kind;
  uint32_t flags, header_bytes;
  uint8_t key[32], guard_digest[32];
  uint64_t metadata_bytes, payload_bytes;
  uint8_t payload_digest[32], header_digest[32];
};
static_assert(sizeof(Header) == kHeaderBytes && offsetof(Header, header_digest) == kHeaderDigestAt);

constexpr char kMagic[4] = {'R', 'M', 'C', '1'};

uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

std::string_view text_of(ByteSpan bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Digest digest_of(const uint8_t (&bytes)[32]) {
  Digest digest;
  std::memcpy(digest.bytes.data(), bytes, sizeof(bytes));
  return digest;
}

void store_digest(const Digest& digest, uint8_t (&bytes)[32]) {
  std::memcpy(bytes, digest.bytes.data(), sizeof(bytes));
}

Digest header_digest(ByteSpan header) { return hash_bytes(header.first(kHeaderDigestAt)); }

/// Large entries are mapped: page alignment; small ones should stay small.
uint64_t alignment_of(const std::vector<Section>& sections) {
  for (const Section& section : sections) {
    if (section.bytes.size() >= kSectionAlignment) return kSectionAlignment;
  }
  return kSmallAlignment;
}

void require_utf8(std::string_view what, const std::string& text) {
  try {
    nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    throw_invalid("[cache entry] expected UTF-8 text as " + std::string(what) +
                  ", got other bytes; try a section for them");
  }
}

std::string encode_metadata(const Entry& entry, uint64_t alignment) {
  nlohmann::json json;
  json["align"] = alignment;
  json["compat"] = entry.metadata.compat;
  json["compile_ms"] = entry.metadata.compile_ms;
  json["created"] = entry.metadata.created_s;
  json["guards"] = entry.metadata.guards;
  json["producer"] = entry.metadata.producer;
  json["fields"] = nlohmann::json::array();
  for (const FieldDigest& field : entry.metadata.fields) {
    json["fields"].push_back({field.field, field.digest.hex()});
  }
  json["sections"] = nlohmann::json::array();
  for (const Section& section : entry.sections) {
    json["sections"].push_back({section.name, section.bytes.size()});
  }
  return json.dump();
}

Metadata metadata_of(const nlohmann::json& json) {
  Metadata out;
  out.compat = json.at("compat").get<std::string>();
  out.compile_ms = json.at("compile_ms").get<double>();
  out.created_s = json.at("created").get<int64_t>();
  out.guards = json.at("guards").get<std::string>();
  out.producer = json.at("producer").get<std::string>();
  for (const auto& row : json.at("fields")) {
    const auto hex = row.at(1).get<std::string>();
    out.fields.push_back({row.at(0).get<std::string>(), Digest::from_hex(hex)});
  }
  return out;
}

/// The sections lie one after another, each at the next multiple of the alignment, and end the
/// payload: there is exactly one layout for a table, and no bytes outside it.
bool place_sections(const nlohmann::json& json, ByteSpan file, uint64_t metadata_end,
                    uint64_t payload_end, std::vector<Section>& out) {
  const uint64_t alignment = json.at("align").get<uint64_t>();
  if (alignment != kSectionAlignment && alignment != kSmallAlignment) return false;
  uint64_t end = metadata_end;
  for (const auto& row : json.at("sections")) {
    const uint64_t begin = align_up(end, alignment);
    const uint64_t size = row.at(1).get<uint64_t>();
    if (begin > payload_end || size > payload_end - begin) return false;
    out.push_back({row.at(0).get<std::string>(), file.subspan(begin, size)});
    end = begin + size;
  }
  return end == payload_end;
}

Decoded corrupt(std::string why) { return {DecodeStatus::kCorrupt, std::move(why), nullptr}; }

/// Everything that can be said without parsing the metadata. kOk when there is nothing to object.
Decoded check_frame(ByteSpan bytes, const Header& header, const DecodeRules& rules) {
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) return corrupt("not an .rmc file");
  if (header_digest(bytes.first(kHeaderBytes)) != digest_of(header.header_digest)) {
    return corrupt("header digest differs");
  }
  if (header.format != kFormat || header.header_bytes != kHeaderBytes ||
      (header.flags & ~kFlagCode) != 0 || !kind_from_number(header.kind)) {
    return {DecodeStatus::kIncompatible, "format " + std::to_string(header.format), nullptr};
  }
  const bool has_code = (header.flags & kFlagCode) != 0;
  const uint64_t trailer = has_code ? Digest::kBytes : 0;
  const uint64_t behind = bytes.size() - kHeaderBytes;
  if (behind < trailer || header.payload_bytes != behind - trailer ||
      header.metadata_bytes > header.payload_bytes) {
    return corrupt("size differs from the header's");
  }
  if (rules.key && *rules.key != digest_of(header.key)) return corrupt("entry of another key");
  if (rules.guard_digest && *rules.guard_digest != digest_of(header.guard_digest)) {
    return corrupt("entry of other guards");
  }
  const bool has_secret = rules.secret && rules.secret->has_value();
  if (rules.require_code && !(has_code && has_secret)) {
    return {DecodeStatus::kUntrusted, "no message authentication code", nullptr};
  }
  if (has_code && has_secret) {
    const Digest expected = Hasher(**rules.secret).update(bytes.first(kHeaderBytes)).digest();
    if (std::memcmp(expected.bytes.data(), bytes.last(Digest::kBytes).data(), Digest::kBytes) !=
        0) {
      return {DecodeStatus::kUntrusted, "message authentication code differs", nullptr};
    }
  }
  if (hash_bytes(bytes.subspan(kHeaderBytes, header.payload_bytes)) !=
      digest_of(header.payload_digest)) {
    return corrupt("payload digest differs");
  }
  return {DecodeStatus::kOk, {}, nullptr};
}

}  // namespace

EntryPtr make_entry(const Key& key, Artefact artefact, double compile_ms) {
  require_utf8("guards", artefact.guards);
  require_utf8("producer", artefact.producer);
  require_utf8("compat", artefact.compat);
  for (const auto& section : artefact.sections) require_utf8("section name", section.name);
  auto owned = std::make_shared<const Artefact>(std::move(artefact));
  auto entry = std::make_shared<Entry>();
  entry->kind = key.kind;
  entry->key = key.digest;
  if (!owned->guards.empty()) entry->guard_digest = hash_bytes(owned->guards);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  entry->metadata = {key.fields,
                     owned->guards,
                     owned->producer,
                     owned->compat,
                     std::chrono::duration_cast<std::chrono::seconds>(now).count(),
                     compile_ms};
  for (const auto& section : owned->sections) {
    entry->sections.push_back({section.name, section.span(), section.file, 0});
    entry->stored_bytes += section.span().size();
  }
  entry->storage = std::move(owned);
  return entry;
}

EncodedEntry encode_entry(const Entry& entry, const std::optional<Digest>& secret) {
  EncodedEntry out;
  out.owned.reserve(4 + entry.sections.size());  // pieces borrow from these strings
  const auto own = [&out](std::string text) {
    out.owned.push_back(std::move(text));
    out.pieces.push_back(as_byte_span(out.owned.back()));
  };
  const uint64_t alignment = alignment_of(entry.sections);
  const std::string metadata = encode_metadata(entry, alignment);
  own(std::string(kHeaderBytes, '\0'));
  own(metadata);
  uint64_t end = kHeaderBytes + metadata.size();
  for (const Section& section : entry.sections) {
    const uint64_t begin = align_up(end, alignment);
    own(std::string(begin - end, '\0'));
    out.pieces.push_back(section.bytes);
    end = begin + section.bytes.size();
  }

  Hasher payload;
  for (size_t i = 1; i < out.pieces.size(); ++i) payload.update(out.pieces[i]);
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.format = kFormat;
  header.kind = static_cast<uint16_t>(entry.kind);
  header.flags = secret ? kFlagCode : 0;
  header.header_bytes = kHeaderBytes;
  store_digest(entry.key, header.key);
  store_digest(entry.guard_digest, header.guard_digest);
  header.metadata_bytes = metadata.size();
  header.payload_bytes = end - kHeaderBytes;
  store_digest(payload.digest(), header.payload_digest);
  const ByteSpan raw = std::as_bytes(std::span(&header, 1));
  store_digest(header_digest(raw), header.header_digest);
  std::memcpy(out.owned[0].data(), &header, sizeof(header));
  if (secret) {
    const Digest code = Hasher(*secret).update(raw).digest();
    own(std::string(text_of(code.span())));
  }
  return out;
}

Decoded decode_entry(ByteSpan bytes, std::shared_ptr<const void> storage, const DecodeRules& rules,
                     const std::shared_ptr<const Fd>& file) {
  if (bytes.size() < kHeaderBytes) return corrupt("shorter than a header");
  Header header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  Decoded result = check_frame(bytes, header, rules);
  if (result.status != DecodeStatus::kOk) return result;
  auto entry = std::make_shared<Entry>();
  entry->kind = *kind_from_number(header.kind);
  entry->key = digest_of(header.key);
  entry->guard_digest = digest_of(header.guard_digest);
  entry->stored_bytes = bytes.size();
  entry->storage = std::move(storage);
  // The digests say that this is what a writer wrote, not that the writer was one of ours.
  try {
    const auto json =
        nlohmann::json::parse(text_of(bytes.subspan(kHeaderBytes, header.metadata_bytes)));
    entry->metadata = metadata_of(json);
    const uint64_t metadata_end = kHeaderBytes + header.metadata_bytes;
    if (!place_sections(json, bytes, metadata_end, kHeaderBytes + header.payload_bytes,
                        entry->sections)) {
      return corrupt("section table does not fit the payload");
    }
  } catch (const std::exception& error) {
    return corrupt(std::string("metadata: ") + error.what());
  }
  if (file && entry->kind == ArtefactKind::kVendor) {
    for (Section& section : entry->sections) {
      section.file = file;
      section.offset = static_cast<uint64_t>(section.bytes.data() - bytes.data());
    }
  }
  const Digest guards =
      entry->metadata.guards.empty() ? Digest{} : hash_bytes(entry->metadata.guards);
  if (guards != entry->guard_digest) return corrupt("guards differ from their digest");
  result.entry = std::move(entry);
  return result;
}

std::optional<EntryHeader> decode_header(ByteSpan bytes) {
  if (bytes.size() < kHeaderBytes) return std::nullopt;
  Header header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  const auto kind = kind_from_number(header.kind);
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 || header.format != kFormat || !kind ||
      header_digest(bytes.first(kHeaderBytes)) != digest_of(header.header_digest)) {
    return std::nullopt;
  }
  return EntryHeader{*kind,
                     digest_of(header.key),
                     digest_of(header.guard_digest),
                     header.metadata_bytes,
                     header.payload_bytes,
                     (header.flags & kFlagCode) != 0};
}

std::optional<Metadata> decode_metadata(std::string_view json) {
  try {
    return metadata_of(nlohmann::json::parse(json));
  } catch (const std::exception&) {  // a listing shows what it can; loading says why it cannot
    return std::nullopt;
  }
}

}  // namespace rm::cache
