// One end of the control socket: whole packets with descriptors. Long bodies go through a memfd, so
// a packet is small whatever it carries.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/file.hpp"
#include "worker/shared_memory.hpp"
#include "worker/wire.hpp"

namespace rm::worker {

/// The bytes of a message with what keeps them: a string, or memory that nobody can change any more,
/// which is then never copied.
class Bytes {
 public:
  Bytes(std::string text = {}) : text_(std::move(text)) {}
  /// The first `size` bytes of memory that is frozen.
  Bytes(std::shared_ptr<const SharedMemory> memory, size_t size)
      : memory_(std::move(memory)), size_(size) {}

  std::string_view view() const noexcept {
    if (!memory_) return text_;
    return {reinterpret_cast<const char*>(memory_->data()), size_};
  }
  operator std::string_view() const noexcept { return view(); }
  /// nullptr for a string.
  const std::shared_ptr<const SharedMemory>& memory() const noexcept { return memory_; }

 private:
  std::string text_;
  std::shared_ptr<const SharedMemory> memory_;
  size_t size_ = 0;
};
inline bool operator==(const Bytes& bytes, std::string_view text) { return bytes.view() == text; }

struct Packet {
  MessageType type{};
  uint64_t request = 0;
  Bytes body;
  std::vector<Fd> files;
};

/// A packet that is ready to be sent, as often as the queue is full. Its files must outlive it.
class OutgoingPacket {
 public:
  /// Throws FileError when a long body finds no memory.
  OutgoingPacket(MessageType type, uint64_t request, std::string_view body,
                 const std::vector<const Fd*>& files = {});
  /// A body that may lie in memory already: it is sent as it is.
  static OutgoingPacket of(MessageType type, uint64_t request, const Bytes& body);

 private:
  friend class Channel;
  OutgoingPacket() = default;
  std::string bytes_;    // the header, and the body when it is short
  SharedMemory memory_;  // a long body
  std::vector<int> descriptors_;
};

class Channel {
 public:
  static constexpr size_t kMaxFiles = 3;
  static constexpr size_t kInlineBytes = 32 * 1024;
  static constexpr size_t kKeptFromBytes = 1024 * 1024;  // bodies that are not copied out of memory
  static constexpr uint64_t kMaxBodyBytes = uint64_t{1} << 36;

  explicit Channel(Fd socket) : socket_(std::move(socket)) {}
  /// Two connected ends, close-on-exec.
  static std::pair<Fd, Fd> make_pair();

  /// False when the other side's queue was full for `timeout`. Throws FileError(EPIPE) when the
  /// other side is gone.
  bool send(const OutgoingPacket& packet, std::chrono::milliseconds timeout);
  /// The next packet, or nullopt after `timeout`. Throws FileError(ECONNRESET) at the end of the
  /// connection, rm::Error(RM_DATA_LOSS) for what is no packet.
  std::optional<Packet> receive(std::chrono::milliseconds timeout);

  const Fd& socket() const noexcept { return socket_; }

 private:
  Packet read_packet();
  Fd socket_;
};

}  // namespace rm::worker
