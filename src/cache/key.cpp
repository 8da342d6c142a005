#include "cache/key.hpp"

#include <iterator>

#include "base/error.hpp"

namespace rm::cache {
namespace {

constexpr std::pair<KeyField, std::string_view> kFields[] = {{KeyField::kSchema, "schema"},
                                                             {KeyField::kProgram, "program"},
                                                             {KeyField::kSignature, "signature"},
                                                             {KeyField::kOptions, "options"},
                                                             {KeyField::kNumerics, "numerics"},
                                                             {KeyField::kCore, "core"},
                                                             {KeyField::kBackend, "backend"},
                                                             {KeyField::kTarget, "target"},
                                                             {KeyField::kHost, "host"},
                                                             {KeyField::kGuards, "guards"},
                                                             {KeyField::kFront, "front"},
                                                             {KeyField::kWeights, "weights"},
                                                             {KeyField::kSalt, "salt"}};

template <typename Integer>
std::string little_endian(Integer value) {
  std::string out;
  for (size_t i = 0; i < sizeof(Integer); ++i) {
    out += static_cast<char>(static_cast<uint64_t>(value) >> (8 * i));
  }
  return out;
}

void append_frame(std::string& out, std::string_view bytes) {
  out += little_endian(static_cast<uint64_t>(bytes.size()));
  out += bytes;
}

}  // namespace

std::string_view field_name(KeyField field) {
  for (const auto& [value, name] : kFields) {
    if (value == field) return name;
  }
  return "unknown";
}

std::vector<std::string_view> field_names() {
  std::vector<std::string_view> names;
  for (const auto& [value, name] : kFields) names.push_back(name);
  return names;
}

KeyField field_from_name(std::string_view name) {
  std::string known;
  for (const auto& [value, field] : kFields) {
    if (field == name) return value;
    known += (known.empty() ? "" : ", ") + std::string(field);
  }
  throw_invalid("[cache key] expected one of the fields " + known + ", got '" + std::string(name) +
                "'");
}

KeyBuilder& KeyBuilder::set(KeyField field, std::string_view bytes) {
  if (field == KeyField::kSchema || !fields_.emplace(field, bytes).second) {
    throw_invalid("[cache key] expected the field '" + std::string(field_name(field)) +
                  "' to be set once and by one side, got it again");
  }
  return *this;
}

KeyBuilder& KeyBuilder::set(KeyField field, const std::map<std::string, std::string>& values) {
  std::string bytes = little_endian(static_cast<uint64_t>(values.size()));
  for (const auto& [name, value] : values) {
    append_frame(bytes, name);
    append_frame(bytes, value);
  }
  return set(field, bytes);
}

KeyBuilder& KeyBuilder::bypass(std::string reason) {
  if (bypass_.empty()) bypass_ = reason.empty() ? "unspecified" : std::move(reason);
  return *this;
}

Key KeyBuilder::finish() const {
  std::string schema = little_endian(kKeySchema) + little_endian(static_cast<uint16_t>(kind_));
  append_frame(schema, hash_algorithm());
  Key key{kind_, {}, {}, bypass_};
  Hasher hasher;
  for (const auto& [field, name] : kFields) {
    const auto given = fields_.find(field);
    std::string_view bytes;
    if (field == KeyField::kSchema) {
      bytes = schema;
    } else if (given != fields_.end()) {
      bytes = given->second;
    }
    hasher.update(little_endian(static_cast<uint16_t>(field)));
    hasher.update(little_endian(static_cast<uint64_t>(bytes.size())));
    hasher.update(bytes);
    key.fields.push_back({std::string(name), hash_bytes(bytes)});
  }
  key.digest = hasher.digest();
  return key;
}

}  // namespace rm::cache
