// Launches of gemv_group_f32_sm90: rows of a block, pieces of a row, slots of a warp.
#include "gemv/common.hpp"
#include "gemv/kernels/gemv_group_f32_sm90.cuh"

namespace rm::cuda_ops {
namespace {

// Two blocks of kernels that follow each other share a multiprocessor.
constexpr int kMost = kGemvHalfMemory;
constexpr std::int64_t kLongest = 4ll * 32 * kGemvF32Held * kGemvF32Warps;  // of x

std::int64_t results_of(const GemvGroup& p) {
  std::int64_t n = 0;
  for (int i = 0; i < (p.gated ? 1 : p.count); ++i) n += p.w[i].shape[0];
  return n;
}

/// How a block is cut, but for its slots; they begin at slots_at, of one slot each warp.
GemvF32Args cut_of(const GemvGroup& p) {
  GemvF32Args c{};
  c.vectors = static_cast<int>(p.x.shape[1] / 4);
  c.parts = 1;
  while (c.parts * 32 * kGemvF32Held < c.vectors) c.parts *= 2, ++c.parts_shift;
  c.part = static_cast<int>(ceil_div(c.vectors, c.parts));
  c.pieces = c.parts * (p.gated ? 2 : 1), c.pieces_shift = c.parts_shift + (p.gated ? 1 : 0);
  c.per = static_cast<int>(ceil_div(results_of(p), std::max(1, multiprocessors())));
  c.slot_bytes = static_cast<int>(ceil_div(c.part * 16, 128) * 128);
  return c;
}

int slots_at(const GemvF32Args& c, int slots) {
  const std::int64_t sums = static_cast<std::int64_t>(c.per) * c.pieces * 4;
  const std::int64_t at = ceil_div(kGemvF32Scratch + 8 * kGemvF32Warps * slots + sums, 128) * 128;
  return static_cast<int>(std::min<std::int64_t>(at, 1 << 30));
}
int memory_of(const GemvF32Args& c, int slots) {
  return slots_at(c, slots) + kGemvF32Warps * slots * c.slot_bytes;
}

}  // namespace

const char* gemv_group_f32_why_not(const GemvGroup& p) {
  if (const char* why = gemv_card_why_not()) return why;
  if (p.x.dtype != DType::f32) return "x is not fp32";
  if (p.turned) return "w is [K, N]";
  if (weight_bits(p.w[0]) != 0) return "w is quantised";
  if (p.x.shape[0] != 1) return "more than one row of x";
  const std::int64_t k = p.x.shape[1];
  if (k == 0 || k % 4 != 0 || k > kLongest) return "K is no multiple of 4 up to 8192";
  for (int i = 0; i < p.count; ++i) {
    if (p.w[i].shape[0] == 0) return "a weight has no rows";
    if (p.w[i].shape[0] > 1 && p.w[i].stride[0] != k) return "rows of a weight have gaps";
    if (!is_aligned(p.w[i].data, k, p.w[i].dtype, 16)) return "a weight is not 16-byte aligned";
  }
  if (memory_of(cut_of(p), 2) > kMost) return "sums of so many rows do not fit";
  return gemv_group_x_why_not(p);
}

Status launch_gemv_group_f32(const GemvGroup& p, Workspace, Stream stream) {
  GemvArgs a = gemv_args(p);
  GemvF32Args c = cut_of(p);
  const GemvGroupArgs g = gemv_group_args(p).group;
  const auto items = static_cast<std::int64_t>(c.per) * c.pieces;
  c.slots = static_cast<int>(ceil_div(items, kGemvF32Warps));
  c.slots = std::min(c.slots, (kMost - slots_at(c, 0)) / (kGemvF32Warps * (c.slot_bytes + 8)) + 1);
  while (c.slots > 1 && memory_of(c, c.slots) > kMost) --c.slots;
  c.slots_at = slots_at(c, c.slots);
  if (Status s = allow_shared_memory("gemv", gemv_group_f32, kMost); !s) return s;
  const Launch how{static_cast<unsigned>(ceil_div(results_of(p), c.per)), 32 * kGemvF32Warps,
                   static_cast<std::size_t>(memory_of(c, c.slots)), 1, p.overlap};
  return rm::cuda_ops::launch("gemv", gemv_group_f32, how, stream, a, g, c);
}

}  // namespace rm::cuda_ops
