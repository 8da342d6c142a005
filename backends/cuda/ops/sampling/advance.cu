// The end of a step of generation: what follows from the chosen tokens, in one launch. It starts only
// after all before it has ended, so kernels of the next step in the same graph may read early what
// this one's kernels wrote.
#include "_shim/alias_shim.hpp"
#include "_shim/dispatch_shim.hpp"
#include "sampling/api.hpp"

namespace rm::cuda_ops {
namespace {

constexpr int kThreads = 256;

struct AdvanceArgs {
  std::int64_t *tokens, *found, *length, *positions, *mask;
  const std::int64_t *eos, *pad;
  bool* open;
  std::int64_t rows, places, counts, columns;
  int ends;
};

/// One block: every row's token is written before the length becomes the next step's.
__global__ void __launch_bounds__(kThreads) advance_rows(const AdvanceArgs p) {
  const std::int64_t at = *p.length;
  for (std::int64_t r = threadIdx.x; r < p.rows; r += kThreads) {
    std::int64_t token = p.tokens[r];
    if (p.open != nullptr) {
      bool goes_on = p.open[r];
      if (!goes_on && p.pad != nullptr) token = *p.pad;
      for (int e = 0; e < p.ends; ++e) goes_on = goes_on && token != p.eos[e];
      p.open[r] = goes_on, p.tokens[r] = token;
    }
    if (at >= 0 && at < p.places) p.found[at * p.rows + r] = token;
    if (at >= -1 && at + 1 < p.columns) p.mask[r * p.columns + at + 1] = 1;
  }
  for (std::int64_t i = threadIdx.x; i < p.counts; i += kThreads) p.positions[i] += 1;
  __syncthreads();
  if (threadIdx.x == 0) *p.length = at + 1;
}

bool is_dense(const Tensor& t, DType type) { return t.dtype == type && is_contiguous(t); }

Status wrong(const char* what) {
  return invalid(text_of({"[advance] expected ", what, ", got another"}));
}

}  // namespace

Status advance(const Advance& p, Stream stream) {
  const std::int64_t rows = numel(p.tokens);
  if (p.tokens.rank != 1 || !is_dense(p.tokens, DType::i64)) return wrong("tokens [R] of int64, dense");
  if (p.found.rank != 2 || p.found.shape[1] != rows || !is_dense(p.found, DType::i64)) {
    return wrong("found [P, R] of int64, dense");
  }
  if (numel(p.length) != 1 || p.length.dtype != DType::i64) return wrong("a length of one int64");
  if (p.positions && !is_dense(*p.positions, DType::i64)) return wrong("positions of int64, dense");
  if (p.open && (numel(*p.open) != rows || !is_dense(*p.open, DType::boolean))) {
    return wrong("open [R] of bool, dense");
  }
  if (p.eos && (!p.open || p.eos->rank != 1 || !is_dense(*p.eos, DType::i64))) {
    return wrong("eos [E] of int64, dense, only with open");
  }
  if (p.pad && (!p.open || numel(*p.pad) != 1 || p.pad->dtype != DType::i64)) {
    return wrong("a pad of one int64, only with open");
  }
  if (p.mask && (p.mask->rank != 2 || p.mask->shape[0] != rows || !is_dense(*p.mask, DType::i64))) {
    return wrong("a mask [R, C] of int64, dense");
  }
  if (Status s = check_memory("advance",
                              {{"tokens", &p.tokens},
                               {"found", &p.found},
                               {"length", &p.length},
                               {"positions", p.positions},
                               {"open", p.open},
                               {"mask", p.mask}},
                              {{"eos", p.eos}, {"pad", p.pad}});
      !s) {
    return s;
  }
  AdvanceArgs a{};
  a.tokens = static_cast<std::int64_t*>(p.tokens.data);
  a.found = static_cast<std::int64_t*>(p.found.data);
  a.length = static_cast<std::int64_t*>(p.length.data);
  a.rows = rows, a.places = p.found.shape[0];
  if (p.positions) {
    a.positions = static_cast<std::int64_t*>(p.positions->data), a.counts = numel(*p.positions);
  }
  if (p.mask) {
    a.mask = static_cast<std::int64_t*>(p.mask->data), a.columns = p.mask->shape[1];
  }
  if (p.open) a.open = static_cast<bool*>(p.open->data);
  if (p.pad) a.pad = static_cast<const std::int64_t*>(p.pad->data);
  if (p.eos) {
    a.eos = static_cast<const std::int64_t*>(p.eos->data);
    a.ends = static_cast<int>(numel(*p.eos));
  }
  if (Status s = earlier_error("advance"); !s) return s;
  advance_rows<<<1, kThreads, 0, stream>>>(a);
  return launch_status("advance");
}

}  // namespace rm::cuda_ops
