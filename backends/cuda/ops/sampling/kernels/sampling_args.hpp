// What the sampling kernels are launched with, and the sizes that both sides know.
#pragma once

#include <cstdint>

namespace rm::cuda_ops {

inline constexpr int kSamplingThreads = 1024, kSamplingBins = 2048;
/// Most elements of a thread in a tile: of 4 or of 2 bytes.
inline constexpr int kSamplingPer = 32, kSamplingPerHalf = 64;
inline constexpr int kSamplingBlocks = 8;  // the largest portable cluster
/// Of a held row: neighbouring threads' packs of one number lie together, the next number's packs
/// start in other banks.
inline constexpr int kSamplingPitch = kSamplingThreads + 2;
/// Steps of 1/15 of a power of two below the largest logit: beyond the last but one the mass is 0.
inline constexpr int kSamplingSteps = 512, kSamplingStepsAUnit = 15;
inline constexpr int kSamplingCandidates = 4096;

struct SamplingArgs {
  const void* logits;
  const float* u;
  const std::int64_t* rng;
  std::int64_t* tokens;
  float* probability;
  std::int64_t rows, pitch, top_k;
  int n, per;   // per: a thread's elements in a tile, whole vectors
  float scale;  // log2(e) / temperature; 0: the argmax
  double top_p;
  bool vectors;  // rows start on 16 bytes
};

}  // namespace rm::cuda_ops
