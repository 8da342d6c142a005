// SOCK_SEQPACKET with SCM_RIGHTS.
#include "worker/channel.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "worker/shared_memory.hpp"

namespace rm::worker {
namespace {

constexpr size_t kPacketBytes = PacketHeader::kBytes + Channel::kInlineBytes;

[[noreturn]] void reject(const std::string& what) {
  throw Error(RM_DATA_LOSS, "[worker channel] " + what, "RM303");
}

}  // namespace

std::pair<Fd, Fd> Channel::make_pair() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw FileError("socketpair", "worker", errno);
  }
  return {Fd(ends[0]), Fd(ends[1])};
}

OutgoingPacket::OutgoingPacket(MessageType type, uint64_t request, std::string_view body,
                               const std::vector<const Fd*>& files) {
  const bool in_memory = body.size() > Channel::kInlineBytes;
  if (in_memory) {
    memory_ = SharedMemory(body.size());
    std::memcpy(memory_.data(), body.data(), body.size());
    if (body.size() >= Channel::kKeptFromBytes) memory_.freeze();  // whoever gets it may keep it
    descriptors_.push_back(memory_.file().get());
  }
  bytes_ = PacketHeader{type, request, body.size(), in_memory}.encode();
  if (!in_memory) bytes_ += body;
  for (const Fd* file : files) descriptors_.push_back(file->get());
  if (files.size() > Channel::kMaxFiles) {
    throw_invalid("[worker channel] expected " + std::to_string(Channel::kMaxFiles) +
                  " descriptors at most, got " + std::to_string(files.size()));
  }
}

OutgoingPacket OutgoingPacket::of(MessageType type, uint64_t request, const Bytes& body) {
  if (!body.memory()) return {type, request, body.view()};
  OutgoingPacket packet;
  packet.bytes_ = PacketHeader{type, request, body.view().size(), true}.encode();
  packet.descriptors_.push_back(body.memory()->file().get());
  return packet;
}

bool Channel::send(const OutgoingPacket& packet, std::chrono::milliseconds timeout) {
  iovec part{const_cast<char*>(packet.bytes_.data()), packet.bytes_.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * (kMaxFiles + 1))> control{};
  if (const size_t count = packet.descriptors_.size(); count > 0) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(sizeof(int) * count);
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * count);
    std::memcpy(CMSG_DATA(rights), packet.descriptors_.data(), sizeof(int) * count);
  }
  const auto until = std::chrono::steady_clock::now() + timeout;
  while (true) {
    // A process that is stopped reads nothing: a sender that blocks would wait as long as it does.
    if (sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return true;
    if (errno == EINTR) continue;
    if (errno != EAGAIN) throw FileError("send", "the worker's socket", errno);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(
        until - std::chrono::steady_clock::now());
    if (left.count() <= 0) return false;
    pollfd waiting{socket_.get(), POLLOUT, 0};
    poll(&waiting, 1, static_cast<int>(left.count()));
  }
}

std::optional<Packet> Channel::receive(std::chrono::milliseconds timeout) {
  pollfd waiting{socket_.get(), POLLIN, 0};
  const int ready = poll(&waiting, 1, static_cast<int>(timeout.count()));
  if (ready < 0 && errno != EINTR) throw FileError("poll", "the worker's socket", errno);
  if (ready <= 0) return std::nullopt;
  return read_packet();
}

Packet Channel::read_packet() {
  std::string buffer(kPacketBytes, '\0');
  iovec part{buffer.data(), buffer.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * (kMaxFiles + 1))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = -1;
  do {
    got = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  Packet packet;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int file = -1;
      std::memcpy(&file, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
      packet.files.emplace_back(file);
    }
  }
  if (got < 0) throw FileError("receive", "the worker's socket", errno);
  if (got == 0) throw FileError("receive", "the worker's socket", ECONNRESET);
  if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    reject("expected a packet of " + std::to_string(kPacketBytes) + " bytes at most, got more");
  }
  const std::string_view bytes(buffer.data(), static_cast<size_t>(got));
  const PacketHeader header = PacketHeader::decode(bytes);
  packet.type = header.type;
  packet.request = header.request;
  if (!header.body_in_memory) {
    packet.body = std::string(bytes.substr(PacketHeader::kBytes));
    if (packet.body.view().size() != header.body_bytes) reject("expected the body its header announces");
    return packet;
  }
  if (packet.files.empty() || header.body_bytes > kMaxBodyBytes) {
    reject("expected a descriptor with the body, got none or one of impossible size");
  }
  auto memory = std::make_shared<const SharedMemory>(std::move(packet.files.front()), false);
  packet.files.erase(packet.files.begin());
  if (memory->size() < header.body_bytes) reject("expected the body its header announces");
  if (header.body_bytes >= Channel::kKeptFromBytes && memory->is_frozen()) {
    packet.body = Bytes(std::move(memory), header.body_bytes);
  } else {
    packet.body =
        std::string(reinterpret_cast<const char*>(memory->data()), header.body_bytes);
  }
  return packet;
}

}  // namespace rm::worker
