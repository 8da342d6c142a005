// Memory two processes see: a memfd and its mapping. Nothing is left behind by a crash, because a
// memfd has no name and goes with its last descriptor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/file.hpp"

namespace rm::worker {

class SharedMemory {
 public:
  SharedMemory() = default;
  /// New zeroed memory; at least one byte. Throws FileError.
  explicit SharedMemory(size_t bytes);
  /// Maps the other side's memory; `writable` false maps it read-only. Throws rm::Error
  /// (RM_DATA_LOSS) unless it is sealed against shrinking: reading what its owner cut off would
  /// end this process with SIGBUS.
  SharedMemory(Fd file, bool writable);
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  std::byte* data() const noexcept { return data_; }
  size_t size() const noexcept { return size_; }
  const Fd& file() const noexcept { return file_; }
  /// From here on nobody can write to it, this process neither; it is mapped for reading. False
  /// where somebody else has it mapped for writing: it stays as it is.
  bool freeze();
  bool is_frozen() const noexcept;
  explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  void map(bool writable);
  Fd file_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// A part of a file (a memfd or any other), mapped for reading. The file must not be cut short
/// while it lives.
class MappedPart {
 public:
  /// Throws rm::Error (RM_DATA_LOSS) for a part the file does not have.
  MappedPart(const Fd& file, uint64_t offset, uint64_t bytes);
  MappedPart(const MappedPart&) = delete;
  MappedPart& operator=(const MappedPart&) = delete;
  ~MappedPart();
  std::string_view view() const noexcept { return {static_cast<const char*>(at_) + skip_, bytes_}; }

 private:
  void* at_ = nullptr;
  size_t skip_ = 0;  // from the page's start
  size_t bytes_ = 0;
};

/// Offsets of tensors in one block are multiples of this: what any kernel may assume, and a page
/// is not wasted on a scalar.
inline constexpr size_t kSlotAlignment = 64;
inline size_t align_slot(size_t bytes) {
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

}  // namespace rm::worker
