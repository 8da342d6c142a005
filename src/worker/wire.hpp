// Bytes on the control socket: little-endian numbers and length-prefixed bytes, and the header that
// leads every packet.
//
// Invariant: nothing read from the other side is trusted; a Reader throws rm::Error(RM_DATA_LOSS)
// instead of reading past its bytes or allocating what they claim to need.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace rm::worker {

/// Raised when a message changes its meaning; both sides refuse another number.
inline constexpr uint16_t kProtocolVersion = 4;

/// Numbers are never reused. Below 64: client to worker; above: worker to client.
enum class MessageType : uint16_t {
  kHello = 1,
  kCompile = 2,
  kLoad = 3,
  kUnload = 4,
  kCancel = 5,
  kQuit = 6,
  kMakeStates = 7,
  kFreeStates = 8,
  kCopyStates = 9,
  kReady = 64,
  kProgress = 65,
  kDone = 66,
  kFailed = 67,
};

struct PacketHeader {
  static constexpr size_t kBytes = 32;
  MessageType type{};
  uint64_t request = 0;  ///< which request this belongs to
  uint64_t body_bytes = 0;
  bool body_in_memory = false;  ///< the first descriptor holds the body

  std::string encode() const;
  /// Throws for another magic, version, unknown type or flag.
  static PacketHeader decode(std::string_view bytes);
};

class Writer {
 public:
  Writer& u8(uint8_t value);
  Writer& u32(uint32_t value);
  Writer& u64(uint64_t value);
  Writer& f64(double value);
  Writer& bytes(std::string_view value);
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}
  uint8_t u8();
  uint32_t u32();
  uint64_t u64();
  double f64();
  std::string_view bytes();
  /// A count of items that take at least `item_bytes` each: no more than the rest can hold.
  size_t count(size_t item_bytes);
  /// Throws when something is left.
  void end() const;

 private:
  std::string_view take(size_t size);
  std::string_view rest_;
};

}  // namespace rm::worker
