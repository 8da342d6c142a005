// rm_abstract.ops._ops_layernorm
#include "norm_module.hpp"

PYBIND11_MODULE(_ops_layernorm, m) {
  m.doc() = "Layer normalisation over the last axis on CUDA, a residual fused, with gradients.";
  rm::ops_bindings::add_norm(m, rm::cuda_ops::Norm::layer, "layernorm");
}
