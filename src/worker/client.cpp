// A worker's life: started, greeted, ended. Its requests are in client_requests.cpp.
#include "worker/client.hpp"

#include <unistd.h>

#include <algorithm>
#include <new>

namespace rm::worker {
namespace {

constexpr std::chrono::milliseconds kQuitIsReadWithin{100};
constexpr std::chrono::milliseconds kEndsAfterQuit{500};

}  // namespace

void place_slots(Slots& slots, uint64_t& offset) {
  for (TensorSlot& slot : slots) {
    slot.bytes = tensor_bytes(slot.dtype, slot.dims);
    slot.offset = offset;
    offset += align_slot(slot.bytes);
  }
}

Worker::Worker(const Options& options) : Worker(options, Channel::make_pair()) {}

Worker::Worker(const Options& options, std::pair<Fd, Fd> ends)
    : options_(options),
      owner_(getpid()),
      process_(options.process, ends.second),
      channel_(std::move(ends.first)),
      page_(Lanes::kMost * sizeof(Doorbell)) {
  bell_ = new (page_.data()) Doorbell[Lanes::kMost]{};
  bell_->magic = Doorbell::kMagic;
  bell_->version = kProtocolVersion;
}

std::shared_ptr<Worker> Worker::start(const Options& options, const Interrupt& interrupt) {
  std::shared_ptr<Worker> worker(new Worker(options));
  worker->greet(interrupt);
  return worker;
}

Worker::~Worker() { stop(); }

void Worker::greet(const Interrupt& interrupt) {
  const Bytes body = request({MessageType::kHello, "start", {}, {&page_.file()}}, {},
                                   {options_.start_timeout_s, interrupt, options_.start_stall_s});
  ready_ = Ready::decode(body);
  lanes_.open(std::clamp<size_t>(bell_->lanes, 1, Lanes::kMost));
}

void Worker::check_owner() const {
  if (getpid() != owner_) {
    throw Error(RM_FAILED_PRECONDITION,
                "[worker] expected the process that started the worker, got a forked child; try "
                "rm_abstract.init() in the child",
                "RM303");
  }
}

bool Worker::alive() { return getpid() == owner_ && process_.alive(); }

void Worker::stop() noexcept {
  if (getpid() != owner_) return;
  try {
    if (process_.alive()) {
      if (channel_.send({MessageType::kQuit, 0, {}}, kQuitIsReadWithin)) {
        process_.wait_for(kEndsAfterQuit);
      }
    }
  } catch (...) {
    // Its end of the socket is closed already: killing is what is left.
  }
  process_.kill();
}

void Worker::crashed(const std::string& what) {
  process_.wait_for(std::chrono::milliseconds(200));
  const std::string ending = process_.ending();
  process_.kill();
  std::string log = process_.log_tail();
  while (!log.empty() && log.back() == '\n') log.pop_back();
  throw Error(RM_UNAVAILABLE,
              "[worker " + what + "] expected an answer, got " +
                  (ending.empty() ? "a process that stopped answering" : ending) +
                  process_.log_named() +
                  (log.empty() ? "; its log is empty" : "; the end of its log:\n" + log),
              "RM303");
}

}  // namespace rm::worker
