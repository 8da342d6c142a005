// The gradient table of layer_norm and rms_norm. dweight and dbias are summed in a fixed order.
#include "_shim/alias_shim.hpp"
#include "norm/common.hpp"
#include "norm/kernels/norm_backward_ring_sm90.cuh"
#include "norm/kernels/norm_backward_sm80.cuh"
#include "norm/kernels/norm_naive_any.cuh"
#include "norm/kernels/norm_vector_sm80.cuh"

namespace rm::cuda_ops {
namespace {

bool wants_columns(const NormBackward& p) { return p.dweight || p.dbias; }

NormBackwardArgs args_of(const NormBackward& p, Workspace workspace) {
  NormBackwardArgs a{};
  const Rows h = rows_of(p.h);
  a.dy = p.dy.data, a.h = p.h.data, a.dx = p.dx.data;
  a.rows = h.rows, a.n = static_cast<int>(h.n);
  a.dy_pitch = rows_of(p.dy).pitch, a.h_pitch = h.pitch, a.dx_pitch = rows_of(p.dx).pitch;
  if (p.weight) a.weight = p.weight->data;
  if (p.dsum) a.dsum = p.dsum->data, a.dsum_pitch = rows_of(*p.dsum).pitch;
  if (p.dweight) a.dweight = p.dweight->data;
  if (p.dbias) a.dbias = p.dbias->data;
  if (wants_columns(p)) a.partial = static_cast<float*>(workspace.data);
  a.eps = p.eps, a.weight_offset = p.weight_offset;
  return a;
}

const char* vector_why_not(const NormBackward& p) {
  if (!fits_registers(p.h)) return "the row does not fit a block's registers (32 KiB)";
  for (const Tensor* t : {&p.h, &p.dy, &p.dx, p.dsum}) {
    if (t && !vector_ready(*t)) return "rows are not 16-byte aligned";
  }
  if (p.h.shape[p.h.rank - 1] * size_of(p.h.dtype) % 16 != 0) return "rows are not whole vectors";
  if (p.weight && !is_aligned(p.weight->data, 0, p.h.dtype, 16)) return "weight is not aligned";
  return nullptr;
}

const char* teams_why_not(const NormBackward& p) {
  if (p.h.shape[p.h.rank - 1] * size_of(p.h.dtype) > 16 * 1024) {
    return "the row does not fit a team's registers (16 KiB)";
  }
  return vector_why_not(p);
}

double vector_cost(const NormBackward& p) {
  return move_us(static_cast<double>(numel(p.h)) * size_of(p.h.dtype) * (3 + (p.dsum ? 1 : 0)));
}

/// The columns' sums begin to start while the last rows' kernel ends.
template <class T>
Status launch_columns(const NormBackward& p, const NormBackwardArgs& a, std::int64_t shares,
                      Stream stream) {
  return launch_overlapped(name_of(p.kind), norm_columns_vector<T>,
                           static_cast<unsigned>(ceil_div(a.n, 32)), dim3(32, 32), 0, stream, a,
                           static_cast<int>(shares));
}

Status launch_vector(const NormBackward& p, Workspace workspace, Stream stream) {
  const NormBackwardArgs a = args_of(p, workspace);
  const NormTeams s = norm_long_rows(a.rows, a.n, p.h.dtype);
  return dispatch_float(p.h.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    auto* kernel =
        p.kind == Norm::rms ? norm_backward_vector<T, true, 4> : norm_backward_vector<T, false, 4>;
    const Status st = launch_overlapped(name_of(p.kind), kernel, static_cast<unsigned>(s.blocks),
                                        s.warps * 32, 0, stream, a);
    if (!st || !wants_columns(p)) return st;
    return launch_columns<T>(p, a, s.blocks, stream);
  });
}

template <class T, bool kRms, int kPer>
Status launch_teams_per(const NormBackward& p, const NormBackwardArgs& a, const NormTeams& s,
                        Stream stream) {
  auto* kernel = norm_backward_teams<T, kRms, kPer>;
  const int threads = s.teams * s.warps * 32, bytes = a.partial ? threads * kPer * kVec<T> * 8 : 0;
  if (Status st = allow_shared_memory(name_of(p.kind), kernel, 64 * 1024); !st) return st;
  return launch_overlapped(name_of(p.kind), kernel, static_cast<unsigned>(s.blocks), threads, bytes,
                           stream, a, s.warps, s.teams);
}

template <class T, bool kRms>
Status launch_teams_kind(const NormBackward& p, const NormBackwardArgs& a, Stream stream) {
  const NormTeams s = norm_teams(a.rows, a.n, p.h.dtype);
  const Status st = s.per == 1 ? launch_teams_per<T, kRms, 1>(p, a, s, stream)
                               : launch_teams_per<T, kRms, 2>(p, a, s, stream);
  if (!st || !wants_columns(p)) return st;
  return launch_columns<T>(p, a, s.blocks, stream);
}

Status launch_teams(const NormBackward& p, Workspace workspace, Stream stream) {
  const NormBackwardArgs a = args_of(p, workspace);
  return dispatch_float(p.h.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return p.kind == Norm::rms ? launch_teams_kind<T, true>(p, a, stream)
                               : launch_teams_kind<T, false>(p, a, stream);
  });
}

