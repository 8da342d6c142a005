// Values on their way into libtorch: tensors over our memory, and the encoding of every schema type
// as torch's StableIValue.
//
// Ownership follows torch's convention: an encoded value owns what it points to, and the dispatcher
// takes it over.  When the dispatcher fails it does not say how far it came, so what it had not yet
// taken is leaked: bounded by one call's arguments and only on an error.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "call_spec.hpp"
#include "rm/kernels.h"
#include "torch_api.hpp"

namespace rm::torch_bridge {

/// An owning reference to an at::Tensor.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(void* handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor();

  void* get() const { return handle_; }
  void* release() { return std::exchange(handle_, nullptr); }

 private:
  void* handle_ = nullptr;
};

/// Shape, strides and types of an operand, fixed when the kernel is prepared.
struct Operand {
  bool present = false;
  std::vector<int64_t> shape, strides;
  int32_t dtype = 0, device_type = 0, device_index = 0;  ///< torch's numbers

  static Operand of(const rm_tensor* tensor);
  int64_t elements() const;
  Tensor over(void* data) const;
};

/// `data` are the launch's input pointers.
Stable encode(const Type& type, const Value& value, std::span<const Operand> operands,
              const void* const* data);

}  // namespace rm::torch_bridge
