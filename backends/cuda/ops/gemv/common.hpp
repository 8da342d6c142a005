// How a gemv problem is cut for the bulk kernel, shared by its launches.
#pragma once

#include "_shim/launch_shim.hpp"
#include "gemv/api.hpp"
#include "gemv/kernels/gemv_args.hpp"

namespace rm::cuda_ops {

/// 0: w is of x's dtype; 8: int8; 4: int4.
inline int weight_bits(const Tensor& w) {
  return w.dtype == DType::i8 ? 8 : w.dtype == DType::u8 ? 4 : 0;
}
inline int gemv_bits(const Gemv& p) { return weight_bits(p.w); }
inline std::int64_t gemv_k(const Gemv& p) { return p.x.shape[1]; }
/// Weights that a scale covers.
inline std::int64_t gemv_group(const Tensor* scales, std::int64_t k) {
  return scales && scales->shape[0] > 0 ? k / scales->shape[0] : 1;
}
inline std::int64_t gemv_group(const Gemv& p) { return gemv_group(p.scales, gemv_k(p)); }
inline std::int64_t gemv_group(const GemvGroup& p) {
  return gemv_group(p.scales[0], p.x.shape[1]);
}

/// Shared memory a block takes, of the 227 KiB that gemv_bulk_why_not asks for. All of a
/// multiprocessor's: most bytes under way, and the next kernel's blocks begin to read as ours end.
/// Half of it where that holds all that a block reads: then the next kernel's tiles arrive while
/// ours are computed.
inline constexpr int kGemvMemory = kHopperSharedBytes - 1024, kGemvHalfMemory = kGemvMemory / 2;
inline constexpr int kGemvHalfWarps = 12;
/// At least, where two blocks are to lie on a multiprocessor and not three.
inline constexpr int kGemvTwoBlocksMemory = 80 * 1024;
inline bool gemv_takes_half(std::int64_t weight_bytes, std::int64_t x_bytes) {
  return weight_bytes / std::max(1, multiprocessors()) <= 96 * 1024 && x_bytes <= 12 * 1024;
}

const char* gemv_bulk_why_not(const Gemv& p);
Status launch_gemv_bulk(const Gemv& p, Workspace, Stream stream);
const char* gemv_rows_why_not(const Gemv& p);
Status launch_gemv_rows(const Gemv& p, Workspace, Stream stream);
const char* gemv_waves_why_not(const Gemv& p);
Status launch_gemv_waves(const Gemv& p, Workspace, Stream stream);
const char* gemv_group_parts_why_not(const GemvGroup& p);
Status launch_gemv_group_parts(const GemvGroup& p, Workspace, Stream stream);
const char* gemv_quant_why_not(const Gemv& p);
Status launch_gemv_quant(const Gemv& p, Workspace, Stream stream);
const char* gemv_group_quant_why_not(const GemvGroup& p);
Status launch_gemv_group_quant(const GemvGroup& p, Workspace, Stream stream);
const char* gemv_group_f32_why_not(const GemvGroup& p);
Status launch_gemv_group_f32(const GemvGroup& p, Workspace, Stream stream);
const char* gemv_turned_why_not(const GemvGroup& p);
Status launch_gemv_turned(const GemvGroup& p, Workspace, Stream stream);
const char* gemv_tensor_why_not(const Gemv& p);
Status launch_gemv_tensor(const Gemv& p, Workspace, Stream stream);
/// The launch of a row that asks for w first: early where that is allowed (Gemv::overlap).
template <class Kernel>
Status launch_weights_first(Kernel* kernel, std::int64_t blocks, int threads, int bytes,
                            bool overlap, Stream stream, const GemvArgs& a) {
  const Launch how{static_cast<unsigned>(blocks), static_cast<unsigned>(threads),
                   static_cast<std::size_t>(bytes), 1, overlap};
  return rm::cuda_ops::launch("gemv", kernel, how, stream, a);
}
GemvArgs gemv_args(const Gemv& p);
/// Of a group: x, and what its weights have in common.
GemvArgs gemv_args(const GemvGroup& p);
GemvQuantGroupArgs gemv_group_args(const GemvGroup& p);

/// Why a kernel whose blocks take much of Hopper's shared memory does not run here, or null.
const char* gemv_card_why_not();
/// Why the kernels that stream quantised weights do not take scales of such groups, or null.
const char* gemv_scales_why_not(std::int64_t group, std::int64_t k);
/// Of a group of 16 bits whose rows blocks copy: dtypes, gaps, addresses; or null.
const char* gemv_group_rows_why_not(const GemvGroup& p);
/// Of a group's x and norm: why they are not read in vectors, or null.
const char* gemv_group_x_why_not(const GemvGroup& p);

}  // namespace rm::cuda_ops
