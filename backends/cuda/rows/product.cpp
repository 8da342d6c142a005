#include "rows/product.hpp"

#include <algorithm>

#include "quant/api.hpp"

namespace rm::cuda {

using cuda_ops::Tensor;

void Product::place_epilogue(const Operands& p, std::initializer_list<size_t> weight,
                             size_t bias_at, size_t residual_at) {
  parts_ = weight.size();
  stable = std::all_of(weight.begin(), weight.end(), [&](size_t i) { return p.is_constant(i); }) &&
           (!p.has_input(bias_at) || p.is_constant(bias_at));
  const auto place = [&](size_t index) {
    if (!p.has_input(index)) return -1;
    tensors.push_back({p.input(index), index, false});
    return static_cast<int>(tensors.size()) - 1;
  };
  bias = place(bias_at), residual = place(residual_at);
  epilogue.bias_kind = bias >= 0 ? cuda_ops::BiasKind::column : cuda_ops::BiasKind::none;
  epilogue.activation = activation_of(p.attr_string("activation", "none"));
}

void Product::fold_few_rows() {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool of_weight = i >= 1 && i <= parts_;
    if (of_weight || static_cast<int>(i) == bias) continue;
    Tensor& t = tensors[i].tensor;
    if (!cuda_ops::fold_rows(t)) throw NotForModule("rows are not of one pitch");
    if (t.shape[0] > kMostRowsOfX || t.shape[0] < 1) throw NotForModule("not 1 to 8 rows");
  }
}

void Grouping::strip_padding(Tensor& q, int64_t k) const {
  // The module divides a row evenly among its scales.
  if (k % group != 0 && k > group) throw NotForModule("the last group is short");
  if (q.rank != 2 || q.shape[1] != cuda_ops::quant_padded(k) * bits / 8 || !cuda_ops::is_contiguous(q)) {
    throw NotForModule("the weight has gaps");
  }
  q.stride[0] = q.shape[1];  // also of a single row
  q.shape[1] = bits == 8 ? k : (k + 1) / 2;
}

}  // namespace rm::cuda
