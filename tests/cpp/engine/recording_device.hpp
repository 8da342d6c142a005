// A device that is none: it stands in for CUDA's where there is no GPU.
//
// Its addresses are no memory, so code that reads device memory on the host crashes. A stream holds
// what was launched until somebody waits: kernels (the CPU plugin's), copies. Freeing waits for all
// streams, as cudaFree does; work that uses memory freed before is an error that is recorded.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/device.hpp"
#include "select/kernel_table.hpp"

namespace rm::engine_test {

class RecordingDevice final : public runtime::Device,
                              public std::enable_shared_from_this<RecordingDevice> {
 public:
  DLDevice id() const override { return {kDLCUDA, 0}; }
  std::shared_ptr<void> allocate(size_t bytes) override;
  void upload(void* to, const void* from, size_t bytes) override;
  void copy(void* to, const void* from, size_t bytes, rm_stream* stream) override;
  void write(void* to, const void* from, size_t bytes, rm_stream* stream) override;
  void synchronize(rm_stream* stream) override;
  rm_stream* stream_of(void* native) override;
  bool can_record() const override { return records; }
  std::unique_ptr<runtime::Recording> record(
      const std::function<void(rm_stream*)>& launches) override;

  /// Runs what all streams hold, taking turns at random; each stream's own work in order.
  void drain();
  /// Host memory behind an address of the device; null for null. Records an error for memory that
  /// is free.
  void* real(const void* address);
  std::vector<char> bytes_of(const void* address, size_t bytes);
  size_t waiting() const;
  void launch(rm_stream* stream, std::function<void()> work);

  bool records = false;
  size_t recordings = 0, replays = 0;
  size_t uploads = 0, uploaded_bytes = 0, held_bytes = 0;
  std::vector<std::string> errors;

 private:
  struct Stream {
    std::deque<std::function<void()>> work;
  };
  struct Block {
    std::vector<char> memory;
    char* start = nullptr;
    size_t bytes = 0;
  };
  uintptr_t next_ = uintptr_t{1} << 44;
  std::map<uintptr_t, Block> blocks_;
  std::map<void*, std::unique_ptr<Stream>> streams_;
  std::mt19937 rng_{7};
};

/// The CPU plugin's kernels as kernels of this device. One device at a time. Those of the operator
/// `not_recorded` cannot be part of a recording.
std::shared_ptr<const select::KernelTable> recorded_kernels(
    const std::shared_ptr<RecordingDevice>& device, std::string_view not_recorded = {});

}  // namespace rm::engine_test
