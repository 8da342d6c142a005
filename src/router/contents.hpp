// The bytes of tensors whose writes leave no trace that the router could hear of.
//
// A Parameter's `.data` is watched by a descriptor (writes.hpp); a buffer is an ordinary tensor, and
// an ordinary tensor's class is left alone. So buffers are compared by content: small ones at every
// call, larger ones a block a call, one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rm::router {

class Contents {
 public:
  /// Watches `bytes` bytes at `data`, host memory that stays readable; `owner` names them later.
  void add(const void* data, std::size_t bytes, std::size_t owner);
  void clear();

  /// From now on every call compares 1/`calls` of the larger tensors, and all tensors may be added.
  void compare_within(std::size_t calls) { calls_ = calls; }

  static constexpr std::size_t kNone = SIZE_MAX;
  /// The owner of bytes that changed since they were added; kNone when none was seen to change.
  std::size_t changed() noexcept;

  /// Bytes up to which all of a tensor is compared at every call, and of one block of larger ones.
  static constexpr std::size_t kSmall = 4096, kBlock = 16384;
  /// What is compared whole at one call, over all tensors; what comes later counts as large.
  static constexpr std::size_t kAtOnce = 65536;
  /// Tensors beyond this many bytes in all are not watched: adding them reads them once.
  static constexpr std::size_t kMost = std::size_t{256} << 20;

 private:
  struct Block {
    const char* data;
    std::size_t bytes, owner;
    std::uint64_t digest;
  };
  std::vector<Block> small_, large_;
  std::size_t small_bytes_ = 0, all_bytes_ = 0, next_ = 0;
  std::size_t calls_ = 0;  // 0: one block a call
};

}  // namespace rm::router
