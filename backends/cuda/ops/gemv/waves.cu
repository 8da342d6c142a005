// Launches of gemv_waves_sm90: rows of a turn, stages.
#include "gemv/common.hpp"
#include "gemv/kernels/gemv_waves_sm90.cuh"

namespace rm::cuda_ops {
namespace {

template <class T, int kPairs, int kSegments>
Status launch(GemvArgs& a, bool overlap, Stream stream) {
  constexpr int kRows = gemv_waves_rows(kSegments, kPairs);
  auto* kernel = gemv_waves<T, kPairs, kSegments>;
  a.steps = static_cast<int>(ceil_div(a.row_bytes, 64 * kSegments));
  a.stages_at = 128 + 2 * kGemvWavesWarps * kRows * 32;
  a.stage_bytes = kRows * a.row_bytes;
  const std::int64_t tiles = ceil_div(a.n, kRows);
  const std::int64_t blocks = std::min<std::int64_t>(tiles, 2 * std::max(1, multiprocessors()));
  a.stages = a.stage_bytes <= kGemvWavesSmall ? kGemvWavesStages : 1;
  a.stages = static_cast<int>(std::min<std::int64_t>(a.stages, ceil_div(tiles, blocks)));
  const int bytes = std::max(kGemvTwoBlocksMemory, a.stages_at + a.stages * a.stage_bytes + 512);
  if (Status s = allow_shared_memory("gemv", kernel, kGemvHalfMemory); !s) return s;
  return launch_weights_first(kernel, blocks, kGemvWavesWarps * 32, bytes, overlap, stream, a);
}

/// w in as many blocks as run at once.
template <class T>
Status launch_once(GemvArgs& a, bool overlap, Stream stream) {
  a.stages_at = 128 + kGemvWavesWarps * kGemvOnceRows * 32;
  if (Status s = allow_shared_memory("gemv", gemv_once<T>, kGemvHalfMemory); !s) return s;
  return launch_weights_first(gemv_once<T>, ceil_div(a.n, kGemvOnceRows), kGemvWavesWarps * 32,
                              kGemvTwoBlocksMemory, overlap, stream, a);
}

template <class T>
Status launch_of(GemvArgs& a, bool overlap, Stream stream) {
  const EpilogueArgs& e = a.epilogue;
  a.plain = e.scale == 1.0f && e.bias_kind == 0 && !e.aux && !e.residual && e.activation == 0;
  a.row_bytes = a.k * 2;
  a.together = a.w_pitch == a.row_bytes || a.n == 1;
  const int rows = gemv_waves_turn(a) / a.row_bytes;
  const bool once = a.n <= 2 * kGemvOnceRows * multiprocessors() && a.row_bytes <= kGemvOnceBytes;
  if (once && a.m == 1) return launch_once<T>(a, overlap, stream);
  if (a.m > 4) return launch<T, 1, 1>(a, overlap, stream);
  if (a.m > 2) {
    return rows >= 16 ? launch<T, 2, 2>(a, overlap, stream) : launch<T, 1, 2>(a, overlap, stream);
  }
  if (a.m > 1) {
    return rows >= 16  ? launch<T, 4, 4>(a, overlap, stream)
           : rows >= 8 ? launch<T, 2, 4>(a, overlap, stream)
                       : launch<T, 1, 4>(a, overlap, stream);
  }
  return rows >= 16  ? launch<T, 8, 8>(a, overlap, stream)
         : rows >= 8 ? launch<T, 4, 8>(a, overlap, stream)
         : rows >= 4 ? launch<T, 2, 8>(a, overlap, stream)
         : rows >= 2 ? launch<T, 1, 8>(a, overlap, stream)
                     : launch<T, 0, 8>(a, overlap, stream);
}

}  // namespace

const char* gemv_waves_why_not(const Gemv& p) {
  if (p.x.dtype == DType::f32) return "x is fp32";
  if (const char* why = gemv_bulk_why_not(p)) return why;
  if (gemv_bits(p) != 0) return "w is quantised";
  const std::int64_t m = p.x.shape[0], rows = m > 4 ? 16 : m > 2 ? 8 : m > 1 ? 4 : 2;
  if (2 * gemv_k(p) * rows > kGemvWavesMost) return "a block's rows of w do not fit 72 KiB";
  return nullptr;
}

Status launch_gemv_waves(const Gemv& p, Workspace, Stream stream) {
  GemvArgs a = gemv_args(p);
  return p.x.dtype == DType::bf16 ? launch_of<__nv_bfloat16>(a, p.overlap, stream)
                                  : launch_of<__half>(a, p.overlap, stream);
}

}  // namespace rm::cuda_ops
