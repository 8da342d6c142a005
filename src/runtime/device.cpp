#include "runtime/device.hpp"

#include <cstring>

#include "backend/bytes.hpp"
#include "backend/status.hpp"
#include "base/error.hpp"
#include "runtime/aligned_memory.hpp"

namespace rm::runtime {
namespace {

using backend::Bytes;

constexpr size_t kAlignment = 256;

class Host final : public Device {
 public:
  DLDevice id() const override { return {kDLCPU, 0}; }
  std::shared_ptr<void> allocate(size_t bytes) override { return allocate_host(bytes); }
  void upload(void* to, const void* from, size_t bytes) override {
    if (bytes != 0) std::memcpy(to, from, bytes);
  }
  void copy(void* to, const void* from, size_t bytes, rm_stream*) override {
    upload(to, from, bytes);
  }
  void write(void* to, const void* from, size_t bytes, rm_stream*) override {
    upload(to, from, bytes);
  }
  void synchronize(rm_stream*) override {}
  rm_stream* stream_of(void*) override { return nullptr; }
};

class Graph final : public Recording {
 public:
  Graph(const rm_graphs* api, rm_graph* graph) : api_(api), graph_(graph) {}
  ~Graph() override { api_->destroy(graph_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(rm_stream* stream) override {
    if (rm_status* status = api_->launch(graph_, stream)) backend::check(status, "graph launch");
  }

 private:
  const rm_graphs* const api_;
  rm_graph* const graph_;
};

}  // namespace

std::unique_ptr<Recording> Device::record(const std::function<void(rm_stream*)>&) {
  throw Error(RM_UNIMPLEMENTED, "[device] expected a device that records launches, got another");
}

const DevicePtr& host() {
  static const DevicePtr& device = *new DevicePtr(std::make_shared<Host>());
  return device;
}

BackendDevice::BackendDevice(backend::Backend& backend, size_t index)
    : backend_(backend),
      index_(index),
      id_{static_cast<DLDeviceType>(backend.get_device_info(index).dl_device_type),
          backend.get_device_info(index).dl_device_id},
      graphs_(backend.graphs()) {}

std::shared_ptr<void> BackendDevice::allocate(size_t bytes) {
  try {
    auto buffer = std::make_shared<backend::Buffer>(backend_.allocate(index_, 0, bytes, kAlignment));
    void* data = buffer->data();
    return {data, [buffer](void*) {}};
  } catch (const Error& error) {
    if (error.code() != RM_RESOURCE_EXHAUSTED) throw;
    throw Error(RM_RESOURCE_EXHAUSTED,
                "[device] expected " + std::to_string(bytes) + " bytes of the device's memory, got " +
                    error.what() + "; try torch.cuda.empty_cache(), or smaller batches",
                "RM305");
  }
}

void BackendDevice::upload(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const Bytes source(from, bytes, {kDLCPU, 0});
  Bytes target(to, bytes, id_);
  std::lock_guard lock(mutex_);
  if (!uploads_) uploads_ = backend_.create_stream(index_, 0);
  backend_.copy(uploads_.get(), source.tensor, target.tensor);
  uploads_.synchronize();
}

void BackendDevice::copy(void* to, const void* from, size_t bytes, rm_stream* stream) {
  if (bytes == 0) return;
  const Bytes source(from, bytes, id_);
  Bytes target(to, bytes, id_);
  backend_.copy(stream, source.tensor, target.tensor);
}

void BackendDevice::write(void* to, const void* from, size_t bytes, rm_stream* stream) {
  if (bytes == 0) return;
  const Bytes source(from, bytes, {kDLCPU, 0});
  Bytes target(to, bytes, id_);
  backend_.copy(stream, source.tensor, target.tensor);
}

void BackendDevice::synchronize(rm_stream* stream) {
  std::lock_guard lock(mutex_);
  for (const auto& [native, wrapped] : streams_) {
    if (wrapped.get() == stream) wrapped.synchronize();
  }
}

std::unique_ptr<Recording> BackendDevice::record(
    const std::function<void(rm_stream*)>& launches) {
  if (graphs_ == nullptr) return Device::record(launches);
  std::lock_guard lock(recording_mutex_);
  if (!recordings_) recordings_ = backend_.create_stream(index_, 0);
  backend::check(graphs_->begin(recordings_.get()), "graph begin");
  rm_graph* graph = nullptr;
  try {
    launches(recordings_.get());
  } catch (...) {
    try {
      backend::check(graphs_->end(recordings_.get(), &graph), "graph end");
    } catch (const Error&) {  // what went wrong first is what is said
    }
    graphs_->destroy(graph);
    throw;
  }
  backend::check(graphs_->end(recordings_.get(), &graph), "graph end");
  return std::make_unique<Graph>(graphs_, graph);
}

rm_stream* BackendDevice::stream_of(void* native) {
  std::lock_guard lock(mutex_);
  auto it = streams_.find(native);
  if (it == streams_.end()) it = streams_.emplace(native, backend_.wrap_stream(index_, native)).first;
  return it->second.get();
}

}  // namespace rm::runtime
