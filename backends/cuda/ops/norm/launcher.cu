// The forward table of layer_norm and rms_norm: checks, choice and launches.
#include "_shim/alias_shim.hpp"
#include "norm/common.hpp"
#include "norm/kernels/norm_moments_sm80.cuh"
#include "norm/kernels/norm_naive_any.cuh"
#include "norm/kernels/norm_vector_sm80.cuh"

namespace rm::cuda_ops {
namespace {

NormForwardArgs args_of(const NormForward& p) {
  NormForwardArgs a{};
  const Rows x = rows_of(p.x);
  a.x = p.x.data, a.y = p.y.data;
  a.rows = x.rows, a.n = static_cast<int>(x.n), a.x_pitch = x.pitch, a.y_pitch = rows_of(p.y).pitch;
  if (p.weight) a.weight = p.weight->data;
  if (p.bias) a.bias = p.bias->data;
  if (p.residual) a.residual = p.residual->data, a.residual_pitch = rows_of(*p.residual).pitch;
  if (p.sum) a.sum = p.sum->data, a.sum_pitch = rows_of(*p.sum).pitch;
  a.eps = p.eps, a.weight_offset = p.weight_offset;
  return a;
}

const char* vector_why_not(const NormForward& p) {
  if (!fits_registers(p.x)) return "the row does not fit a block's registers (32 KiB)";
  for (const Tensor* t : {&p.x, &p.y, p.residual, p.sum}) {
    if (t && !vector_ready(*t)) return "rows are not 16-byte aligned";
  }
  if (p.x.shape[p.x.rank - 1] * size_of(p.x.dtype) % 16 != 0) return "rows are not whole vectors";
  for (const Tensor* t : {p.weight, p.bias}) {
    if (t && !is_aligned(t->data, 0, t->dtype, 16)) return "weight or bias is not 16-byte aligned";
  }
  return nullptr;
}

double vector_cost(const NormForward& p) {
  return move_us(static_cast<double>(numel(p.x)) * size_of(p.x.dtype) *
                 (2 + (p.residual ? 1 : 0) + (p.sum ? 1 : 0)));
}

template <bool kRms>
Status launch_vector_kind(const NormForward& p, Stream stream) {
  const NormForwardArgs a = args_of(p);
  const NormShape s = norm_shape(a.rows, a.n, p.x.dtype, p.residual != nullptr);
  const char* op = name_of(p.kind);
  Status status;
  dispatch_float(p.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    dispatch_shape(s, [&](auto warp, auto per) {
      constexpr bool kWarp = decltype(warp)::value;
      constexpr int kPer = decltype(per)::value;
      const auto blocks = static_cast<unsigned>(s.blocks);
      if constexpr (kWarp || kPer == 1 || kPer == 2 || kPer == 4) {  // what norm_shape asks for
        if (!a.residual) {
          status = launch_overlapped(op, norm_forward_vector<T, kRms, false, kWarp, kPer>, blocks,
                                     s.threads, 0, stream, a);
        } else if constexpr (!kWarp || kPer <= 2) {
          status = launch_overlapped(op, norm_forward_vector<T, kRms, true, kWarp, kPer>, blocks,
                                     s.threads, 0, stream, a);
        }
      }
    });
  });
  return status;
}

Status launch_vector(const NormForward& p, Workspace, Stream stream) {
  return p.kind == Norm::rms ? launch_vector_kind<true>(p, stream)
                             : launch_vector_kind<false>(p, stream);
}

const char* moments_why_not(const NormForward& p) {
  if (size_of(p.x.dtype) != 2) return "rows are not of 16-bit values";
  if (p.residual || p.sum) return "it adds no residual";
  return vector_why_not(p);
}

/// Half the instructions of the other rows, which counts where the card is full.
double moments_cost(const NormForward& p) { return 0.9 * vector_cost(p); }

template <class T, bool kRms>
Status launch_moments_kind(const NormForward& p, Stream stream) {
  const NormForwardArgs a = args_of(p);
  const NormShape s = norm_moments_shape(a.rows, a.n);
  const auto blocks = static_cast<unsigned>(s.blocks);
  const auto run = [&](auto* kernel) {
    return launch_overlapped(name_of(p.kind), kernel, blocks, s.threads, 0, stream, a);
  };
  if (s.warp) {
    return s.per == 1   ? run(norm_forward_moments<T, kRms, true, 1>)
           : s.per == 2 ? run(norm_forward_moments<T, kRms, true, 2>)
           : s.per == 3 ? run(norm_forward_moments<T, kRms, true, 3>)
                        : run(norm_forward_moments<T, kRms, true, 4>);
  } else {
    return s.per == 1 ? run(norm_forward_moments<T, kRms, false, 1>)
                      : run(norm_forward_moments<T, kRms, false, 4>);
  }
}

Status launch_moments(const NormForward& p, Workspace, Stream stream) {
  const bool rms = p.kind == Norm::rms;
  if (p.x.dtype == DType::bf16) {
    return rms ? launch_moments_kind<__nv_bfloat16, true>(p, stream)
               : launch_moments_kind<__nv_bfloat16, false>(p, stream);
  } else {
    return rms ? launch_moments_kind<__half, true>(p, stream)
               : launch_moments_kind<__half, false>(p, stream);
  }
}

Status launch_naive(const NormForward& p, Workspace, Stream stream) {
  const NormForwardArgs a = args_of(p);
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(a.rows, 1 << 20));
  const int threads = a.n <= 256 ? 64 : 256;
  dispatch_float(p.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.kind == Norm::rms) {
      norm_forward_naive<T, true><<<blocks, threads, 0, stream>>>(a);
    } else {
      norm_forward_naive<T, false><<<blocks, threads, 0, stream>>>(a);
    }
  });
  return launch_status(name_of(p.kind));
}

