// Launches of gemv_turned_sm80: how many blocks share the rows of a weight [K, N].
#include "gemv/common.hpp"
#include "gemv/kernels/gemv_turned_sm80.cuh"

namespace rm::cuda_ops {
namespace {

// Two kernels' blocks, of which a multiprocessor may have two, lie beside each other.
constexpr int kMostTurns = 12;

int aligned(std::int64_t bytes) { return static_cast<int>(ceil_div(bytes, 128) * 128); }

int split_of(std::int64_t k) {
  int split = 1;
  while (split < kTurnedSplit && ceil_div(k, split * kTurnedRows) > kMostTurns) split *= 2;
  return split;
}

template <class T>
GemvTurnedArgs turned_args(const GemvGroup& p) {
  GemvTurnedArgs a{};
  a.k = static_cast<int>(p.w[0].shape[0]), a.n = static_cast<int>(p.w[0].shape[1]);
  a.w = p.w[0].data, a.w_pitch = p.w[0].shape[1] * static_cast<std::int64_t>(sizeof(T));
  a.split = split_of(a.k);
  a.turns = static_cast<int>(ceil_div(a.k, a.split * kTurnedRows)), a.per = a.turns * kTurnedRows;
  while (a.split > 1 && (a.split - 1) * a.per >= a.k) --a.split;  // no block without rows
  const auto optional = [](const Tensor* t) { return t ? t->data : nullptr; };
  a.x = p.x.data, a.y = p.y[0].data, a.norm = optional(p.norm), a.norm_bias = optional(p.norm_bias);
  a.bias = optional(p.bias[0]), a.residual = optional(p.residual);
  a.centred = p.centred, a.activation = static_cast<int>(p.activation);
  a.eps = p.eps, a.weight_offset = p.weight_offset;
  const int row = aligned(static_cast<std::int64_t>(a.per) * sizeof(T));
  a.x_at = a.turns * kTurnedTurnBytes;
  a.norm_at = a.x_at + (a.norm ? aligned(static_cast<std::int64_t>(a.k) * sizeof(T)) : row);
  a.bias_at = a.norm_at + (a.norm ? row : 0);
  a.sums_at = a.bias_at + (a.norm_bias ? row : 0);
  return a;
}

template <class T>
int memory_of(const GemvTurnedArgs& a) {
  return a.sums_at + kTurnedWarps * kTurnedColumns<T> * 4;
}

template <class T>
Status launch(const GemvGroup& p, Stream stream) {
  const GemvTurnedArgs a = turned_args<T>(p);
  const int bytes = memory_of<T>(a);
  if (Status s = allow_shared_memory("gemv", gemv_turned<T>, bytes); !s) return s;
  const std::int64_t tiles = ceil_div(a.n, kTurnedColumns<T>);
  const Launch how{static_cast<unsigned>(tiles * a.split), kTurnedThreads,
                   static_cast<std::size_t>(bytes), static_cast<unsigned>(a.split), p.overlap};
  return rm::cuda_ops::launch("gemv", gemv_turned<T>, how, stream, a);
}

template <class T>
const char* typed_why_not(const GemvGroup& p) {
  const GemvTurnedArgs a = turned_args<T>(p);
  if (a.split > 1) {
    if (const char* why = sm90_why_not()) return why;
  }
  return shared_why_not(memory_of<T>(a));
}

}  // namespace

const char* gemv_turned_why_not(const GemvGroup& p) {
  if (!p.turned) return "w is [N, K]";
  if (const char* why = sm80_why_not()) return why;
  if (p.x.shape[0] != 1) return "more than one row of x";
  const std::int64_t k = p.x.shape[1], n = p.w[0].shape[1];
  const std::int64_t vector = 16 / size_of(p.x.dtype);
  if (k == 0 || n == 0 || k % vector != 0 || n % vector != 0) return "K or N is no multiple of 16 bytes";
  if (k > kTurnedSplit * kMostTurns * kTurnedRows || n > 1 << 24) return "K is above 6144 or N too large";
  if (!is_aligned(p.w[0].data, 0, p.w[0].dtype, 16)) return "the weight is not 16-byte aligned";
  if (const char* why = gemv_group_x_why_not(p)) return why;
  return p.x.dtype == DType::f32    ? typed_why_not<float>(p)
         : p.x.dtype == DType::bf16 ? typed_why_not<__nv_bfloat16>(p)
                                    : typed_why_not<__half>(p);
}

Status launch_gemv_turned(const GemvGroup& p, Workspace, Stream stream) {
  if (p.x.dtype == DType::f32) return launch<float>(p, stream);
  return p.x.dtype == DType::bf16 ? launch<__nv_bfloat16>(p, stream) : launch<__half>(p, stream);
}

}  // namespace rm::cuda_ops
