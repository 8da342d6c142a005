// The row of sdpa for up to 128 keys.
#include "sdpa/kernels/sdpa_short_sm80.cuh"

#include "sdpa/common.hpp"

namespace rm::cuda_ops {

const char* short_why_not(const Sdpa& p) {
  if (p.q.shape[3] != kShortDim) return "the head dim is not 64";
  if (p.k.shape[2] > kShortKeys) return "more than 128 keys";
  return tensor_why_not(p, kShortDim);
}

/// One turn of blocks: more were not measured, and are left to rows whose blocks share their keys.
double short_us(const Sdpa& p) {
  const std::int64_t blocks = p.q.shape[0] * p.q.shape[1] * ceil_div(p.q.shape[2], kShortRows);
  return blocks <= std::max(1, multiprocessors()) ? 6 : 100.0 + static_cast<double>(blocks);
}

Status launch_short(const Sdpa& p, Workspace, Stream stream) {
  const SdpaArgs a = args_of(p);
  const dim3 grid(static_cast<unsigned>(ceil_div(a.rows, kShortRows)),
                  static_cast<unsigned>(a.batch * a.heads));
  return with_type(p, [&](auto type) {
    return launch_overlapped("sdpa", sdpa_short<typename decltype(type)::type>, grid, 128, 0,
                             stream, a);
  });
}

}  // namespace rm::cuda_ops