constexpr KernelRow<NormForward> kRows[] = {
    {"norm_moments_sm80", "16-bit rows of whole 16-byte vectors up to 32 KiB, no residual",
     moments_why_not, moments_cost, launch_moments},
    {"norm_vector_sm80", "rows of whole 16-byte vectors up to 32 KiB", vector_why_not, vector_cost,
     launch_vector},
    {"norm_naive_any", "any row", [](const NormForward&) -> const char* { return nullptr; },
     [](const NormForward& p) { return 4 * vector_cost(p); }, launch_naive},
};

Status check(const NormForward& p) {
  const char* op = name_of(p.kind);
  if (Status s = check_base(op, p.x); !s) return s;
  if (Status s = check_like(op, "x", p.x, p.x); !s) return s;
  if (Status s = check_like(op, "y", p.y, p.x); !s) return s;
  if (p.residual) {
    if (Status s = check_like(op, "residual", *p.residual, p.x); !s) return s;
  }
  if (p.sum) {
    if (Status s = check_like(op, "sum", *p.sum, p.x); !s) return s;
  }
  if (p.weight) {
    if (Status s = check_vector(op, "weight", *p.weight, p.x); !s) return s;
  }
  if (p.bias) {
    if (p.kind == Norm::rms) return invalid("[rmsnorm] expected no bias, got one; try layernorm");
    if (Status s = check_vector(op, "bias", *p.bias, p.x); !s) return s;
  }
  return check_memory(
      op, {{"y", &p.y, true}, {"sum", p.sum, true}},
      {{"x", &p.x, true}, {"residual", p.residual, true}, {"weight", p.weight}, {"bias", p.bias}});
}

}  // namespace

std::span<const KernelRow<NormForward>> norm_forward_rows() { return kRows; }
Status legal(const NormForward& p) { return check(p); }

Status norm_forward(const NormForward& p, const char* kernel, Stream stream) {
  if (Status s = check(p); !s) return s;
  if (numel(p.x) == 0) return {};
  const KernelRow<NormForward>* row = nullptr;
  if (Status s = select_row<NormForward>(name_of(p.kind), kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
