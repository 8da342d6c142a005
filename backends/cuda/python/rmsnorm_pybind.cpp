// rm_abstract.ops._ops_rmsnorm
#include "norm_module.hpp"

PYBIND11_MODULE(_ops_rmsnorm, m) {
  m.doc() =
      "Root-mean-square normalisation over the last axis on CUDA, a residual fused, with "
      "gradients.";
  rm::ops_bindings::add_norm(m, rm::cuda_ops::Norm::rms, "rmsnorm");
}
