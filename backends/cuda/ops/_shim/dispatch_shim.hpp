// From a dtype at run time to a type at compile time, and checked calls of the CUDA runtime.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "_shim/card_shim.hpp"
#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

template <class T>
struct Type {
  using type = T;
};

/// fn(Type<T>{}) for the float dtype; the caller has checked is_float(t).
template <class Fn>
auto dispatch_float(DType t, Fn&& fn) {
  switch (t) {
    case DType::bf16:
      return fn(Type<__nv_bfloat16>{});
    case DType::f16:
      return fn(Type<__half>{});
    default:
      return fn(Type<float>{});
  }
}

/// fn(std::integral_constant<int, N>{}) for the smallest listed N >= value (the last one if none).
template <int First, int... Rest, class Fn>
auto dispatch_at_least(std::int64_t value, Fn&& fn) {
  if constexpr (sizeof...(Rest) == 0) {
    return fn(std::integral_constant<int, First>{});
  } else {
    if (value <= First) return fn(std::integral_constant<int, First>{});
    return dispatch_at_least<Rest...>(value, std::forward<Fn>(fn));
  }
}

/// A status of the CUDA runtime as ours; `what` was expected. See error_shim.cpp.
Status cuda_status(const char* op, cudaError_t e, const char* what);

/// The status of the launch just made on this thread.
inline Status launch_status(const char* op) {
  return cuda_status(op, cudaGetLastError(), "a launch without errors");
}

/// Lets a kernel be launched with up to `bytes` of dynamic shared memory.
template <class Kernel>
Status allow_shared_memory(const char* op, Kernel* kernel, int bytes) {
  return cuda_status(
      op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
      "room in shared memory");
}

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Microseconds to move `bytes` of the device's memory, and a launch: only the order counts.
inline double move_us(double bytes) { return 2.0 + bytes / memory_rate(3e6); }

}  // namespace rm::cuda_ops
