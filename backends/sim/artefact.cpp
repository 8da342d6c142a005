// Encoding with a checksum over the payload.
#include "artefact.hpp"

#include <cstring>

#include "rm/plugin.hpp"

namespace rm::sim {
namespace {

constexpr std::string_view kMagic = "RMSIMNPU";
constexpr uint32_t kFormat = 1, kRounds = 1;
constexpr size_t kNameBytes = 16, kHeaderBytes = 8 + 4 + 4 + 2 * kNameBytes + 8 + 8;

[[noreturn]] void corrupt(const char* what) {
  throw plugin::Error(RM_DATA_LOSS, std::string("[sim] expected a sound artefact, got ") + what);
}

template <class T>
void put(std::string& out, T value) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out.append(bytes, sizeof(T));
}

void put_text(std::string& out, std::string_view text) {
  put<uint64_t>(out, text.size());
  out += text;
}

std::string padded(std::string_view text) {
  std::string out(text.substr(0, kNameBytes));
  out.resize(kNameBytes, '\0');
  return out;
}

uint64_t checksum(std::string_view bytes) {  // FNV-1a, 64 bits
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : bytes) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3ull;
  return hash;
}

struct Cursor {
  std::string_view rest;
  std::string_view take(uint64_t size) {
    if (size > rest.size()) corrupt("one that ends early");
    const std::string_view out = rest.substr(0, size);
    rest.remove_prefix(size);
    return out;
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string_view text() { return take(number<uint64_t>()); }
};

}  // namespace

std::string encode(const Artefact& artefact) {
  std::string payload;
  put_text(payload, artefact.program);
  put<uint64_t>(payload, artefact.embedded.size());
  for (const auto& [name, bytes] : artefact.embedded) {
    put_text(payload, name);
    put_text(payload, bytes);
  }
  std::string out(kMagic);
  put<uint32_t>(out, kFormat);
  put<uint32_t>(out, artefact.rounds ? kRounds : 0);
  out += padded(artefact.target) + padded(artefact.compiler);
  put<uint64_t>(out, payload.size());
  put<uint64_t>(out, checksum(payload));
  return out + payload;
}

bool fits(std::string_view bytes, std::string_view target, std::string_view compiler) {
  if (bytes.size() < kHeaderBytes || !bytes.starts_with(kMagic)) return false;
  uint32_t format = 0;
  std::memcpy(&format, bytes.data() + kMagic.size(), sizeof format);
  return format == kFormat && bytes.substr(16, kNameBytes) == padded(target) &&
         bytes.substr(16 + kNameBytes, kNameBytes) == padded(compiler);
}

Artefact decode(std::string_view bytes) {
  Cursor in{bytes};
  if (in.take(kMagic.size()) != kMagic) corrupt("other bytes");
  if (in.number<uint32_t>() != kFormat) corrupt("another format");
  Artefact out;
  out.rounds = (in.number<uint32_t>() & kRounds) != 0;
  out.target = std::string(in.take(kNameBytes)).c_str();
  out.compiler = std::string(in.take(kNameBytes)).c_str();
  const auto size = in.number<uint64_t>();
  const auto sum = in.number<uint64_t>();
  if (in.rest.size() != size || checksum(in.rest) != sum) corrupt("a damaged one");
  out.program = in.text();
  const auto count = in.number<uint64_t>();
  for (uint64_t i = 0; i < count; ++i) {
    std::string name(in.text());
    out.embedded.emplace_back(std::move(name), in.text());
  }
  return out;
}

}  // namespace rm::sim
