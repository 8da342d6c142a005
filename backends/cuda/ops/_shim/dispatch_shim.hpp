// From a dtype at run time to a type at compile time, device facts, and checked launches.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

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

inline Status cuda_status(const char* op, cudaError_t e, const char* what) {
  if (e == cudaSuccess) return {};
  const bool none = e == cudaErrorNoDevice || e == cudaErrorInsufficientDriver ||
                    e == cudaErrorSystemDriverMismatch || e == cudaErrorStubLibrary;
  return {none ? Code::no_device : Code::device_error,
          text_of({"[", op, "] expected ", none ? "a CUDA device" : what, ", got ",
                   cudaGetErrorName(e), ": ", cudaGetErrorString(e),
                   none ? "; try a machine with an NVIDIA driver" : "; try compute-sanitizer"})};
}

/// The status of the launch just made on this thread.
inline Status launch_status(const char* op) {
  return cuda_status(op, cudaGetLastError(), "a launch without errors");
}

/// Multiprocessors of the current device; 0 without one. Asked once a device and thread.
inline int multiprocessors() {
  thread_local int known_device = -1, known_count = 0;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (device != known_device) {
    if (cudaDeviceGetAttribute(&known_count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
      return 0;
    known_device = device;
  }
  return known_count;
}

/// 10 * major + minor of the current device; 0 without one.
inline int compute_capability() {
  thread_local int known_device = -1, known = 0;
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (device != known_device) {
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess)
      return 0;
    known = 10 * major + minor, known_device = device;
  }
  return known;
}

/// Lets a kernel be launched with up to `bytes` of dynamic shared memory.
template <class Kernel>
Status allow_shared_memory(const char* op, Kernel* kernel, int bytes) {
  return cuda_status(
      op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
      "room in shared memory");
}

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Microseconds to move `bytes` at a modern card's speed, and a launch: only the order counts.
inline double move_us(double bytes) { return 2.0 + bytes / 3e6; }

}  // namespace rm::cuda_ops
