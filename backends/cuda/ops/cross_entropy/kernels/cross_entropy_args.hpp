// What the cross entropy kernels are launched with: pointers, row pitches (elements) and sizes.
#pragma once

#include <cstdint>

namespace rm::cuda_ops {

struct CrossEntropyArgs {
  const void* logits;
  const std::int64_t* target;
  float *loss, *lse;   // forward results; backward reads lse
  const float* dloss;  // backward
  void* dlogits;       // backward
  float* partial;      // [rows, chunks, 2]: maximum and scaled sum of a chunk
  std::int64_t rows, pitch, out_pitch, n, ignore_index;
  int chunks;
  std::int64_t chunk;  // elements of a chunk, a multiple of the vector
};

}  // namespace rm::cuda_ops
