// Host-side preparation of ewise launches: legality, collapsed axes, and the chain kernel's steps.
#pragma once

#include "_shim/dispatch_shim.hpp"
#include "ewise/api.hpp"
#include "ewise/kernels/ewise_args.hpp"

namespace rm::cuda_ops {

/// Registers exist, opcodes are known and of a class that has them, shapes agree, limits hold.
Status check_ewise(const Ewise& p);

/// Shapes, strides and steps with adjacent axes merged where every tensor allows it.
EwiseArgs interp_args(const Ewise& p);

/// The chain kernel's arguments, elements of a vector and bytes of shared memory; null on success,
/// else why the chain kernel cannot run it.
const char* chain_args(const Ewise& p, EwiseChainArgs* out, int* vector, int* bytes);

/// n / d by a multiplication: floor(n magic / 2^(32 + shift)), exact for n < 2^31, 1 < d < 2^31.
void division_by(std::int64_t d, std::uint32_t* divisor, std::uint32_t* magic,
                 std::uint32_t* shift);

const char* fused_why_not(const Ewise& p);
Status launch_fused(const Ewise& p, Workspace, Stream stream);

const char* direct_why_not(const Ewise& p);
Status launch_direct(const Ewise& p, Workspace, Stream stream);

}  // namespace rm::cuda_ops
