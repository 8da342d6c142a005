#include "runtime/device.hpp"

#include <cstring>

#include "base/error.hpp"
#include "runtime/aligned_memory.hpp"

namespace rm::runtime {
namespace {

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
  void synchronize(rm_stream*) override {}
  rm_stream* stream_of(void*) override { return nullptr; }
};

// `bytes` of memory as a tensor of bytes.
struct Bytes {
  Bytes(const void* data, size_t bytes, DLDevice device) : size(static_cast<int64_t>(bytes)) {
    tensor.data = const_cast<void*>(data);
    tensor.device = device;
    tensor.ndim = 1;
    tensor.dtype = {kDLUInt, 8, 1};
    tensor.shape = &size;
    tensor.strides = &one;
  }
  Bytes(const Bytes&) = delete;
  int64_t size, one = 1;
  rm_tensor tensor{};
};

}  // namespace

const DevicePtr& host() {
  static const DevicePtr& device = *new DevicePtr(std::make_shared<Host>());
  return device;
}

BackendDevice::BackendDevice(backend::Backend& backend, size_t index)
    : backend_(backend),
      index_(index),
      id_{static_cast<DLDeviceType>(backend.get_device_info(index).dl_device_type),
          backend.get_device_info(index).dl_device_id} {}

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

void BackendDevice::synchronize(rm_stream* stream) {
  std::lock_guard lock(mutex_);
  for (const auto& [native, wrapped] : streams_) {
    if (wrapped.get() == stream) wrapped.synchronize();
  }
}

rm_stream* BackendDevice::stream_of(void* native) {
  std::lock_guard lock(mutex_);
  auto it = streams_.find(native);
  if (it == streams_.end()) it = streams_.emplace(native, backend_.wrap_stream(index_, native)).first;
  return it->second.get();
}

}  // namespace rm::runtime
