// The operator adam of docs/operators.md for one parameter, and for several in one launch (adams):
// one step of Adam or AdamW whose numbers lie on the device, so a graph may be launched again with
// others. Results may lie exactly where their operands do.
#pragma once

#include <vector>

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

enum class AdamDecay : int { none, gradient, parameter };

/// float32, dense, of one size. `largest` is AMSGrad's: of all parameters or of none.
struct AdamTensors {
  Tensor p, g, m, v, largest;
  Tensor new_p, new_m, new_v, new_largest;
};

struct AdamUpdate {
  std::vector<AdamTensors> tensors;
  Tensor numbers;   // float32 [8], docs/operators.md
  Tensor apply;     // bool [], where there is one: false leaves everything as it is
  bool has_largest = false, has_apply = false, maximize = false;
  AdamDecay decay = AdamDecay::none;
};

std::span<const KernelRow<AdamUpdate>> adam_update_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const AdamUpdate& p);
Status adam_update(const AdamUpdate& p, const char* kernel, Stream stream);

}  // namespace rm::cuda_ops
