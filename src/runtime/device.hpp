// Where a program's memory lies and its kernels run: the host, or one device of a backend.
//
// Memory is freed when the last owner drops it; a backend's free waits for work that may still use
// it. Streams are the caller's own, wrapped once each.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "backend/backend.hpp"

namespace rm::runtime {

/// Launches that were recorded, given to the device as one. Its memory must stay while it is there.
class Recording {
 public:
  virtual ~Recording() = default;
  virtual void launch(rm_stream* stream) = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual DLDevice id() const = 0;
  bool is_host() const { return id().device_type == kDLCPU; }
  /// At least `bytes`, aligned to 256. Throws rm::Error (RM305) when there is none.
  virtual std::shared_ptr<void> allocate(size_t bytes) = 0;
  /// Copies from the host; it is done when this returns, for work on any stream.
  virtual void upload(void* to, const void* from, size_t bytes) = 0;
  /// Copies within the device, ordered with the other work of `stream`.
  virtual void copy(void* to, const void* from, size_t bytes, rm_stream* stream) = 0;
  /// Copies from the host, ordered with the other work of `stream`; `from` may change at once.
  virtual void write(void* to, const void* from, size_t bytes, rm_stream* stream) = 0;
  /// Waits for the work of `stream`; throws its error.
  virtual void synchronize(rm_stream* stream) = 0;
  /// The stream behind a native handle (a cudaStream_t), for launches. Lives as long as the device.
  virtual rm_stream* stream_of(void* native) = 0;
  virtual bool can_record() const { return false; }
  /// What `launches` launches on the stream it is given; nothing runs. Throws what it throws.
  virtual std::unique_ptr<Recording> record(const std::function<void(rm_stream*)>& launches);
};

using DevicePtr = std::shared_ptr<Device>;

/// The one host: plain memory, everything done when it returns, a null stream.
const DevicePtr& host();

/// A device of a loaded backend.
class BackendDevice final : public Device {
 public:
  BackendDevice(backend::Backend& backend, size_t index);
  DLDevice id() const override { return id_; }
  std::shared_ptr<void> allocate(size_t bytes) override;
  void upload(void* to, const void* from, size_t bytes) override;
  void copy(void* to, const void* from, size_t bytes, rm_stream* stream) override;
  void write(void* to, const void* from, size_t bytes, rm_stream* stream) override;
  void synchronize(rm_stream* stream) override;
  rm_stream* stream_of(void* native) override;
  bool can_record() const override { return graphs_ != nullptr; }
  std::unique_ptr<Recording> record(const std::function<void(rm_stream*)>& launches) override;

 private:
  backend::Backend& backend_;
  const size_t index_;
  const DLDevice id_;
  const rm_graphs* const graphs_;
  std::mutex recording_mutex_;  // one recording at a time
  backend::Stream recordings_;
  std::mutex mutex_;  // guards what follows
  backend::Stream uploads_;
  std::map<void*, backend::Stream> streams_;
};

}  // namespace rm::runtime
