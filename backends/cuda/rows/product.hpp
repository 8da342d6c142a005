// What rows of matrix products share, whatever the weight's type: bias, residual and epilogue, leading
// axes as few rows, and how weights of 8 and 4 bits lie.
#pragma once

#include <initializer_list>

#include "rows/row.hpp"

namespace rm::cuda {

/// Rows of x that gemv takes.
inline constexpr int64_t kMostRowsOfX = 8;

/// x, the parts of the weight, y, then bias and residual where given.
struct Product {
  std::vector<Placed> tensors;
  int bias = -1, residual = -1;  // in `tensors`
  bool stable = false;           // the weight and the bias are constants
  cuda_ops::Epilogue epilogue;

  cuda_ops::Epilogue with_addresses(const cuda_ops::Tensor* t) const {
    cuda_ops::Epilogue e = epilogue;
    if (bias >= 0) e.bias = &t[bias];
    if (residual >= 0) e.residual = &t[residual];
    return e;
  }

 protected:
  /// `weight`: the operands that the weight is made of; the others by their places.
  void place_epilogue(const Operands& p, std::initializer_list<size_t> weight, size_t bias_at,
                      size_t residual_at);
  /// Leading axes of x, y and residual become rows; throws where they are not few rows of one pitch.
  void fold_few_rows();

 private:
  size_t parts_ = 1;  // of the weight
};

/// bits and group of weights that lie as GPUs read them.
struct Grouping {
  int bits, group;

  explicit Grouping(const Operands& p)
      : bits(static_cast<int>(p.attr_int("bits", 8))),
        group(static_cast<int>(p.attr_int("group", 32))) {
    if (p.attr_int("pairs", 0) == 0) throw NotForModule("the weight lies as the CPU reads it");
  }
  /// The rows of q as gemv has them, without their padding; throws where they are no rows of k.
  void strip_padding(cuda_ops::Tensor& q, int64_t k) const;
};

}  // namespace rm::cuda
