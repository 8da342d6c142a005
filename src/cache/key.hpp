// Cache keys: one digest over framed fields. Every field of the schema is in every key, in a fixed
// order and with its length, so no two different inputs can have the same bytes.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "cache/types.hpp"

namespace rm::cache {

/// Raised when what goes into keys changes; entries of other schemas are then simply not found.
inline constexpr uint32_t kKeySchema = 1;

/// Tags are part of the schema: never renumbered.
enum class KeyField : uint16_t {
  kSchema = 1,     // written by the builder: schema number, kind, digest algorithm
  kProgram = 2,    // canonical program, constants by digest
  kSignature = 3,  // inputs and outputs: dtype, dims, strides, alignment class, device kind
  kOptions = 4,    // Options::artefact_bytes()
  kNumerics = 5,   // AMP policy, accumulate dtype, deterministic, fast-math
  kCore = 6,       // digest of the core library file
  kBackend = 7,    // plugin build id and fingerprint
  kTarget = 8,     // architecture, topology; never a device index
  kHost = 9,       // host features that code generation used
  kGuards = 10,    // digest of the guard schema
  kFront = 11,     // front records: module structure and sources, versions, numeric flags
  kWeights = 12,   // digest of weights the artefact embeds; of all weights in a verdict
  kSalt = 13,      // RM_CACHE_SALT
};
std::string_view field_name(KeyField field);
/// Throws rm::Error that lists the fields when there is none of that name.
KeyField field_from_name(std::string_view name);
std::vector<std::string_view> field_names();

struct Key {
  ArtefactKind kind{};
  Digest digest;
  std::vector<FieldDigest> fields;  // of every field, for explain
  /// Not empty: something could not be hashed, and nothing may be looked up or stored.
  std::string bypass;
};

class KeyBuilder {
 public:
  explicit KeyBuilder(ArtefactKind kind) : kind_(kind) {}

  /// Throws rm::Error when the field is set twice, or is kSchema.
  KeyBuilder& set(KeyField field, std::string_view bytes);
  /// Named values in one field; their order does not matter.
  KeyBuilder& set(KeyField field, const std::map<std::string, std::string>& values);
  /// Something of the input has no stable bytes: the first reason is kept.
  KeyBuilder& bypass(std::string reason);

  Key finish() const;

 private:
  ArtefactKind kind_;
  std::map<KeyField, std::string> fields_;
  std::string bypass_;
};

}  // namespace rm::cache
