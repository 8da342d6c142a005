// Steps that a device does in one kernel become one step: patterns over the list, where layouts are
// known and a kernel can be asked for. A list whose kernels know none of it stays as it is.
#pragma once

#include <functional>

#include "plan/steps.hpp"

namespace rm::plan {

/// Whether some kernel of the device does this step of a list with these buffers.
using Served = std::function<bool(const std::vector<Buffer>&, const Step&)>;

/// Products of one row with several constant weights, gated products, and the norm before them:
/// `linears`, or `quant_linears` where weights are quantised. Results are those of the steps, rounded
/// less often.
void fuse_products(StepList& list, const Served& served);

/// Rotated queries and keys, the cache's update and attention over what it then holds:
/// `append_sdpa`.
void fuse_attention(StepList& list, const Served& served);

/// Small elementwise steps in those that read them, if those are small elementwise steps alone.
void fuse_small_ewise(StepList& list, const Served& served);

/// A product whose only reader is an element-wise step, and that step: `gemm_ewise`.
void fuse_programs(StepList& list, const Served& served);

/// Products of transposed left operands and sums of those operands' columns, as slopes of weights and
/// biases are: `slopes`. All of one step run where the last of them did.
void fuse_slopes(StepList& list, const Served& served);

/// Steps over few elements that follow each other, as losses are: `small_steps`.
void fuse_small(StepList& list, const Served& served);

/// Updates by Adam of several parameters with the same numbers: `adams`.
void fuse_updates(StepList& list, const Served& served);

}  // namespace rm::plan
