// Checks and the split of the vocabulary that forward and backward share.
#pragma once

#include "_shim/dispatch_shim.hpp"
#include "cross_entropy/api.hpp"

namespace rm::cuda_ops {

inline Status check_logits(const char* what, const Tensor& t, const Tensor& logits) {
  if (!is_float(logits.dtype) || logits.rank != 2) {
    return invalid(std::string("[cross_entropy] expected logits [R, V] of float32, bfloat16 or "
                               "float16, got ") +
                   name_of(logits.dtype) + " of rank " + std::to_string(logits.rank) +
                   "; try logits.flatten(0, -2)");
  }
  if (t.dtype != logits.dtype || !same_shape(t, logits) || !rows_of(t).valid) {
    return invalid(std::string("[cross_entropy] expected ") + what +
                   " of the logits' shape and dtype with a dense last axis, got " +
                   name_of(t.dtype) + " of rank " + std::to_string(t.rank) + "; try contiguous()");
  }
  return {};
}

inline Status check_per_row(const char* what, const Tensor& t, DType dtype, const Tensor& logits) {
  if (t.dtype == dtype && t.rank == 1 && t.shape[0] == logits.shape[0] && is_contiguous(t))
    return {};
  return invalid(std::string("[cross_entropy] expected ") + what + " dense [R = " +
                 std::to_string(logits.shape[0]) + "] of " + name_of(dtype) + ", got " +
                 name_of(t.dtype) + " of rank " + std::to_string(t.rank) + "; try one entry a row");
}

struct Split {
  int chunks;
  std::int64_t chunk;
};

/// Few rows: several blocks a row, so that the card is full; at least 4096 elements a block.
inline Split split_vocabulary(std::int64_t rows, std::int64_t n) {
  const std::int64_t wanted =
      ceil_div(8 * std::max(1, multiprocessors()), std::max<std::int64_t>(1, rows));
  const std::int64_t chunks =
      std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(1, n / 4096));
  const std::int64_t chunk = ceil_div(ceil_div(n, chunks), 8) * 8;
  return {static_cast<int>(std::max<std::int64_t>(1, ceil_div(n, chunk))),
          std::max<std::int64_t>(chunk, 8)};
}

inline const char* cross_entropy_vector_why_not(std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* t : tensors) {
    if (!is_aligned(t->data, rows_of(*t).pitch, t->dtype, 16))
      return "rows are not 16-byte aligned";
  }
  return nullptr;
}

}  // namespace rm::cuda_ops
