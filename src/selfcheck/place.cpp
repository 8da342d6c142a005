#include "selfcheck/place.hpp"

#include "backend/bytes.hpp"
#include "backend/registry.hpp"
#include "base/error.hpp"

namespace rm::selfcheck {
namespace {

constexpr size_t kAlignment = 256;

class DevicePlace final : public Place {
 public:
  DevicePlace(Backend& backend, size_t index, DLDevice id)
      : backend_(backend), index_(index), id_(id), stream_(backend.create_stream(index, 0)) {}

  std::shared_ptr<void> allocate(size_t bytes) override {
    auto buffer = std::make_shared<backend::Buffer>(backend_.allocate(index_, 0, bytes, kAlignment));
    void* data = buffer->data();
    return {data, [buffer](void*) {}};
  }
  void copy_in(void* to, const void* from, size_t bytes) override {
    copy(backend::Bytes(from, bytes, {kDLCPU, 0}), to, id_);
  }
  void copy_out(void* to, const void* from, size_t bytes) override {
    copy(backend::Bytes(from, bytes, id_), to, {kDLCPU, 0});
  }
  rm_stream* stream() override { return stream_.get(); }

 private:
  void copy(const backend::Bytes& source, void* to, DLDevice there) {
    if (source.size == 0) return;
    backend::Bytes target(to, static_cast<size_t>(source.size), there);
    backend_.copy(stream_.get(), source.tensor, target.tensor);
    stream_.synchronize();
  }

  Backend& backend_;
  const size_t index_;
  const DLDevice id_;
  backend::Stream stream_;
};

}  // namespace

std::unique_ptr<Place> place_of(const select::Row& row) {
  if (row.device == nullptr || row.device->dl_device_type == kDLCPU) return nullptr;
  if (Backend* backend = backend::registry().find(row.backend)) {
    for (size_t i = 0; i < backend->device_count(); ++i) {
      if (&backend->get_device_info(i) != row.device) continue;
      const DLDevice id{static_cast<DLDeviceType>(row.device->dl_device_type),
                        row.device->dl_device_id};
      return std::make_unique<DevicePlace>(*backend, i, id);
    }
  }
  throw Error(RM_UNAVAILABLE, "[self_check] expected the device of backend '" + row.backend +
                                  "', got none such");
}

}  // namespace rm::selfcheck
