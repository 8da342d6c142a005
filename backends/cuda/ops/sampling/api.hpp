// One token a row of logits: the argmax, or a draw from softmax(logits / temperature) cut as
// transformers does it: temperature, then top-k, then top-p over what top-k left.
//   order:  larger logits first, of equal ones the lower index
//   top-k:  the first k of the order; 0 = all
//   top-p:  the shortest part of the order whose probability reaches top_p (at least one token)
//   draw:   the first index at which the kept probability, summed by index, exceeds u
// Probabilities are integers in units of 2^-34 of the largest, so sums depend on no order; a token
// below that unit is never drawn. A row whose largest logit is NaN (the first one counts, as in
// torch.argmax) or infinite gives its argmax, with probability NaN.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

struct Sampling {
  Tensor logits, tokens;  // [R, V] dense rows; [R] int64
  const Tensor* probability =
      nullptr;                // [R] float32: of the token after the cuts; 1 for the argmax
  const Tensor* u = nullptr;  // [R] float32 in [0, 1)
  /// [2] int64 on the device: seed and offset of Philox 4x32-10; row r's number is the first 64
  /// bits of the block with the counter (offset, r). In a graph, add to the offset between replays.
  const Tensor* rng = nullptr;
  double temperature = 1.0, top_p = 1.0;  // temperature 0: the argmax, without u and rng
  std::int64_t top_k = 0;
};

std::span<const KernelRow<Sampling>> sampling_rows();
Status sampling(const Sampling& p, const char* kernel, Stream stream);

/// What follows from a step's tokens: rows that ended (not `open`) get `pad` where it is given, those
/// that got one of `eos` end, found[length] = tokens where there is such a row, length and every one of
/// `positions` grow by one.
struct Advance {
  Tensor tokens, found, length;       // [R], [P, R], one element: int64
  const Tensor* positions = nullptr;  // any shape, int64
  const Tensor* open = nullptr;       // [R] bool
  const Tensor* eos = nullptr;        // [E] int64, and
  const Tensor* pad = nullptr;        // one int64: only with `open`
  const Tensor* mask = nullptr;       // [R, C] int64: which positions the rows see
};

Status advance(const Advance& p, Stream stream);

}  // namespace rm::cuda_ops
