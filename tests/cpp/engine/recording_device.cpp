#include "recording_device.hpp"

#include <array>
#include <cstring>
#include <mutex>
#include <utility>

#include "backend/registry.hpp"

namespace rm::engine_test {

std::shared_ptr<void> RecordingDevice::allocate(size_t bytes) {
  const uintptr_t address = next_;
  next_ += (bytes + 4096 + 255) / 256 * 256;
  Block& block = blocks_[address];
  block.memory.assign(bytes + 256, 0x5a);
  const auto at = reinterpret_cast<uintptr_t>(block.memory.data());
  block.start = block.memory.data() + (256 - at % 256) % 256;
  block.bytes = bytes;
  held_bytes += bytes;
  return {reinterpret_cast<void*>(address), [self = shared_from_this(), bytes](void* freed) {
            self->drain();
            self->held_bytes -= bytes;
            self->blocks_.erase(reinterpret_cast<uintptr_t>(freed));
          }};
}

void* RecordingDevice::real(const void* address) {
  if (address == nullptr) return nullptr;
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto it = blocks_.upper_bound(at);
  if (it != blocks_.begin() && at - std::prev(it)->first <= std::prev(it)->second.bytes) {
    --it;
    return it->second.start + (at - it->first);
  }
  errors.push_back("an address of no live block was used");
  static std::vector<char> nowhere(size_t{1} << 20);
  return nowhere.data();
}

std::vector<char> RecordingDevice::bytes_of(const void* address, size_t bytes) {
  std::vector<char> out(bytes);
  if (bytes != 0) std::memcpy(out.data(), real(address), bytes);
  return out;
}

void RecordingDevice::upload(void* to, const void* from, size_t bytes) {
  ++uploads;
  uploaded_bytes += bytes;
  if (bytes != 0) std::memcpy(real(to), from, bytes);
}

void RecordingDevice::copy(void* to, const void* from, size_t bytes, rm_stream* stream) {
  launch(stream, [this, to, from, bytes] {
    if (bytes != 0) std::memcpy(real(to), real(from), bytes);
  });
}

void RecordingDevice::write(void* to, const void* from, size_t bytes, rm_stream* stream) {
  const auto* first = static_cast<const char*>(from);
  launch(stream, [this, to, taken = std::vector<char>(first, first + bytes)] {
    if (!taken.empty()) std::memcpy(real(to), taken.data(), taken.size());
  });
}

void RecordingDevice::launch(rm_stream* stream, std::function<void()> work) {
  if (stream == nullptr) {
    errors.push_back("a launch on no stream");
    return;
  }
  reinterpret_cast<Stream*>(stream)->work.push_back(std::move(work));
}

void RecordingDevice::synchronize(rm_stream* stream) {
  auto& work = reinterpret_cast<Stream*>(stream)->work;
  while (!work.empty()) {
    const auto next = std::move(work.front());
    work.pop_front();
    next();
  }
}

rm_stream* RecordingDevice::stream_of(void* native) {
  auto& stream = streams_[native];
  if (stream == nullptr) stream = std::make_unique<Stream>();
  return reinterpret_cast<rm_stream*>(stream.get());
}

std::unique_ptr<runtime::Recording> RecordingDevice::record(
    const std::function<void(rm_stream*)>& launches) {
  struct Replay final : runtime::Recording {
    void launch(rm_stream* stream) override {
      ++device->replays;
      for (const auto& one : work) device->launch(stream, one);
    }
    RecordingDevice* device = nullptr;
    std::vector<std::function<void()>> work;
  };
  Stream into;
  launches(reinterpret_cast<rm_stream*>(&into));
  ++recordings;
  auto out = std::make_unique<Replay>();
  out->device = this;
  out->work.assign(into.work.begin(), into.work.end());
  return out;
}

size_t RecordingDevice::waiting() const {
  size_t count = 0;
  for (const auto& [native, stream] : streams_) count += stream->work.size();
  return count;
}

void RecordingDevice::drain() {
  while (waiting() > 0) {
    auto it = std::next(streams_.begin(), static_cast<std::ptrdiff_t>(rng_() % streams_.size()));
    auto& work = it->second->work;
    if (work.empty()) continue;
    const auto next = std::move(work.front());
    work.pop_front();
    next();
  }
}

namespace {

constexpr size_t kMostRows = 192;

struct Counts {
  size_t inputs, outputs;
  uint64_t workspace;
};

// What the C functions below look at: one device, one table.
struct Recorded {
  std::weak_ptr<RecordingDevice> device;
  std::vector<const rm_kernel*> inner;
  std::vector<rm_kernel> rows;
  std::map<const rm_kernel_state*, Counts> counts;
  rm_device_info info{};
};

Recorded& recorded() {
  static Recorded& one = *new Recorded();
  return one;
}

template <size_t I>
rm_status* prepare(const rm_problem* p, const rm_device_info* info, uint32_t config,
                   rm_kernel_state** out) {
  const rm_kernel* inner = recorded().inner[I];
  rm_status* status = inner->prepare(p, info, config, out);
  if (status != nullptr) return status;
  const uint64_t space = inner->workspace != nullptr ? inner->workspace(*out) : 0;
  recorded().counts[*out] = {p->num_inputs, p->num_outputs, space};
  return nullptr;
}

template <size_t I>
rm_status* launch(const rm_launch* l) {
  const auto device = recorded().device.lock();
  const Counts counts = recorded().counts.at(l->state);
  std::vector<const void*> inputs(l->inputs, l->inputs + counts.inputs);
  std::vector<void*> outputs(l->outputs, l->outputs + counts.outputs);
  device->launch(l->stream, [device = device.get(), inputs, outputs, given = *l]() mutable {
    for (auto& p : inputs) p = device->real(p);
    for (auto& p : outputs) p = device->real(p);
    rm_launch now = given;
    now.inputs = inputs.data();
    now.outputs = outputs.data();
    now.workspace = device->real(given.workspace);
    now.stream = nullptr;
    if (recorded().inner[I]->launch(&now) != nullptr) device->errors.push_back("a kernel failed");
  });
  return nullptr;
}

template <size_t... I>
void wrap(std::index_sequence<I...>) {
  Recorded& r = recorded();
  const auto one = [&](size_t index, auto prepare_row, auto launch_row) {
    if (index >= r.inner.size()) return;
    rm_kernel row = *r.inner[index];
    row.prepare = prepare_row;
    row.launch = launch_row;
    row.traits |= RM_KERNEL_CAPTURABLE;
    row.packing = nullptr;
    row.prepack = nullptr;
    r.rows.push_back(row);
  };
  (one(I, prepare<I>, launch<I>), ...);
}

}  // namespace

std::shared_ptr<const select::KernelTable> recorded_kernels(
    const std::shared_ptr<RecordingDevice>& device, std::string_view not_recorded) {
  Recorded& r = recorded();
  r.device = device;
  if (r.rows.empty()) {
    Backend& cpu = backend::registry().load(RM_CPU_PLUGIN);
    for (const rm_kernel& k : cpu.kernels()) r.inner.push_back(&k);
    r.info = cpu.get_device_info(0);
    r.info.dl_device_type = kDLCUDA;
    wrap(std::make_index_sequence<kMostRows>{});
  }
  auto table = std::make_shared<select::KernelTable>();
  static std::deque<rm_kernel> others;  // as long as the tables
  for (const rm_kernel& row : r.rows) {
    const rm_kernel* added = &row;
    if (std::string_view(row.op.data, row.op.size) == not_recorded) {
      added = &others.emplace_back(row);
      others.back().traits &= ~static_cast<uint32_t>(RM_KERNEL_CAPTURABLE);
    }
    table->add("recording", added, &r.info);
  }
  return table;
}

}  // namespace rm::engine_test
