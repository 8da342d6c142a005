// Checks that forward and backward share, and how a row is spread over threads.
#pragma once

#include "_shim/dispatch_shim.hpp"
#include "softmax/api.hpp"

namespace rm::cuda_ops {

inline Status check_softmax(const char* what, const Tensor& t, const Tensor& x) {
  if (!is_float(x.dtype) || x.rank < 1 || x.shape[x.rank - 1] > 0x7fffffff) {
    return invalid(
        std::string("[softmax] expected float32, bfloat16 or float16 of rank >= 1, got ") +
        name_of(x.dtype) + " of rank " + std::to_string(x.rank) + "; try a cast");
  }
  if (t.dtype != x.dtype || !same_shape(t, x) || !rows_of(t).valid) {
    return invalid(std::string("[softmax] expected ") + what + " of one shape and dtype (" +
                   name_of(x.dtype) + ") with a dense last axis, got " + name_of(t.dtype) +
                   " of rank " + std::to_string(t.rank) + "; try a contiguous tensor like x");
  }
  return {};
}

struct SoftmaxShape {
  bool warp;
  int per, threads;
  unsigned blocks;
};

inline SoftmaxShape softmax_shape(std::int64_t rows, std::int64_t n, DType t, bool backward) {
  const std::int64_t vectors = std::max<std::int64_t>(1, n * size_of(t) / 16);
  SoftmaxShape s{};
  const bool few =
      rows < 1024 && vectors > 32 && vectors <= 512;  // latency counts: all threads a row
  s.warp = !few && vectors <= (backward ? 128 : 256);
  if (s.warp) {
    s.per = vectors <= 32 ? 1 : vectors <= 64 ? 2 : vectors <= 128 ? 4 : 8;
    s.threads = 128;
  } else {
    s.per = few               ? 1
            : backward        ? (vectors <= 512    ? 1
                                 : vectors <= 1024 ? 2
                                                   : 4)
            : vectors <= 2048 ? 4
                              : 8;
    s.threads =
        static_cast<int>(std::min<std::int64_t>(512, ceil_div(ceil_div(vectors, s.per), 32) * 32));
  }
  const std::int64_t teams = ceil_div(rows, s.warp ? 4 : 1);
  // forward, a row a team: the blocks' scheduler balances better than a loop over rows
  const std::int64_t resident = static_cast<std::int64_t>(std::max(1, multiprocessors())) *
                                (s.warp ? 16 : std::max(1, 2048 / s.threads));
  const std::int64_t most = backward ? resident : std::int64_t{1} << 30;
  s.blocks = static_cast<unsigned>(std::clamp<std::int64_t>(teams, 1, most));
  return s;
}

inline const char* softmax_vector_why_not(std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* t : tensors) {
    if (!is_aligned(t->data, rows_of(*t).pitch, t->dtype, 16))
      return "rows are not 16-byte aligned";
    const std::int64_t bytes = t->shape[t->rank - 1] * size_of(t->dtype);
    if (bytes % 16 != 0) return "rows are not whole vectors";
    if (bytes > 64 * 1024) return "the row does not fit a block's registers (64 KiB)";
  }
  return nullptr;
}

/// Forward rows wait as packs, so a thread takes many; backward holds two rows as fp32 values.
/// fn(bool_constant<warp>, integral_constant<per>) for the shape.
template <class Fn>
void dispatch_softmax(const SoftmaxShape& s, Fn&& fn) {
  dispatch_at_least<1, 2, 4, 8>(s.per, [&](auto per) {
    s.warp ? fn(std::true_type{}, per) : fn(std::false_type{}, per);
    return 0;
  });
}

inline double softmax_cost(const Tensor& x, int passes) {
  return move_us(static_cast<double>(numel(x)) * size_of(x.dtype) * passes);
}

}  // namespace rm::cuda_ops
