// Facts of the current device, and the speeds that rows' costs are written in. Costs were measured
// on one card; the functions below carry a measured rate over to the card at hand, so that no
// launcher holds a number of multiprocessors or a bandwidth of its own.
#pragma once

#include <cstdint>

namespace rm::cuda_ops {

/// Zeros where there is no device: a launch will say what is wrong.
struct Card {
  int device = -1;
  int capability = 0;  // 10 * major + minor that kernels may count on: see card_shim.cu
  int multiprocessors = 0;
  int shared_bytes = 0;  // of one block, at most, on the device and on what the code is made for
  double clock_mhz = 0, memory_bytes_per_us = 0;
};

/// The current device's facts; read once a device and thread.
const Card& card();

/// While one lives on a thread, card() does not ask again which device is current: an operator's
/// call, which asks for a dozen costs, does not change it.
class CardScope {
 public:
  CardScope();
  ~CardScope();
  CardScope(const CardScope&) = delete;
  CardScope& operator=(const CardScope&) = delete;

 private:
  bool owns_ = false;  // not so within another one
};

/// The card that measured rates come from: an NVIDIA H200.
inline constexpr int kMeasuredMultiprocessors = 132;
inline constexpr double kMeasuredClockMhz = 1980, kMeasuredMemoryBytesPerUs = 4.917e6;
/// Shared memory that a block of a Hopper or Blackwell data-centre card may have.
inline constexpr int kHopperSharedBytes = 227 * 1024;

/// A rate of one multiprocessor, measured on one.
inline double block_rate(double measured) {
  return card().clock_mhz > 0 ? measured * (card().clock_mhz / kMeasuredClockMhz) : measured;
}
/// A rate of one multiprocessor, from the rate of the whole measured card.
inline double multiprocessor_rate(double measured) {
  return block_rate(measured / kMeasuredMultiprocessors);
}
/// A rate of all multiprocessors together, from the rate of the whole measured card.
inline double compute_rate(double measured) {
  const int count = card().multiprocessors > 0 ? card().multiprocessors : kMeasuredMultiprocessors;
  return multiprocessor_rate(measured) * count;
}
/// A rate of the device's memory.
inline double memory_rate(double measured) {
  const double here = card().memory_bytes_per_us;
  return here > 0 ? measured * (here / kMeasuredMemoryBytesPerUs) : measured;
}

/// Multiprocessors of the current device; 0 without one.
inline int multiprocessors() { return card().multiprocessors; }
/// 10 * major + minor that kernels may count on; 0 without a device.
inline int compute_capability() { return card().capability; }

/// Why a kernel with instructions of sm_90 does not run here, or null. Null without a device too:
/// the launch says so.
inline const char* sm90_why_not() {
  const int capability = compute_capability();
  return capability != 0 && capability < 90 ? "the device or this build is older than sm_90"
                                            : nullptr;
}
/// The same of Hopper's own instructions (wgmma), which no other architecture has.
inline const char* sm90a_why_not() {
  const int capability = compute_capability();
  return capability != 0 && capability != 90 ? "the device or this build is not sm_90a" : nullptr;
}
/// Why a kernel that takes `bytes` of shared memory a block does not run here, or null.
inline const char* shared_why_not(int bytes) {
  const int most = card().shared_bytes;
  return most > 0 && bytes > most ? "a block of this device has too little shared memory" : nullptr;
}
/// The same of the tensor cores' asynchronous copies and bfloat16.
inline const char* sm80_why_not() {
  const int capability = compute_capability();
  return capability != 0 && capability < 80 ? "the device is older than sm_80" : nullptr;
}

}  // namespace rm::cuda_ops
