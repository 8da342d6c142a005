// Encoding by hand: the two sides may be different builds.
#include "worker/wire.hpp"

#include <bit>
#include <cstring>

#include "base/error.hpp"

namespace rm::worker {
namespace {

constexpr uint32_t kMagic = 0x4b574d52;  // "RMWK"
constexpr uint32_t kBodyInMemory = 1;

[[noreturn]] void reject(const std::string& what) {
  throw Error(RM_DATA_LOSS, "[worker wire] " + what, "RM303");
}

template <class T>
void put(std::string& out, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<char>(value >> (8 * i) & 0xff));
}

template <class T>
T get(std::string_view bytes) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) {
    value |= static_cast<T>(static_cast<uint8_t>(bytes[i])) << (8 * i);
  }
  return value;
}

bool known(uint16_t type) { return (type >= 1 && type <= 9) || (type >= 64 && type <= 67); }

}  // namespace

std::string PacketHeader::encode() const {
  std::string out;
  put(out, kMagic);
  put(out, kProtocolVersion);
  put(out, static_cast<uint16_t>(type));
  put(out, request);
  put(out, body_bytes);
  put(out, body_in_memory ? kBodyInMemory : uint32_t{0});
  put(out, uint32_t{0});
  return out;
}

PacketHeader PacketHeader::decode(std::string_view bytes) {
  if (bytes.size() < kBytes) {
    reject("expected a header of 32 bytes, got " + std::to_string(bytes.size()));
  }
  if (get<uint32_t>(bytes) != kMagic) reject("expected a worker packet, got other bytes");
  const auto version = get<uint16_t>(bytes.substr(4));
  if (version != kProtocolVersion) {
    throw Error(RM_FAILED_PRECONDITION,
                "[worker wire] expected protocol " + std::to_string(kProtocolVersion) + ", got " +
                    std::to_string(version) +
                    "; install the same rm_abstract in the worker's environment",
                "RM403");
  }
  const auto type = get<uint16_t>(bytes.substr(6));
  const auto flags = get<uint32_t>(bytes.substr(24));
  if (!known(type)) reject("expected a known message, got type " + std::to_string(type));
  if ((flags & ~kBodyInMemory) != 0) reject("expected known flags, got " + std::to_string(flags));
  PacketHeader header;
  header.type = static_cast<MessageType>(type);
  header.request = get<uint64_t>(bytes.substr(8));
  header.body_bytes = get<uint64_t>(bytes.substr(16));
  header.body_in_memory = (flags & kBodyInMemory) != 0;
  return header;
}

Writer& Writer::u8(uint8_t value) {
  out_.push_back(static_cast<char>(value));
  return *this;
}
Writer& Writer::u32(uint32_t value) {
  put(out_, value);
  return *this;
}
Writer& Writer::u64(uint64_t value) {
  put(out_, value);
  return *this;
}
Writer& Writer::f64(double value) { return u64(std::bit_cast<uint64_t>(value)); }
Writer& Writer::bytes(std::string_view value) {
  u64(value.size());
  out_.append(value);
  return *this;
}

std::string_view Reader::take(size_t size) {
  if (size > rest_.size()) {
    reject("expected " + std::to_string(size) + " more bytes, got " + std::to_string(rest_.size()));
  }
  const std::string_view out = rest_.substr(0, size);
  rest_.remove_prefix(size);
  return out;
}

uint8_t Reader::u8() { return static_cast<uint8_t>(take(1)[0]); }
uint32_t Reader::u32() { return get<uint32_t>(take(4)); }
uint64_t Reader::u64() { return get<uint64_t>(take(8)); }
double Reader::f64() { return std::bit_cast<double>(u64()); }
std::string_view Reader::bytes() { return take(u64()); }

size_t Reader::count(size_t item_bytes) {
  const uint64_t n = u64();
  if (n > rest_.size() / (item_bytes == 0 ? 1 : item_bytes)) {
    reject("expected as many items as there are bytes for, got " + std::to_string(n));
  }
  return n;
}

void Reader::end() const {
  if (!rest_.empty())
    reject("expected the end, got " + std::to_string(rest_.size()) + " bytes more");
}

}  // namespace rm::worker
