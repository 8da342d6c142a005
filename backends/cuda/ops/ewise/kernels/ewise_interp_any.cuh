// One thread an element, the registers of the program in local memory: any program, any dtypes, any
// strides.
#pragma once

#include "_shim/launch_shim.hpp"
#include "ewise/kernels/ewise_registers.cuh"

namespace rm::cuda_ops {

__global__ void __launch_bounds__(128) ewise_interp(const __grid_constant__ EwiseArgs p) {
  overlap_begin(p.y, p.operand[0].data);
  EwiseRegister regs[kMaxOperands + kMaxInstructions];
  const std::int64_t grid = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t e = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
       e < p.total; e += grid) {
    std::int64_t at[kMaxRank];
    std::int64_t rest = e, y = 0;
    for (int d = p.rank - 1; d >= 0; --d) {
      at[d] = rest % p.shape[d];
      rest /= p.shape[d];
      y += at[d] * p.y_stride[d];
    }
    for (int o = 0; o < p.operands; ++o) {
      std::int64_t i = 0;
      for (int d = 0; d < p.rank; ++d) i += at[d] * p.operand[o].stride[d];
      regs[o] = ewise_load(p.operand[o].data, p.operand[o].dtype, i);
    }
    for (int k = 0; k < p.steps; ++k) regs[p.operands + k] = ewise_result(p.step[k], p.imm, regs);
    ewise_store(p.y, p.y_dtype, y, regs[p.operands + p.steps - 1]);
  }
}

}  // namespace rm::cuda_ops
