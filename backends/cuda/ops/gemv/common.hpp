// How a gemv problem is cut for the bulk kernel, shared by its launches.
#pragma once

#include "_shim/dispatch_shim.hpp"
#include "gemv/api.hpp"
#include "gemv/kernels/gemv_args.hpp"

namespace rm::cuda_ops {

/// 0: w is of x's dtype; 8: int8; 4: int4.
inline int gemv_bits(const Gemv& p) {
  return p.w.dtype == DType::i8 ? 8 : p.w.dtype == DType::u8 ? 4 : 0;
}
inline std::int64_t gemv_k(const Gemv& p) { return p.x.shape[1]; }
inline std::int64_t gemv_group(const Gemv& p) {
  return p.scales && p.scales->shape[0] > 0 ? gemv_k(p) / p.scales->shape[0] : 1;
}

const char* gemv_bulk_why_not(const Gemv& p);
Status launch_gemv_bulk(const Gemv& p, Workspace, Stream stream);
GemvArgs gemv_args(const Gemv& p);

}  // namespace rm::cuda_ops
