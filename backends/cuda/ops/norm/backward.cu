// The gradient table of layer_norm and rms_norm. dweight and dbias are summed in a fixed order.
#include "norm/common.hpp"
#include "norm/kernels/norm_naive_any.cuh"
#include "norm/kernels/norm_vector_sm80.cuh"

namespace rm::cuda_ops {
namespace {

bool wants_columns(const NormBackward& p) { return p.dweight || p.dbias; }

NormShape shape_of(const NormBackward& p) {
  const Rows r = rows_of(p.h);
  return norm_shape(r.rows, r.n, p.h.dtype, true);
}

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

double vector_cost(const NormBackward& p) {
  return move_us(static_cast<double>(numel(p.h)) * size_of(p.h.dtype) * (3 + (p.dsum ? 1 : 0)));
}

template <bool kRms>
Status launch_vector_kind(const NormBackward& p, const NormBackwardArgs& a, Stream stream) {
  const NormShape s = shape_of(p);
  dispatch_float(p.h.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    dispatch_shape(s, [&](auto warp, auto per) {
      if constexpr (decltype(per)::value <= 4) {
        norm_backward_vector<T, kRms, decltype(warp)::value, decltype(per)::value>
            <<<static_cast<unsigned>(s.blocks), s.threads, 0, stream>>>(a);
      }
    });
    if (wants_columns(p)) {
      norm_columns_vector<T><<<static_cast<unsigned>(ceil_div(a.n, 32)), dim3(32, 32), 0, stream>>>(
          a, static_cast<int>(s.blocks));
    }
  });
  return launch_status(name_of(p.kind));
}

Status launch_vector(const NormBackward& p, Workspace workspace, Stream stream) {
  const NormBackwardArgs a = args_of(p, workspace);
  return p.kind == Norm::rms ? launch_vector_kind<true>(p, a, stream)
                             : launch_vector_kind<false>(p, a, stream);
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
    {"norm_vector_sm80", "rows of whole 16-byte vectors up to 32 KiB", vector_why_not, vector_cost,
     launch_vector},
    {"norm_naive_any", "any row", [](const NormBackward&) -> const char* { return nullptr; },
     [](const NormBackward& p) { return 4 * vector_cost(p); }, launch_naive},
};

Status check(const NormBackward& p, Workspace workspace) {
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
  if (workspace.bytes < norm_backward_workspace(p)) {
    return invalid(std::string("[") + op + "] expected a workspace of " +
                   std::to_string(norm_backward_workspace(p)) + " bytes, got " +
                   std::to_string(workspace.bytes) + "; try backward_workspace()");
  }
  return {};
}

}  // namespace

std::span<const KernelRow<NormBackward>> norm_backward_rows() { return kRows; }

std::size_t norm_backward_workspace(const NormBackward& p) {
  if (!wants_columns(p) || p.h.rank == 0 || numel(p.h) == 0) return 0;
  const Rows h = rows_of(p.h);  // enough for either row
  return std::max<std::size_t>(static_cast<std::size_t>(shape_of(p).blocks * h.n) * 8,
                               static_cast<std::size_t>(h.rows) * 8);
}

Status norm_backward(const NormBackward& p, const char* kernel, Workspace workspace,
                     Stream stream) {
  if (Status s = check(p, workspace); !s) return s;
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
