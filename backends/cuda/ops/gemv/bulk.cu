// Launches of gemv_bulk_sm90: how many rows of w a block takes at a time and how deep its ring is.
#include <bit>

#include "gemv/common.hpp"
#include "gemv/kernels/gemv_bulk_sm90.cuh"
#include "gemv/kernels/read_probe_sm90.cuh"

namespace rm::cuda_ops {
namespace {

/// An x up to this is loaded by the threads themselves.
constexpr int kSmallX = 33 * 1024, kResidentX = 132 * 1024;

/// Cuts the problem for `blocks` * 8 rows a tile; the number of warps, 0 where none fits.
int plan_tiles(GemvArgs& a, int blocks, int element_bits, int x_size, bool half) {
  const int memory = half ? kGemvHalfMemory : kGemvMemory;
  const int chunk = gemv_chunk(blocks), chunk_k = chunk * 8 / element_bits;
  const auto x_row = [&](std::int64_t k) {
    return static_cast<int>(ceil_div(k * x_size, 128) * 128);
  };
  a.chunks = static_cast<int>(ceil_div(a.k, chunk_k));
  a.x_smem_pitch = x_row(a.x_resident ? a.k : std::min(chunk_k, a.k));
  a.scales_at = 8 * blocks * chunk;
  a.x_at = a.scales_at;
  if (a.bits != 0) a.x_at += (chunk_k / a.group + 2) * 16 * blocks;
  a.x_at = static_cast<int>(ceil_div(a.x_at, 128) * 128);
  a.stage_bytes =
      static_cast<int>(ceil_div(a.x_at + (a.x_resident ? 0 : a.m * a.x_smem_pitch), 128) * 128);
  a.group_shift = a.group == a.k ? 30 : std::countr_zero(static_cast<unsigned>(a.group));
  const int x_bytes = a.x_resident ? a.m * a.x_smem_pitch : 0;
  for (int warps = half ? kGemvHalfWarps : kGemvMaxWarps; warps > 0; --warps) {
    a.slots = std::min(a.chunks, warps);
    a.sums_bytes = kGemvBuffers * a.slots * a.m * 8 * blocks * 4;
    if (1024 + a.sums_bytes + x_bytes + warps * a.stage_bytes > memory) continue;
    a.turn_step = warps / a.chunks, a.chunk_step = warps % a.chunks;
    return warps;
  }
  return 0;
}

template <class T, int kBits, int kBlocks>
Status launch(GemvArgs& a, bool overlap, Stream stream) {
  auto* kernel = gemv_bulk<T, kBits, kBlocks>;
  const bool half = gemv_takes_half(a.n * a.w_pitch, static_cast<std::int64_t>(a.m) * a.k * 2);
  const int warps = plan_tiles(a, kBlocks, kGemvElementBits<T, kBits>, sizeof(T), half);
  if (warps < 2) return unsupported("[gemv] gemv_bulk_sm90: its tiles do not fit shared memory");
  if (Status s = allow_shared_memory("gemv", kernel, half ? kGemvHalfMemory : kGemvMemory); !s)
    return s;
  const std::int64_t groups = ceil_div(a.n, 8 * kBlocks);
  const int bytes =
      1024 + a.sums_bytes + warps * a.stage_bytes + (a.x_resident ? a.m * a.x_smem_pitch : 0);
  return launch_weights_first(kernel,
                              std::min<std::int64_t>(groups, std::max(1, multiprocessors())),
                              warps * 32, bytes, overlap, stream, a);
}

/// 16 rows a tile where x is read along with w (its reading halves) or int4 is unpacked.
template <class T, int kBits>
Status launch_blocks(GemvArgs& a, bool overlap, Stream stream) {
  const auto x_bytes = static_cast<std::int64_t>(a.m) * a.k * static_cast<std::int64_t>(sizeof(T));
  a.x_resident = x_bytes <= kResidentX, a.x_small = x_bytes <= kSmallX;
  if (a.x_resident && kBits != 4) return launch<T, kBits, 1>(a, overlap, stream);
  return launch<T, kBits, 2>(a, overlap, stream);
}

}  // namespace

const char* gemv_card_why_not() {
  if (const char* why = sm90_why_not()) return why;
  if (card().shared_bytes > 0 && card().shared_bytes < kHopperSharedBytes) {
    return "a block of this device has less than 227 KiB of shared memory";
  }
  return nullptr;
}

const char* gemv_scales_why_not(std::int64_t group, std::int64_t k) {
  if (group != k && (group < 128 || (group & (group - 1)) != 0)) {
    return "a scale must cover a power of two of weights, at least 128, or a row";
  }
  return nullptr;
}

const char* gemv_bulk_why_not(const Gemv& p) {
  const int bits = gemv_bits(p);
  if (const char* why = gemv_card_why_not()) return why;
  if (p.x.shape[0] > kGemvMaxM) return "more than 8 rows of x";
  if (gemv_k(p) * (bits ? bits : 8 * size_of(p.x.dtype)) % 128 != 0) {
    return "rows of w are not whole 16-byte vectors";
  }
  if (!is_aligned(p.w.data, p.w.stride[0], p.w.dtype, 16)) return "w is not 16-byte aligned";
  if (!is_aligned(p.x.data, p.x.shape[0] > 1 ? p.x.stride[0] : 0, p.x.dtype, 16)) {
    return "x is not 16-byte aligned";
  }
  if (gemv_k(p) > (1 << 24) || p.w.shape[0] > (1 << 30)) return "K or N is too large";
  if (bits == 0) return nullptr;
  if (p.x.dtype == DType::f32) return "quantised weights need 16-bit x";
  if (const char* why = gemv_scales_why_not(gemv_group(p), gemv_k(p))) return why;
  if (p.w.shape[0] % 8 != 0) return "quantised weights need N in eights";
  if (!is_aligned(p.scales->data, p.scales->stride[0], p.scales->dtype, 16)) {
    return "scales are not 16-byte aligned";
  }
  return nullptr;
}

Status launch_gemv_bulk(const Gemv& p, Workspace, Stream stream) {
  GemvArgs a = gemv_args(p);
  if (p.x.dtype == DType::f32) return launch_blocks<float, 0>(a, p.overlap, stream);
  const auto with = [&](auto type) {
    using T = typename decltype(type)::type;
    if (a.bits == 8) return launch_blocks<T, 8>(a, p.overlap, stream);
    if (a.bits == 4) return launch_blocks<T, 4>(a, p.overlap, stream);
    return launch_blocks<T, 0>(a, p.overlap, stream);
  };
  return p.x.dtype == DType::bf16 ? with(Type<__nv_bfloat16>{}) : with(Type<__half>{});
}

Status read_probe(const Tensor& data, Stream stream) {
  const std::int64_t bytes = numel(data) * size_of(data.dtype);
  if (const char* why = sm90_why_not()) {
    return unsupported(std::string("[gemv] expected sm_90 or newer for the probe, but ") + why);
  }
  if (!is_contiguous(data) || bytes % kProbePiece != 0 ||
      !is_aligned(data.data, 0, data.dtype, 16)) {
    return invalid("[gemv] expected a dense aligned tensor of whole 16 KiB pieces, got another");
  }
  constexpr int kBytes = 1024 + kProbePiece * kProbeStages;
  if (Status s = allow_shared_memory("gemv", read_probe_bulk, kBytes); !s) return s;
  read_probe_bulk<<<std::max(1, multiprocessors()), 32, kBytes, stream>>>(
      static_cast<const unsigned char*>(data.data), bytes / kProbePiece);
  return launch_status("gemv");
}

}  // namespace rm::cuda_ops