/// Vectors a thread: more warps a block, or fewer instructions a row.
int ring_per(std::int64_t vectors) { return vectors <= 256 ? 1 : 2; }

RingPlan ring_plan(std::int64_t n) {
  const std::int64_t vectors = std::max<std::int64_t>(1, n / 8);
  const int per = ring_per(vectors);
  RingPlan plan{};
  plan.warps = static_cast<int>(ceil_div(vectors, 32 * per));
  plan.teams = std::min(norm_ring_threads(per) / 32 / plan.warps, 15);
  plan.pitch = static_cast<int>(ceil_div(vectors * 16, 128) * 128);
  plan.stages =
      std::min(per == 1 ? 3 : 2, (kRingMemory - kRingHead) / (plan.teams * 2 * plan.pitch));
  return plan;
}

/// Blocks of a cluster whose columns join before they go to memory: two where that pays and all
/// blocks still run at once.
template <class Kernel>
int ring_ranks(Kernel* kernel, std::int64_t n, std::int64_t blocks, int threads, int shared) {
  if (n <= 4096) return 1;
  thread_local int known_device = -1, fitting = 0;  // blocks at once in clusters of two
  if (const int device = card().device; device != known_device) {
    known_device = device;
    fitting = 2 * clusters_at_once(kernel, {2u, static_cast<unsigned>(threads),
                                            static_cast<std::size_t>(shared), 2u});
  }
  return ceil_div(blocks, 2) * 2 <= fitting ? 2 : 1;
}

std::int64_t ring_blocks(std::int64_t rows, std::int64_t n) {
  const int teams = n > 8192 ? 1 : ring_plan(n).teams;  // longer rows take another kernel
  const std::int64_t all = ceil_div(rows, teams);  // balanced: as few blocks as as many turns need
  return std::max<std::int64_t>(1, ceil_div(all, ceil_div(all, std::max(1, multiprocessors()))));
}

const char* ring_why_not(const NormBackward& p) {
  if (size_of(p.h.dtype) != 2) return "rows are not of 16-bit values";
  if (const char* why = vector_why_not(p)) return why;
  const std::int64_t n = p.h.shape[p.h.rank - 1];
  if (n > 8192 || n < 512) return "rows are not of 512 to 8192 values";
  if (const char* why = sm90_why_not()) return why;
  return card().shared_bytes > 0 && card().shared_bytes < kRingMemory
             ? "a block of this device has less than 227 KiB of shared memory"
             : nullptr;
}

/// A block a multiprocessor pays where each has many rows.
double ring_cost(const NormBackward& p) {
  const double bytes = static_cast<double>(numel(p.h)) * size_of(p.h.dtype);
  return vector_cost(p) * (bytes >= 8e6 ? 0.8 : 1.5);
}

template <class T, bool kRms, int kPer>
Status launch_ring_per(const NormBackward& p, const NormBackwardArgs& a, Stream stream) {
  RingPlan plan = ring_plan(a.n);
  auto* kernel = norm_backward_ring<T, kRms, kPer>;
  if (Status st = allow_shared_memory(name_of(p.kind), kernel, kRingMemory); !st) return st;
  const int threads = plan.teams * plan.warps * 32;
  const int room =
      std::max(2 * plan.teams * plan.stages * plan.pitch, threads * kPer * kVec<T> * 8);
  const std::int64_t blocks = ring_blocks(a.rows, a.n);
  const int columns = threads * kPer * kVec<T> * 8 / plan.teams;  // bytes of a team's
  plan.ranks = 1, plan.received = kRingHead + room;
  if (kPer == 2 && wants_columns(p)) {
    plan.ranks = ring_ranks(kernel, a.n, blocks, threads, plan.received + columns);
  }
  const std::int64_t clusters = ceil_div(blocks, plan.ranks);
  const int shared = plan.received + columns / plan.ranks * (plan.ranks - 1);
  const Status st = launch_clusters(name_of(p.kind), kernel, static_cast<unsigned>(plan.ranks),
                                    static_cast<unsigned>(clusters * plan.ranks), threads,
                                    static_cast<std::size_t>(shared), stream, a, plan);
  if (!st || !wants_columns(p)) return st;
  return launch_columns<T>(p, a, clusters, stream);
}

template <class T>
Status launch_ring_type(const NormBackward& p, const NormBackwardArgs& a, Stream stream) {
  const bool rms = p.kind == Norm::rms;
  if (ring_per(a.n / 8) == 1) {
    return rms ? launch_ring_per<T, true, 1>(p, a, stream)
               : launch_ring_per<T, false, 1>(p, a, stream);
  }
  return rms ? launch_ring_per<T, true, 2>(p, a, stream)
             : launch_ring_per<T, false, 2>(p, a, stream);
}

