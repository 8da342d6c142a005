// One optimiser step over many tensors at once, in place, as torch.optim defines it:
//   sgd:   g += weight_decay p; m = momentum m + g; p -= lr (nesterov: g + momentum m, else m)
//   adam:  g += weight_decay p;  adamw: p -= lr weight_decay p; then for both
//          m, v: running means of g and g^2; p -= lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) +
//          eps)
// Arithmetic in fp32, each tensor rounded once.
#pragma once

#include <vector>

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

enum class Optimiser : int { sgd, adam, adamw };

/// Dense tensors of one size; param and grad of one dtype, m and v of it or float32.
struct OptimTensors {
  Tensor param, grad;
  const Tensor* m = nullptr;  // sgd: the momentum buffer, null without momentum
  const Tensor* v = nullptr;  // adam, adamw
};

struct Optim {
  Optimiser kind = Optimiser::adamw;
  std::vector<OptimTensors> tensors;  // of one dtype
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, momentum = 0;
  bool nesterov = false;
  std::int64_t step = 1;                // t, from 1
  const Tensor* device_step = nullptr;  // [1] int64 or float32: t from the device, for graphs
};

std::span<const KernelRow<Optim>> optim_rows();
Status optim(const Optim& p, const char* kernel, Stream stream);

}  // namespace rm::cuda_ops
