// Launches of gemv_group_parts_sm90: how many blocks share a row of w.
#include "gemv/common.hpp"
#include "gemv/kernels/gemv_parts_sm90.cuh"

namespace rm::cuda_ops {
namespace {

/// Bytes of a block's part of a row: its warps hold eight steps of 64 bytes of x each.
constexpr int kMostPart = 8 * 64 * kGemvWavesWarps;

int parts_of(int row_bytes) {
  int parts = 2;
  while (parts < kGemvMostParts && ceil_div(row_bytes, parts) > kMostPart) parts *= 2;
  return parts;
}

/// Clusters of such blocks that run at once on this thread's device.
template <class Kernel>
int clusters_of(Kernel* kernel, const Launch& how) {
  thread_local int known_device = -1, known = 0;
  thread_local std::size_t known_shared = 0;
  thread_local unsigned known_cluster = 0;
  const int device = card().device;
  if (known_device != device || known_shared != how.shared || known_cluster != how.cluster) {
    known = clusters_at_once(kernel, how);
    known_device = device, known_shared = how.shared, known_cluster = how.cluster;
  }
  return known;
}

template <class T>
Status launch_of(GemvArgs a, const GemvGroupArgs& g, bool overlap, Stream stream) {
  auto* kernel = gemv_group_parts<T>;
  a.row_bytes = a.k * 2;
  GemvPartsArgs cut{};
  cut.parts = parts_of(a.row_bytes);
  cut.part_bytes = static_cast<int>(ceil_div(ceil_div(a.row_bytes, cut.parts), 128) * 128);
  a.stages_at = static_cast<int>(ceil_div(kGemvPartsFront, 128) * 128);
  a.stage_bytes = kGemvPartsRows * cut.part_bytes;
  a.stages = a.stage_bytes <= kGemvWavesSmall ? kGemvWavesStages : 1;
  const int bytes = std::max(kGemvTwoBlocksMemory, a.stages_at + a.stages * a.stage_bytes + 512);
  if (Status s = allow_shared_memory("gemv", kernel, kGemvHalfMemory); !s) return s;
  const auto cluster = static_cast<unsigned>(cut.parts);
  Launch how{cluster, kGemvWavesWarps * 32, static_cast<std::size_t>(bytes), cluster, overlap};
  const std::int64_t clusters =
      std::min<std::int64_t>(ceil_div(a.n, kGemvPartsRows), clusters_of(kernel, how));
  if (clusters < 1) return unsupported("[gemv_group] gemv_group_parts_sm90: no cluster of its blocks fits this device");
  how.blocks = static_cast<unsigned>(clusters) * cluster;
  return rm::cuda_ops::launch("gemv", kernel, how, stream, a, cut, g);
}

}  // namespace

const char* gemv_group_parts_why_not(const GemvGroup& p) {
  if (const char* why = gemv_group_rows_why_not(p)) return why;
  if (p.centred) return "several rows of x are centred";
  const std::int64_t m = p.x.shape[0], k = p.x.shape[1];
  if (m < 3) return "fewer than 3 rows of x";
  if (k < 1024) return "rows of w are shorter than 1024";
  if (k * 2 > std::int64_t{kGemvMostParts} * kMostPart) return "a block's part of a row is more than 4 KiB";
  return nullptr;
}

Status launch_gemv_group_parts(const GemvGroup& p, Workspace, Stream stream) {
  const GemvArgs a = gemv_args(p);
  const GemvGroupArgs g = gemv_group_args(p).group;
  return p.x.dtype == DType::bf16 ? launch_of<__nv_bfloat16>(a, g, p.overlap, stream)
                                  : launch_of<__half>(a, g, p.overlap, stream);
}

}  // namespace rm::cuda_ops