Status launch_ring(const NormBackward& p, Workspace workspace, Stream stream) {
  const NormBackwardArgs a = args_of(p, workspace);
  return p.h.dtype == DType::bf16 ? launch_ring_type<__nv_bfloat16>(p, a, stream)
                                  : launch_ring_type<__half>(p, a, stream);
}

Status launch_naive(const NormBackward& p, Workspace workspace, Stream stream) {
  const NormBackwardArgs a = args_of(p, workspace);
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(a.rows, 1 << 20));
  const int threads = a.n <= 256 ? 64 : 256;
  dispatch_float(p.h.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.kind == Norm::rms) {
      norm_backward_naive<T, true><<<blocks, threads, 0, stream>>>(a);
    } else {
      norm_backward_naive<T, false><<<blocks, threads, 0, stream>>>(a);
    }
    if (wants_columns(p)) {
      norm_columns_naive<T>
          <<<static_cast<unsigned>(ceil_div(a.n, 32)), dim3(32, 8), 0, stream>>>(a);
    }
  });
  return launch_status(name_of(p.kind));
}

constexpr KernelRow<NormBackward> kRows[] = {
    {"norm_ring_sm90", "16-bit rows of 512 to 8192 values in whole 16-byte vectors", ring_why_not,
     ring_cost, launch_ring},
    {"norm_teams_sm80", "rows of whole 16-byte vectors up to 16 KiB", teams_why_not,
     [](const NormBackward& p) { return 0.9 * vector_cost(p); }, launch_teams},
    {"norm_vector_sm80", "rows of whole 16-byte vectors up to 32 KiB", vector_why_not, vector_cost,
     launch_vector},
    {"norm_naive_any", "any row", [](const NormBackward&) -> const char* { return nullptr; },
     [](const NormBackward& p) { return 4 * vector_cost(p); }, launch_naive},
};

/// All but the workspace's size.
Status check(const NormBackward& p, Workspace workspace = {}) {
  const char* op = name_of(p.kind);
  if (Status s = check_base(op, p.h); !s) return s;
  if (Status s = check_like(op, "h", p.h, p.h); !s) return s;
  if (Status s = check_like(op, "dy", p.dy, p.h); !s) return s;
  if (Status s = check_like(op, "dx", p.dx, p.h); !s) return s;
  if (p.dsum) {
    if (Status s = check_like(op, "dsum", *p.dsum, p.h); !s) return s;
  }
  if (p.weight) {
    if (Status s = check_vector(op, "weight", *p.weight, p.h); !s) return s;
  }
  if (p.dweight) {
    if (Status s = check_vector(op, "dweight", *p.dweight, p.h); !s) return s;
  }
  if (p.dbias) {
    if (Status s = check_vector(op, "dbias", *p.dbias, p.h); !s) return s;
  }
  return check_memory(op, {{"dx", &p.dx, true}, {"dweight", p.dweight}, {"dbias", p.dbias}},
                      {{"dy", &p.dy}, {"h", &p.h}, {"weight", p.weight}, {"dsum", p.dsum, true}},
                      workspace);
}

}  // namespace

std::span<const KernelRow<NormBackward>> norm_backward_rows() { return kRows; }

Status legal(const NormBackward& p) { return check(p); }

std::size_t norm_backward_workspace(const NormBackward& p) {
  if (!wants_columns(p) || p.h.rank == 0 || numel(p.h) == 0) return 0;
  const Rows h = rows_of(p.h);  // enough for any row of the table
  const std::int64_t shares =
      std::max({norm_long_rows(h.rows, h.n, p.h.dtype).blocks,
                norm_teams(h.rows, h.n, p.h.dtype).blocks, ring_blocks(h.rows, h.n)});
  return static_cast<std::size_t>(std::max(shares * h.n, h.rows)) * 8;
}

Status norm_backward(const NormBackward& p, const char* kernel, Workspace workspace,
                     Stream stream) {
  if (Status s = check(p, workspace); !s) return s;
  if (Status s = check_workspace(name_of(p.kind), norm_backward_workspace(p), workspace); !s) return s;
  if (numel(p.h) == 0) {  // a sum over no rows
    for (const Tensor* t : {p.dweight, p.dbias}) {
      if (t == nullptr || numel(*t) == 0) continue;
      const cudaError_t e = cudaMemsetAsync(
          t->data, 0, static_cast<std::size_t>(numel(*t)) * size_of(t->dtype), stream);
      if (e != cudaSuccess) return cuda_status(name_of(p.kind), e, "a cleared gradient");
    }
    return {};
  }
  const KernelRow<NormBackward>* row = nullptr;
  if (Status s = select_row<NormBackward>(name_of(p.kind), kRows, p, kernel, &row); !s) return s;
  return row->launch(p, workspace, stream);
}

}  // namespace rm::cuda_ops
