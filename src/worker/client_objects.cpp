// What a client holds in a worker: loaded programs and sets of states, released when they go.
#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "base/hash.hpp"
#include "worker/client.hpp"
#include "worker/wire.hpp"

namespace rm::worker {

void Weights::digest() {
  constexpr size_t kMostThreads = 8;             // beyond them the memory is the limit
  constexpr uint64_t kWorthAThread = 4 << 20;    // bytes: a thread takes as long to start
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < slots.size(); i = next++) {
      const Digest found = hash_bytes(ByteSpan(memory.data() + slots[i].offset, slots[i].bytes));
      slots[i].digest.assign(reinterpret_cast<const char*>(found.bytes.data()), Digest::kBytes);
    }
  };
  const size_t useful = std::min({slots.size(), memory.size() / kWorthAThread, kMostThreads,
                                  size_t{std::thread::hardware_concurrency()}});
  std::vector<std::thread> others;
  try {
    for (size_t i = 1; i < useful; ++i) others.emplace_back(work);
  } catch (const std::system_error&) {
    // No more threads are to be had: those that are there read all of it.
  }
  work();
  for (std::thread& other : others) other.join();
}

std::shared_ptr<StateSet> Worker::make_states(uint64_t device, Slots slots,
                                              const WaitLimits& limits) {
  std::shared_ptr<StateSet> states(new StateSet);
  uint64_t bytes = 0;
  place_slots(slots, bytes);
  const Bytes answer = request({MessageType::kMakeStates, "states",
                                StatesRequest{device, slots}.encode(), {}, Beside::kNothing},
                               {}, limits);
  Reader in(answer);
  states->handle_ = in.u64();
  in.end();
  states->slots_ = std::move(slots);
  states->worker_ = shared_from_this();
  return states;
}

void Worker::copy_states(const CopyStatesRequest& request, const Fd* host,
                         const WaitLimits& limits) {
  std::vector<const Fd*> files;
  if (host != nullptr) files.push_back(host);
  this->request({MessageType::kCopyStates, "states", request.encode(), files, Beside::kNothing}, {},
                limits);
}

LoadedProgram::~LoadedProgram() {
  if (worker_) worker_->release(MessageType::kUnload, handle_);
}

void LoadedProgram::execute(const WaitLimits& limits, const StateSet* states) {
  if (states != nullptr && states->worker_ != worker_) {
    throw Error(RM_FAILED_PRECONDITION,
                "[worker execute] expected states of this worker, got another's", "RM303");
  }
  worker_->execute(handle_, states == nullptr ? 0 : states->handle_, limits);
}

StateSet::~StateSet() {
  if (worker_) worker_->release(MessageType::kFreeStates, handle_);
}

bool StateSet::alive() const { return worker_->alive(); }

void StateSet::copy_from(const StateSet& from, const StatesRegion& region,
                         const WaitLimits& limits) {
  if (from.worker_ != worker_) {
    throw Error(RM_FAILED_PRECONDITION,
                "[worker states] expected states of this worker, got another's", "RM303");
  }
  worker_->copy_states({from.handle_, handle_, region, {}}, nullptr, limits);
}

void StateSet::read(const Weights& to, const StatesRegion& region, const WaitLimits& limits) const {
  worker_->copy_states({handle_, 0, region, to.slots}, &to.memory.file(), limits);
}

void StateSet::write(const Weights& from, const StatesRegion& region, const WaitLimits& limits) {
  worker_->copy_states({0, handle_, region, from.slots}, &from.memory.file(), limits);
}

}  // namespace rm::worker
