// Move-only owners of a plugin's buffers, streams and events.  The table they point to lives until
// the process ends (plugins are never unloaded), so destruction order does not matter.
#pragma once

#include <utility>

#include "backend/status.hpp"
#include "base/error.hpp"
#include "rm/backend.h"

namespace rm::backend {

/// Owns one handle; `destroy` may be NULL for a backend that has nothing to free.
template <class Handle>
class Owned {
 public:
  using Destroy = void (*)(Handle*);

  Owned() = default;
  Owned(const rm_backend_api* api, Handle* handle, Destroy destroy)
      : api_(api), handle_(handle), destroy_(destroy) {}
  Owned(Owned&& other) noexcept { swap(other); }
  Owned& operator=(Owned&& other) noexcept {
    Owned(std::move(other)).swap(*this);
    return *this;
  }
  ~Owned() {
    if (handle_ != nullptr && destroy_ != nullptr) destroy_(handle_);
  }

  Handle* get() const noexcept { return handle_; }
  explicit operator bool() const noexcept { return handle_ != nullptr; }

 protected:
  template <class Fn, class... Args>
  void call(const char* what, Fn fn, Args... args) const {
    if (fn == nullptr) throw Error(RM_UNIMPLEMENTED, std::string("[") + what + "] not offered");
    check(fn(args...), what);
  }
  void swap(Owned& other) noexcept {
    std::swap(api_, other.api_);
    std::swap(handle_, other.handle_);
    std::swap(destroy_, other.destroy_);
  }

  const rm_backend_api* api_ = nullptr;
  Handle* handle_ = nullptr;
  Destroy destroy_ = nullptr;
};

class Buffer : public Owned<rm_buffer> {
 public:
  using Owned::Owned;
  /// Address in the device's space (a host pointer for host memory).
  void* data() const {
    void* out = nullptr;
    call("buffer_ptr", api_->buffer_ptr, handle_, &out);
    return out;
  }
};

class Stream : public Owned<rm_stream> {
 public:
  using Owned::Owned;
  void synchronize() const { call("stream_sync", api_->stream_sync, handle_); }
};

class Event : public Owned<rm_event> {
 public:
  using Owned::Owned;
  void record(const Stream& stream) const {
    call("event_record", api_->event_record, handle_, stream.get());
  }
  /// Makes `stream` wait on the device; returns at once.
  void wait(const Stream& stream) const {
    call("event_wait", api_->event_wait, handle_, stream.get());
  }
  bool query() const {
    int ready = 0;
    call("event_query", api_->event_query, handle_, &ready);
    return ready != 0;
  }
  /// Throws the error of the work recorded before it.
  void synchronize() const { call("event_sync", api_->event_sync, handle_); }
};

}  // namespace rm::backend
