// Memory of any kind as a tensor of bytes, as Backend::copy wants it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rm/backend.h"

namespace rm::backend {

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
  Bytes& operator=(const Bytes&) = delete;

  int64_t size, one = 1;
  rm_tensor tensor{};
};

}  // namespace rm::backend
