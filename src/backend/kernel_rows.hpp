// A backend's kernel rows as a range.  Rows step by the plugin's own stride, so a plugin whose
// rm_kernel is longer than ours is read correctly; the loader has checked that none is shorter.
#pragma once

#include <cstddef>
#include <iterator>

#include "rm/kernels.h"

namespace rm::backend {

class KernelRows {
 public:
  class iterator {
   public:
    using iterator_category = std::forward_iterator_tag;
    using value_type = rm_kernel;
    using difference_type = std::ptrdiff_t;
    using pointer = const rm_kernel*;
    using reference = const rm_kernel&;

    iterator() = default;
    iterator(const std::byte* at, size_t stride) : at_(at), stride_(stride) {}
    reference operator*() const { return *reinterpret_cast<pointer>(at_); }
    pointer operator->() const { return reinterpret_cast<pointer>(at_); }
    iterator& operator++() {
      at_ += stride_;
      return *this;
    }
    iterator operator++(int) {
      iterator old = *this;
      ++*this;
      return old;
    }
    bool operator==(const iterator& other) const { return at_ == other.at_; }

   private:
    const std::byte* at_ = nullptr;
    size_t stride_ = 0;
  };

  KernelRows() = default;
  KernelRows(const rm_kernel* rows, size_t count, size_t stride)
      : rows_(reinterpret_cast<const std::byte*>(rows)), count_(count), stride_(stride) {}

  iterator begin() const { return {rows_, stride_}; }
  iterator end() const { return {rows_ + count_ * stride_, stride_}; }
  size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  const rm_kernel& operator[](size_t i) const {
    return *reinterpret_cast<const rm_kernel*>(rows_ + i * stride_);
  }

 private:
  const std::byte* rows_ = nullptr;
  size_t count_ = 0, stride_ = sizeof(rm_kernel);
};

}  // namespace rm::backend
