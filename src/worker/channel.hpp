// One end of the control socket: whole packets with descriptors. Long bodies go through a memfd, so
// a packet is small whatever it carries.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/file.hpp"
#include "worker/shared_memory.hpp"
#include "worker/wire.hpp"

namespace rm::worker {

struct Packet {
  MessageType type{};
  uint64_t request = 0;
  std::string body;
  std::vector<Fd> files;
};

/// A packet that is ready to be sent, as often as the queue is full. Its files must outlive it.
class OutgoingPacket {
 public:
  /// Throws FileError when a long body finds no memory.
  OutgoingPacket(MessageType type, uint64_t request, std::string_view body,
                 const std::vector<const Fd*>& files = {});

 private:
  friend class Channel;
  std::string bytes_;    // the header, and the body when it is short
  SharedMemory memory_;  // a long body
  std::vector<int> descriptors_;
};

class Channel {
 public:
  static constexpr size_t kMaxFiles = 3;
  static constexpr size_t kInlineBytes = 32 * 1024;
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
