// Launches of gemv_quant_sm90: rows and stages of a block, how many warps hold x.
#include <bit>

#include "gemv/common.hpp"
#include "gemv/kernels/gemv_quant_sm90.cuh"

namespace rm::cuda_ops {
namespace {

template <class T, int kBits, int kEights, int kWarps>
Status launch(GemvArgs& a, bool overlap, Stream stream) {
  constexpr int kRows = gemv_quant_rows(kEights), kBlocks = 16 / kWarps;
  constexpr int kMemory = kBlocks == 1 ? kGemvMemory : kGemvHalfMemory;
  auto* kernel = gemv_quant<T, kBits, kEights, kWarps>;
  const auto aligned = [](std::int64_t v) { return static_cast<int>(ceil_div(v, 128) * 128); };
  const int groups = static_cast<int>(ceil_div(a.k, a.group));
  a.scales_at = aligned(kRows * a.row_bytes + 256);  // a run's last bytes may lie behind a row
  a.stage_bytes = aligned(a.scales_at + groups * gemv_quant_eights(kEights) * 16);
  a.stages_at = 128 + aligned(kWarps * gemv_quant_sums(kRows));
  // nibbles of long rows: a third stage costs more asking than it brings
  const int most = kBits == 4 && a.row_bytes >= 4096 ? 2 : kGemvQuantStages;
  const std::int64_t tiles = ceil_div(a.n, kRows);
  const std::int64_t blocks =
      std::min<std::int64_t>(tiles, kBlocks * std::max(1, multiprocessors()));
  a.stages = static_cast<int>(std::min<std::int64_t>(most, ceil_div(tiles, blocks)));
  while (a.stages > 0 && a.stages_at + a.stages * a.stage_bytes > kMemory) --a.stages;
  if (a.stages == 0) return unsupported("[gemv] gemv_quant_sm90: its rows do not fit");
  // at least so much that a third block does not fit
  const int bytes = std::max(a.stages_at + a.stages * a.stage_bytes, 80 * 1024);
  if (Status s = allow_shared_memory("gemv", kernel, kMemory); !s) return s;
  return launch_weights_first(kernel, blocks, kWarps * 32, bytes, overlap, stream, a);
}

/// Stages of 32 KiB. Sixteen warps and one block a multiprocessor, stages of 56 KiB, where eight
/// warps cannot hold x, and for longer rows of bytes.
template <class T>
Status launch_of(GemvArgs& a, bool overlap, Stream stream) {
  const EpilogueArgs& e = a.epilogue;
  a.plain = e.scale == 1.0f && e.bias_kind == 0 && !e.aux && !e.residual && e.activation == 0;
  a.row_bytes = static_cast<int>(a.k * static_cast<long long>(a.bits) / 8);
  a.together = a.w_pitch == a.row_bytes || a.n == 1;
  a.group_shift = a.group == a.k ? 30 : std::countr_zero(static_cast<unsigned>(a.group));
  const bool wide = a.k > (a.bits == 8 ? 4096 : gemv_quant_most(8)),
             two = 16 * a.row_bytes <= 32 * 1024;
  if (a.bits == 8) {
    return wide  ? launch<T, 8, 0, 16>(a, overlap, stream)
           : two ? launch<T, 8, 2, 8>(a, overlap, stream)
                 : launch<T, 8, 1, 8>(a, overlap, stream);
  }
  return wide  ? launch<T, 4, 1, 16>(a, overlap, stream)
         : two ? launch<T, 4, 2, 8>(a, overlap, stream)
               : launch<T, 4, 1, 8>(a, overlap, stream);
}

}  // namespace

const char* gemv_quant_why_not(const Gemv& p) {
  if (p.x.dtype == DType::f32) return "x is fp32";
  if (const char* why = gemv_bulk_why_not(p)) return why;
  if (p.x.shape[0] != 1) return "more than one row of x";
  if (gemv_bits(p) == 0) return "w is not quantised";
  if (gemv_k(p) > gemv_quant_most(16)) return "x does not fit the registers";
  return nullptr;
}

Status launch_gemv_quant(const Gemv& p, Workspace, Stream stream) {
  GemvArgs a = gemv_args(p);
  return p.x.dtype == DType::bf16 ? launch_of<__nv_bfloat16>(a, p.overlap, stream)
                                  : launch_of<__half>(a, p.overlap, stream);
}

}  // namespace rm::cuda_ops
