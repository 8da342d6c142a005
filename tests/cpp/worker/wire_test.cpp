// The wire format: round trips, and random bytes that must be refused without harm.
#include "worker/wire.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>

#include "base/error.hpp"
#include "worker/channel.hpp"
#include "worker/protocol.hpp"

using namespace rm;
using namespace rm::worker;

namespace {

LoadRequest some_load() {
  LoadRequest load;
  load.device = 1;
  load.artefact = std::string("\0binary\xff", 8);
  load.constants = {{"a.weight", {kDLFloat, 32, 1}, {2, 3}, 64, 24, std::string(32, 'd')}};
  load.inputs = {{"", {kDLInt, 64, 1}, {2, 5}, 0, 80, ""}};
  load.outputs = {{"", {kDLBfloat, 16, 1}, {}, 128, 2, ""}};
  load.states = {{"0", {kDLFloat, 32, 1}, {1, 2, 64, 8}, 0, 4096, ""}};
  return load;
}

CopyStatesRequest some_copy() {
  return {3, 0, {2, 5, 6, 7, {1, 0, 0}}, {{"0", {kDLFloat, 32, 1}, {3, 2, 64, 8}, 0, 12288, ""}}};
}

uint64_t seed() {
  const char* text = std::getenv("RM_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 20261121;
}

/// Decoding may refuse with rm::Error; nothing else may happen.
void must_survive(const std::string& bytes) {
  const std::function<void()> readers[] = {
      [&] { PacketHeader::decode(bytes); },   [&] { Ready::decode(bytes); },
      [&] { CompileRequest::decode(bytes); }, [&] { LoadRequest::decode(bytes); },
      [&] { StatesRequest::decode(bytes); },  [&] { CopyStatesRequest::decode(bytes); },
      [&] { Progress::decode(bytes); },       [&] { Failure::decode(bytes).error("x"); }};
  for (const auto& read : readers) {
    try {
      read();
    } catch (const Error&) {
    }
  }
}

}  // namespace

TEST_CASE("a message is read back as it was written") {
  const LoadRequest load = some_load();
  const LoadRequest again = LoadRequest::decode(load.encode());
  CHECK(again.encode() == load.encode());
  CHECK(again.artefact == load.artefact);
  CHECK(again.constants[0].dims == std::vector<int64_t>{2, 3});
  CHECK(again.states[0].name == "0");
  const StatesRequest states{2, load.states};
  CHECK(StatesRequest::decode(states.encode()).encode() == states.encode());
  const CopyStatesRequest copy = CopyStatesRequest::decode(some_copy().encode());
  CHECK(copy.encode() == some_copy().encode());
  CHECK(copy.from == 3);
  CHECK(copy.region.to_start == 6);
  CHECK(copy.region.rows == std::vector<uint64_t>{1, 0, 0});
  CHECK(copy.host[0].bytes == 12288);
  const PacketHeader header{MessageType::kLoad, 7, 1234, true};
  const PacketHeader read = PacketHeader::decode(header.encode());
  CHECK(read.type == MessageType::kLoad);
  CHECK(read.request == 7);
  CHECK(read.body_bytes == 1234);
  CHECK(read.body_in_memory);
}

TEST_CASE("another protocol version is refused with the reason for it") {
  std::string bytes = PacketHeader{MessageType::kHello, 1, 0, false}.encode();
  bytes[4] = 9;
  try {
    PacketHeader::decode(bytes);
    FAIL("it was accepted");
  } catch (const Error& error) {
    CHECK(error.reason() == "RM403");
  }
}

TEST_CASE("every truncation of a message is refused") {
  const std::string whole = some_load().encode();
  for (size_t size = 0; size < whole.size(); ++size) {
    CHECK_THROWS_AS(LoadRequest::decode(whole.substr(0, size)), Error);
  }
  CHECK_THROWS_AS(LoadRequest::decode(whole + "x"), Error);
  const std::string copy = some_copy().encode();
  for (size_t size = 0; size < copy.size(); ++size) {
    CHECK_THROWS_AS(CopyStatesRequest::decode(copy.substr(0, size)), Error);
  }
}

TEST_CASE("random and mutated bytes are refused or read, never a crash") {
  std::mt19937_64 random(seed());
  CAPTURE(seed());
  const std::string messages[] = {some_load().encode(), some_copy().encode()};
  for (int round = 0; round < 20000; ++round) {
    std::string bytes =
        round % 2 == 0 ? messages[round / 2 % 2] : std::string(random() % 200, '\0');
    const size_t changes = round % 2 == 0 ? 1 + random() % 4 : bytes.size();
    for (size_t i = 0; i < changes && !bytes.empty(); ++i) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    must_survive(bytes);
  }
}

TEST_CASE("a slot outside its memory is refused") {
  TensorSlot slot{"x", {kDLFloat, 32, 1}, {4}, 0, 16, ""};
  slot.check(16);
  slot.offset = 1;
  CHECK_THROWS_AS(slot.check(16), Error);
  slot.offset = UINT64_MAX - 4;
  CHECK_THROWS_AS(slot.check(16), Error);
  slot = {"x", {kDLFloat, 32, 1}, {INT64_MAX, INT64_MAX, 8}, 0, 16, ""};
  CHECK_THROWS_AS(slot.check(16), Error);
  slot = {"x", {kDLFloat, 32, 1}, {-1}, 0, 16, ""};
  CHECK_THROWS_AS(slot.check(16), Error);
}

TEST_CASE("a long body arrives whole, with the descriptors it came with") {
  auto [left, right] = Channel::make_pair();
  Channel here(std::move(left)), there(std::move(right));
  std::string body(3 << 20, 'b');
  body.back() = 'e';
  const Fd file(dup(0));
  REQUIRE(here.send({MessageType::kLoad, 9, body, {&file}}, std::chrono::milliseconds(1000)));
  const auto packet = there.receive(std::chrono::milliseconds(1000));
  REQUIRE(packet);
  CHECK(packet->request == 9);
  CHECK(packet->body == body);
  CHECK(packet->files.size() == 1);
}

TEST_CASE("garbage on the socket is an error of the reader") {
  auto [left, right] = Channel::make_pair();
  Channel there(std::move(right));
  std::mt19937_64 random(seed());
  for (int round = 0; round < 500; ++round) {
    std::string bytes(1 + random() % 300, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    REQUIRE(send(left.get(), bytes.data(), bytes.size(), 0) > 0);
    CHECK_THROWS_AS(there.receive(std::chrono::milliseconds(1000)), Error);
  }
}

TEST_CASE("a body in memory that its sender may still shrink is refused") {
  auto [left, right] = Channel::make_pair();
  Channel there(std::move(right));
  for (const bool sealed : {false, true}) {
    CAPTURE(sealed);
    const Fd memory(memfd_create("body", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    REQUIRE(ftruncate(memory.get(), 8192) == 0);
    if (sealed) REQUIRE(fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    std::string head = PacketHeader{MessageType::kDone, 1, 8192, true}.encode();
    iovec part{head.data(), head.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    const int descriptor = memory.get();
    std::memcpy(CMSG_DATA(rights), &descriptor, sizeof descriptor);
    REQUIRE(sendmsg(left.get(), &message, 0) > 0);
    const auto receive = [&] { return there.receive(std::chrono::milliseconds(1000)); };
    if (sealed) {
      CHECK(receive()->body.view().size() == 8192);
    } else {
      CHECK_THROWS_AS(receive(), Error);
    }
  }
}
