// The table of sampling: checks, choice and launches.
#include <cfloat>
#include <cmath>

#include "_shim/alias_shim.hpp"
#include "_shim/launch_shim.hpp"
#include "sampling/api.hpp"
#include "sampling/kernels/sampling_argmax_any.cuh"
#include "sampling/kernels/sampling_draw_any.cuh"

namespace rm::cuda_ops {
namespace {

std::int64_t most_per(DType t) { return size_of(t) == 2 ? kSamplingPerHalf : kSamplingPer; }
inline constexpr std::int64_t kRowsAcross = 32768;  // rows along the grid's second axis

SamplingArgs args_of(const Sampling& p, std::int64_t blocks) {
  SamplingArgs a{};
  const Rows rows = rows_of(p.logits);
  a.logits = p.logits.data, a.tokens = static_cast<std::int64_t*>(p.tokens.data);
  if (p.probability) a.probability = static_cast<float*>(p.probability->data);
  if (p.u) a.u = static_cast<const float*>(p.u->data);
  if (p.rng) a.rng = static_cast<const std::int64_t*>(p.rng->data);
  a.rows = rows.rows, a.pitch = rows.pitch, a.n = static_cast<int>(rows.n);
  const std::int64_t vector = 16 / size_of(p.logits.dtype);
  const std::int64_t per = ceil_div(ceil_div(rows.n, blocks * kSamplingThreads), vector) * vector;
  a.per = static_cast<int>(std::min(per, most_per(p.logits.dtype)));
  a.top_k = p.top_k, a.top_p = p.top_p;
  if (p.temperature > 0) {
    // not infinite: the largest logit minus itself times this is 0
    a.scale = static_cast<float>(
        std::clamp<double>(1.4426950408889634 / p.temperature, FLT_MIN, FLT_MAX));
  }
  a.vectors = is_aligned(p.logits.data, rows.rows > 1 ? rows.pitch : 0, p.logits.dtype, 16);
  return a;
}

dim3 grid_of(std::int64_t blocks, std::int64_t rows) {
  return {static_cast<unsigned>(blocks), static_cast<unsigned>(std::min(rows, kRowsAcross)),
          static_cast<unsigned>(ceil_div(rows, kRowsAcross))};
}

/// As few as hold the row, more while multiprocessors are idle and each block has enough to do.
std::int64_t blocks_of(const Sampling& p) {
  const Rows rows = rows_of(p.logits);
  std::int64_t blocks = 1;
  while (blocks < kSamplingBlocks &&
         (blocks * kSamplingThreads * most_per(p.logits.dtype) < rows.n ||
          (2 * blocks * rows.rows <= multiprocessors() && rows.n >= 8192 * blocks))) {
    blocks *= 2;
  }
  return blocks;
}

template <class Kernel>
Status launch_row_clusters(Kernel* kernel, const SamplingArgs& a, std::int64_t blocks, int threads,
                           std::size_t shared, bool overlap, Stream stream) {
  if (Status s = allow_shared_memory("sampling", kernel, static_cast<int>(shared)); !s) return s;
  const Launch how{grid_of(blocks, a.rows), static_cast<unsigned>(threads), shared,
                   static_cast<unsigned>(blocks), overlap};
  return launch("sampling", kernel, how, stream, a);
}

/// As many as leave two blocks a multiprocessor, each with two vectors a thread.
std::int64_t argmax_blocks(const Sampling& p) {
  const Rows rows = rows_of(p.logits);
  const std::int64_t least = 2 * kArgmaxThreads * 16 / size_of(p.logits.dtype);
  std::int64_t blocks = 1;
  while (blocks < kSamplingBlocks && blocks * rows.rows <= multiprocessors() &&
         rows.n >= 2 * least * blocks) {
    blocks *= 2;
  }
  return blocks;
}

Status launch_cluster(const Sampling& p, Workspace, Stream stream) {
  const std::int64_t blocks = blocks_of(p);
  const SamplingArgs a = args_of(p, blocks);
  const std::size_t held =
      static_cast<std::size_t>(kSamplingPitch) * a.per * size_of(p.logits.dtype);
  return dispatch_float(p.logits.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (a.scale == 0.0f && a.vectors) {
      return launch_row_clusters(sample_largest<T>, a, argmax_blocks(p), kArgmaxThreads, 0, true,
                                 stream);
    }
    return launch_row_clusters(sample_rows<T, SamplingOver::held>, a, blocks, kSamplingThreads,
                               sizeof(SamplingShared) + held, false, stream);
  });
}

Status launch_any(const Sampling& p, Workspace, Stream stream) {
  const SamplingArgs a = args_of(p, 1);
  return dispatch_float(p.logits.dtype, [&](auto type) -> Status {
    const auto kernel = sample_rows<typename decltype(type)::type, SamplingOver::memory>;
    if (Status s = allow_shared_memory("sampling", kernel, sizeof(SamplingShared)); !s) return s;
    kernel<<<grid_of(1, a.rows), kSamplingThreads, sizeof(SamplingShared), stream>>>(a);
    return launch_status("sampling");
  });
}

const char* cluster_why_not(const Sampling& p) {
  if (p.logits.shape[1] > kSamplingThreads * kSamplingPer * kSamplingBlocks) {
    return "a row has more than 262144 elements";
  }
  return sm90_why_not();
}

double row_us(const Sampling& p, int passes) {
  return move_us(passes * static_cast<double>(numel(p.logits)) * size_of(p.logits.dtype));
}

constexpr KernelRow<Sampling> kRows[] = {
    {"sampling_cluster_sm90", "rows of up to 262144 logits, in the shared memory of 1 to 8 blocks",
     cluster_why_not, [](const Sampling& p) { return row_us(p, 1); }, launch_cluster},
    {"sampling_radix_any", "any row, read again in each pass",
     [](const Sampling&) -> const char* { return nullptr; },
     [](const Sampling& p) { return row_us(p, 20); }, launch_any},
};

Status check(const Sampling& p) {
  const Tensor& x = p.logits;
  if (x.rank != 2 || !is_float(x.dtype) || !rows_of(x).valid || x.shape[1] < 1 ||
      x.shape[1] > 1 << 24 || x.shape[0] > 0x7fffffff) {
    return invalid(
        "[sampling] expected logits [R, V] of float32, bfloat16 or float16, dense rows of 1 to "
        "2^24, "
        "got " +
        std::string(name_of(x.dtype)) + " of rank " + std::to_string(x.rank));
  }
  const auto vector = [](const Tensor& t, DType type, std::int64_t n) {
    return t.rank == 1 && t.dtype == type && t.shape[0] == n && is_contiguous(t);
  };
  if (!vector(p.tokens, DType::i64, x.shape[0])) {
    return invalid("[sampling] expected tokens [R] of int64, dense, got " +
                   std::string(name_of(p.tokens.dtype)) + " of rank " +
                   std::to_string(p.tokens.rank));
  }
  if (p.probability && !vector(*p.probability, DType::f32, x.shape[0])) {
    return invalid("[sampling] expected probability [R] of float32, dense, got another");
  }
  if (!(p.temperature >= 0) || !(p.top_p > 0) || p.top_k < 0) {
    return invalid("[sampling] expected temperature >= 0, top_p > 0 and top_k >= 0, got others");
  }
  const bool u = p.u && vector(*p.u, DType::f32, x.shape[0]);
  const bool rng = p.rng && vector(*p.rng, DType::i64, 2);
  if (p.temperature > 0 && (u == rng || (p.u && !u) || (p.rng && !rng))) {
    return invalid(
        "[sampling] expected u [R] of float32 or rng [2] of int64, dense, at a temperature above "
        "0, "
        "got neither, both or another");
  }
  return check_memory("sampling", {{"tokens", &p.tokens}, {"probability", p.probability}},
                      {{"logits", &p.logits}, {"u", p.u}, {"rng", p.rng}});
}

}  // namespace

std::span<const KernelRow<Sampling>> sampling_rows() { return kRows; }

Status sampling(const Sampling& p, const char* kernel, Stream stream) {
  if (Status s = check(p); !s) return s;
  if (p.logits.shape[0] == 0) return {};
  const KernelRow<Sampling>* row = nullptr;
  if (Status s = select_row<Sampling>("sampling", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
