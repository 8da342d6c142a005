// The one place that asks the device what it is.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "_shim/card_shim.hpp"

namespace rm::cuda_ops {
namespace {

/// Nothing runs it: its attributes tell for which architecture this module's kernels were compiled.
/// Machine code or PTX of sm_80 on a newer device has no code for the newer instructions, so what
/// kernels may count on is the lesser of both.
__global__ void compiled_for() {}

int attribute(cudaDeviceAttr what, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, what, device) == cudaSuccess ? value : 0;
}

/// What a block of an architecture's cards may have: code for an older one plans as on its cards,
/// so that a newer card can test it.
int shared_bytes_of(int capability) {
  switch (capability) {
    case 80:
    case 87:
      return 163 * 1024;
    case 86:
    case 89:
    case 120:
    case 121:
      return 99 * 1024;
    default:
      return kHopperSharedBytes;
  }
}

Card read_card(int device) {
  Card c;
  const int own = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
                  attribute(cudaDevAttrComputeCapabilityMinor, device);
  cudaFuncAttributes code{};
  if (cudaFuncGetAttributes(&code, compiled_for) != cudaSuccess) {
    cudaGetLastError();  // no code of this module fits the device: the launch will say so
    return c;
  }
  c.device = device;
  c.capability = std::min(own, code.ptxVersion);
  c.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device);
  c.shared_bytes = std::min(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                            shared_bytes_of(c.capability));
  c.clock_mhz = attribute(cudaDevAttrClockRate, device) / 1e3;
  // two transfers a clock of a bus of so many bits
  c.memory_bytes_per_us = 2.0 * attribute(cudaDevAttrMemoryClockRate, device) / 1e3 *
                          attribute(cudaDevAttrGlobalMemoryBusWidth, device) / 8;
  return c;
}

thread_local Card known;
thread_local const Card* of_scope = nullptr;

}  // namespace

const Card& card() {
  static const Card none;
  if (of_scope != nullptr) return *of_scope;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return none;
  if (device != known.device) known = read_card(device);
  return known;
}

CardScope::CardScope() {
  if (of_scope == nullptr) of_scope = &card(), owns_ = true;
}
CardScope::~CardScope() {
  if (owns_) of_scope = nullptr;
}

}  // namespace rm::cuda_ops
