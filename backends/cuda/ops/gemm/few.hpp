// gemm's kernel for few rows: when it applies, how it cuts a product, and its launch.
#pragma once

#include "gemm/common.hpp"

namespace rm::cuda_ops {

const char* few_why_not(const Gemm& p);
double few_us(const Gemm& p);
Status launch_few(const Gemm& p, Workspace, Stream stream);

}  // namespace rm::cuda_ops
