// Launches of gemv_tensor_sm90: the tile's form, how many warps and stages, how much memory.
#include <bit>

#include "gemv/common.hpp"
#include "gemv/kernels/gemv_tensor_sm90.cuh"

namespace rm::cuda_ops {
namespace {

constexpr int kRows = 8;  // of a tile

/// Cuts the problem; the number of warps, 0 where none fits.
int plan(GemvArgs& a, int memory, int most_warps) {
  constexpr int tile = 8192, step = 512, rows = kRows;
  a.row_bytes = static_cast<int>(a.k * static_cast<long long>(a.bits) / 8);
  a.steps = static_cast<int>(ceil_div(a.row_bytes, step));
  a.chunks = static_cast<int>(ceil_div(a.row_bytes, std::max(step, tile / rows / step * step)));
  a.chunk_bytes = a.chunks == 1
                      ? a.row_bytes
                      : static_cast<int>(ceil_div(ceil_div(a.row_bytes, a.chunks), step) * step);
  a.chunks = static_cast<int>(ceil_div(a.row_bytes, a.chunk_bytes));
  a.together = a.chunks == 1 && (a.w_pitch == a.row_bytes || a.n == 1);
  a.group_shift = a.group == a.k ? 30 : std::countr_zero(static_cast<unsigned>(a.group));
  a.x_smem_pitch = a.steps * step * 24 / a.bits;  // three digits
  // the last step may read beyond a row that is no whole number of steps
  a.scales_at = static_cast<int>(ceil_div(rows * a.chunk_bytes + step, 128) * 128);
  const long long groups = a.chunk_bytes * 8ll / a.bits / a.group + 2;
  a.stage_bytes = static_cast<int>(ceil_div(a.scales_at + groups * rows * 2, 128) * 128);
  const int x_bytes = a.x_smem_pitch + a.steps * 64;
  for (int warps = most_warps; warps > 1; --warps) {
    a.slots = std::min(a.chunks, warps);
    a.buffers = static_cast<int>(
        std::bit_ceil(static_cast<unsigned>(std::clamp(warps / a.chunks + 1, 2, kGemvBuffers))));
    a.buffer_shift = std::countr_zero(static_cast<unsigned>(a.buffers));
    a.sums_bytes = (a.chunks == 1 ? warps : a.buffers * a.slots) * rows * 32;
    a.stages_at = static_cast<int>(ceil_div(1024 + a.sums_bytes + x_bytes, 128) * 128);
    // one step behind the last stage may be read
    if (a.stages_at + warps * a.stage_bytes + step > memory) continue;
    a.chunks_inverse = 65536 / a.chunks + 1;
    a.turn_step = warps / a.chunks, a.chunk_step = warps % a.chunks;
    return warps;
  }
  return 0;
}

template <class T, int kBits>
Status launch(GemvArgs& a, bool overlap, Stream stream) {
  auto* kernel = gemv_tensor<T, kBits>;
  const bool half = gemv_takes_half(a.n * a.w_pitch, a.k * 2ll);
  const int memory = half ? kGemvHalfMemory : kGemvMemory;
  const int warps = plan(a, memory, half ? kGemvHalfWarps : gemv_tensor_warps(kBits));
  if (warps < 2) return unsupported("[gemv] gemv_tensor_sm90: its tiles do not fit shared memory");
  if (Status s = allow_shared_memory("gemv", kernel, memory); !s) return s;
  const std::int64_t groups = ceil_div(a.n, kRows);
  const std::int64_t blocks = std::min<std::int64_t>(groups, std::max(1, multiprocessors()));
  a.full_turns = static_cast<int>(groups / blocks), a.more = static_cast<int>(groups % blocks);
  return launch_weights_first(kernel, blocks, warps * 32, a.stages_at + warps * a.stage_bytes + 512,
                              overlap, stream, a);
}

template <class T>
Status launch_of(GemvArgs& a, bool overlap, Stream stream) {
  const EpilogueArgs& e = a.epilogue;
  a.plain = e.scale == 1.0f && e.bias_kind == 0 && !e.aux && !e.residual && e.activation == 0;
  return a.bits == 8 ? launch<T, 8>(a, overlap, stream) : launch<T, 4>(a, overlap, stream);
}

}  // namespace

const char* gemv_tensor_why_not(const Gemv& p) {
  if (p.x.dtype == DType::f32) return "x is fp32";
  if (const char* why = gemv_bulk_why_not(p)) return why;
  if (p.x.shape[0] != 1) return "more than one row of x";
  if (gemv_bits(p) == 0) return "w is not quantised";
  if (gemv_k(p) > 32 * 1024) return "x does not fit beside the tiles";
  return nullptr;
}

Status launch_gemv_tensor(const Gemv& p, Workspace, Stream stream) {
  GemvArgs a = gemv_args(p);
  return p.x.dtype == DType::bf16 ? launch_of<__nv_bfloat16>(a, p.overlap, stream)
                                  : launch_of<__half>(a, p.overlap, stream);
}

}  // namespace rm::cuda_ops
