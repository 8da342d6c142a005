// Launches of gemv_quant_sm90: rows and stages of a block, how many warps hold x.
#include <bit>

#include "gemv/common.hpp"
#include "gemv/kernels/gemv_quant_long_sm90.cuh"
#include "gemv/kernels/gemv_quant_once_sm90.cuh"

namespace rm::cuda_ops {
namespace {

int aligned(std::int64_t bytes) { return static_cast<int>(ceil_div(bytes, 128) * 128); }

/// Where a stage has its scales, and its size.
void cut_stage(GemvArgs& a, int rows) {
  a.scales_at = aligned(rows * a.row_bytes + 256);  // a run's last bytes may lie behind a row
  a.stage_bytes = aligned(a.scales_at + ceil_div(a.k, a.group) * ceil_div(rows, 8) * 16);
}

/// At least so much shared memory that a third block does not fit.
constexpr int kTwoBlocks = 80 * 1024;

template <class Kernel, class Group>
Status launch_blocks(Kernel* kernel, std::int64_t blocks, int warps, int bytes, int most,
                     const GemvArgs& a, const Group& q, bool overlap, Stream stream) {
  if (Status s = allow_shared_memory("gemv", kernel, most); !s) return s;
  const Launch how{static_cast<unsigned>(blocks), static_cast<unsigned>(warps) * 32,
                   static_cast<std::size_t>(std::max(bytes, kTwoBlocks)), 1, overlap};
  if constexpr (kGemvGroup<Group>) {
    return rm::cuda_ops::launch("gemv", kernel, how, stream, a, q);
  } else {
    return rm::cuda_ops::launch("gemv", kernel, how, stream, a);
  }
}

/// w in as many blocks as run at once.
bool fits_once(const GemvArgs& a) {
  return a.k <= kGemvQuantOnceMost && a.n <= 2 * kGemvQuantOnceRows * multiprocessors();
}

template <class T, int kBits, class Group>
Status launch_once(GemvArgs& a, const Group& q, bool overlap, Stream stream) {
  cut_stage(a, kGemvQuantOnceRows);
  a.stages_at = 128 + aligned(kGemvQuantOnceWarps * gemv_quant_sums(kGemvQuantOnceRows));
  auto* kernel = [] {
    if constexpr (kGemvGroup<Group>) {
      return gemv_group_quant_once<T, kBits>;
    } else {
      return gemv_quant_once<T, kBits>;
    }
  }();
  // a lane may read a warp's columns behind the last row
  const int bytes = a.stages_at + a.stage_bytes + kGemvQuantOnceMost;
  return launch_blocks(kernel, ceil_div(a.n, kGemvQuantOnceRows), kGemvQuantOnceWarps, bytes,
                       kGemvHalfMemory, a, q, overlap, stream);
}

/// Of a group (gemv_group_quant) or of one weight.
template <class T, int kBits, int kEights, int kWarps, class Group>
auto* kernel_of(const Group&) {
  if constexpr (kGemvGroup<Group>) {
    return gemv_group_quant<T, kBits, kEights, kWarps>;
  } else {
    return gemv_quant<T, kBits, kEights, kWarps>;
  }
}

template <class T, int kBits, int kEights, int kWarps, class Group>
Status launch(GemvArgs& a, const Group& q, bool overlap, Stream stream) {
  constexpr int kRows = gemv_quant_rows(kEights), kBlocks = 16 / kWarps;
  constexpr int kMemory = kBlocks == 1 ? kGemvMemory : kGemvHalfMemory;
  auto* kernel = kernel_of<T, kBits, kEights, kWarps>(q);
  cut_stage(a, kRows);
  a.stages_at = 128 + aligned(kWarps * gemv_quant_sums(kRows));
  const std::int64_t tiles = ceil_div(a.n, kRows);
  const std::int64_t blocks =
      std::min<std::int64_t>(tiles, kBlocks * std::max(1, multiprocessors()));
  // Of two blocks a multiprocessor: x waits behind what third stages ask for. Nibbles of long rows: a third
  // one costs more asking than it brings.
  const int most = kBlocks > 1 || (kBits == 4 && a.row_bytes >= 4096) ? 2 : kGemvQuantStages;
  a.stages = static_cast<int>(std::min<std::int64_t>(most, ceil_div(tiles, blocks)));
  while (a.stages > 0 && a.stages_at + a.stages * a.stage_bytes > kMemory) --a.stages;
  if (a.stages == 0) return unsupported("[gemv] gemv_quant_sm90: its rows do not fit");
  return launch_blocks(kernel, blocks, kWarps, a.stages_at + a.stages * a.stage_bytes, kMemory, a, q,
                       overlap, stream);
}

/// As fits_once, for longer rows of one weight.
bool fits_once_long(const GemvArgs& a) {
  return a.k > kGemvLongMost / 2 && a.k <= kGemvLongMost &&
         a.n <= 2 * kGemvLongRows * multiprocessors();
}

template <class T, int kBits>
Status launch_long(GemvArgs& a, bool overlap, Stream stream) {
  cut_stage(a, kGemvLongRows);
  a.stages_at = 128 + aligned(kGemvLongWarps * gemv_quant_sums(kGemvLongRows));
  // lanes read columns behind the last row, too
  const int bytes = a.stages_at + a.stage_bytes + (kGemvLongMost - a.k) * kBits / 8;
  return launch_blocks(gemv_quant_long<T, kBits>, ceil_div(a.n, kGemvLongRows), kGemvLongWarps, bytes,
                       kGemvHalfMemory, a, GemvAlone{}, overlap, stream);
}

/// Stages of 32 KiB. Sixteen warps and one block a multiprocessor, stages of 56 KiB (a group's of up
/// to 128), where eight warps cannot hold x, and for longer rows of bytes.
template <class T, class Group>
Status launch_of(GemvArgs& a, const Group& q, bool overlap, Stream stream) {
  constexpr int kFewest = kGemvGroup<Group> ? 1 : 0;  // eights of long rows of bytes
  a.row_bytes = static_cast<int>(a.k * static_cast<long long>(a.bits) / 8);
  a.group_shift = a.group == a.k ? 30 : std::countr_zero(static_cast<unsigned>(a.group));
  const bool wide = a.k > (a.bits == 8 ? 4096 : gemv_quant_most(8)),
             two = 16 * a.row_bytes <= 32 * 1024;
  if constexpr (!kGemvGroup<Group>) {
    if (fits_once_long(a)) {
      return a.bits == 8 ? launch_long<T, 8>(a, overlap, stream) : launch_long<T, 4>(a, overlap, stream);
    }
  }
  if (fits_once(a)) {
    return a.bits == 8 ? launch_once<T, 8>(a, q, overlap, stream)
                       : launch_once<T, 4>(a, q, overlap, stream);
  }
  if (a.bits == 8) {
    return wide  ? launch<T, 8, kFewest, 16>(a, q, overlap, stream)
           : two ? launch<T, 8, 2, 8>(a, q, overlap, stream)
                 : launch<T, 8, 1, 8>(a, q, overlap, stream);
  }
  return wide  ? launch<T, 4, 1, 16>(a, q, overlap, stream)
         : two ? launch<T, 4, 2, 8>(a, q, overlap, stream)
               : launch<T, 4, 1, 8>(a, q, overlap, stream);
}

template <class Group>
Status launch_typed(GemvArgs& a, const Group& q, DType x, bool overlap, Stream stream) {
  return x == DType::bf16 ? launch_of<__nv_bfloat16>(a, q, overlap, stream)
                          : launch_of<__half>(a, q, overlap, stream);
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
  const EpilogueArgs& e = a.epilogue;
  a.plain = e.scale == 1.0f && e.bias_kind == 0 && !e.aux && !e.residual && e.activation == 0;
  a.together = a.w_pitch == a.k * static_cast<long long>(a.bits) / 8 || a.n == 1;
  return launch_typed(a, GemvAlone{}, p.x.dtype, p.overlap, stream);
}

const char* gemv_group_quant_why_not(const GemvGroup& p) {
  const int bits = weight_bits(p.w[0]);
  if (const char* why = gemv_card_why_not()) return why;
  if (p.x.dtype == DType::f32) return "x is fp32";
  if (bits == 0) return "w is not quantised";
  if (p.centred || p.turned) return "x is centred or w [K, N]";
  if (p.x.shape[0] != 1) return "more than one row of x";
  const std::int64_t k = p.x.shape[1];
  if (k == 0 || k > gemv_quant_most(16)) return "x does not fit the registers";
  if (k * bits % 128 != 0) return "rows of w are not whole 16-byte vectors";
  if (const char* why = gemv_scales_why_not(gemv_group(p), k)) return why;
  for (int i = 0; i < p.count; ++i) {
    const std::int64_t n = p.w[i].shape[0];
    if (n == 0) return "a weight has no rows";
    if (n % 8 != 0) return "quantised weights need N in eights";
    if (i + 1 < p.count && !p.gated && n % gemv_quant_rows(2) != 0) {
      return "rows of a weight are no multiple of 16";
    }
    if (!is_aligned(p.w[i].data, 0, p.w[i].dtype, 16)) return "a weight is not 16-byte aligned";
    if (!is_aligned(p.scales[i]->data, 0, p.scales[i]->dtype, 16)) {
      return "scales are not 16-byte aligned";
    }
  }
  return gemv_group_x_why_not(p);
}

Status launch_gemv_group_quant(const GemvGroup& p, Workspace, Stream stream) {
  GemvArgs a = gemv_args(p);
  return launch_typed(a, gemv_group_args(p), p.x.dtype, p.overlap, stream);
}

}  // namespace rm::cuda_ops
