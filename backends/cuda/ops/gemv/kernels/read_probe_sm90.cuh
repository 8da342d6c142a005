// The fastest read of memory this card offers: bulk copies into a ring that nothing consumes.
// What gemv is measured against.
#pragma once

#include "_shim/async_shim.cuh"

namespace rm::cuda_ops {

inline constexpr int kProbePiece = 16 * 1024, kProbeStages = 12;

__global__ void __launch_bounds__(32)
    read_probe_bulk(const unsigned char* data, std::int64_t pieces) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  const std::uint32_t bars = shared_address(memory), ring = bars + 1024;
  if (threadIdx.x != 0) return;
  for (int i = 0; i < kProbeStages; ++i) barrier_init(bars + 8 * i, 1);
  barrier_init_done();
  std::int64_t asked = blockIdx.x;
  int stage = 0, parity = 0;
  const auto ask = [&](int s) {
    barrier_expect(bars + 8 * s, kProbePiece);
    bulk_copy(ring + s * kProbePiece, data + asked * kProbePiece, kProbePiece, bars + 8 * s);
    asked += gridDim.x;
  };
  for (int i = 0; i < kProbeStages && asked < pieces; ++i) ask(i);
  for (std::int64_t i = blockIdx.x; i < pieces; i += gridDim.x) {
    barrier_wait(bars + 8 * stage, parity);
    if (asked < pieces) ask(stage);
    if (++stage == kProbeStages) stage = 0, parity ^= 1;
  }
#else
  __trap();  // why_not keeps older architectures away
#endif
}

}  // namespace rm::cuda_ops
