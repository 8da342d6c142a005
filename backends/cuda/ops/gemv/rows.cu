// Launches of gemv_rows_sm90: how many rows a tile holds, or how many tiles a row.
#include "gemv/common.hpp"
#include "gemv/kernels/gemv_rows_sm90.cuh"

namespace rm::cuda_ops {
namespace {

template <class T, int kRows>
Status launch(GemvArgs a, bool overlap, Stream stream) {
  const int row_bytes = a.k * static_cast<int>(sizeof(T));
  a.chunks = static_cast<int>(ceil_div(row_bytes, kGemvRowsTile));
  a.chunk_bytes = static_cast<int>(ceil_div(ceil_div(row_bytes, a.chunks), 512) * 512);
  a.chunks = static_cast<int>(ceil_div(row_bytes, a.chunk_bytes));
  a.x_smem_pitch = static_cast<int>(ceil_div(row_bytes, 128) * 128);
  const bool half = gemv_takes_half(static_cast<std::int64_t>(a.n) * row_bytes, row_bytes);
  const int memory = half ? kGemvHalfMemory : kGemvMemory;
  int warps = half ? kGemvHalfWarps : kGemvMaxWarps;
  for (; warps > 1; --warps) {
    a.slots = std::min(a.chunks, warps);
    a.sums_bytes = static_cast<int>(ceil_div(kGemvBuffers * a.slots * kRows * 4, 128) * 128);
    if (1024 + a.sums_bytes + a.x_smem_pitch + warps * kGemvRowsTile <= memory) break;
  }
  a.turn_step = warps / a.chunks, a.chunk_step = warps % a.chunks;
  if (Status s = allow_shared_memory("gemv", gemv_rows_bulk<T, kRows>, memory); !s) return s;
  const std::int64_t groups = ceil_div(a.n, kRows);
  return launch_weights_first(
      gemv_rows_bulk<T, kRows>, std::min<std::int64_t>(groups, std::max(1, multiprocessors())),
      warps * 32, 1024 + a.sums_bytes + a.x_smem_pitch + warps * kGemvRowsTile, overlap, stream, a);
}

}  // namespace

const char* gemv_rows_why_not(const Gemv& p) {
  if (p.x.shape[0] != 1) return "more than one row of x";
  if (p.w.dtype != DType::f32) return "w is not fp32";
  if (gemv_k(p) * size_of(p.x.dtype) > 48 * 1024) return "x does not fit beside the tiles";
  return gemv_bulk_why_not(p);
}

Status launch_gemv_rows(const Gemv& p, Workspace, Stream stream) {
  const GemvArgs a = gemv_args(p);
  const int row_bytes = a.k * static_cast<int>(sizeof(float));
  if (row_bytes <= kGemvRowsTile / 4) return launch<float, 4>(a, p.overlap, stream);
  if (row_bytes <= kGemvRowsTile / 2) return launch<float, 2>(a, p.overlap, stream);
  return launch<float, 1>(a, p.overlap, stream);
}

}  // namespace rm::cuda_ops
