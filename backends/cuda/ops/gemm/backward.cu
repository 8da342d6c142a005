// Gradients of gemm: one pass makes dt = dc * activation'(aux) and the bias gradient's partial
// sums, then two products. Workspace: dt, partial sums, then the products' own.
#include "_shim/alias_shim.hpp"
#include "_shim/launch_shim.hpp"
#include "gemm/common.hpp"
#include "gemm/kernels/gemm_epilogue_any.cuh"

namespace rm::cuda_ops {
namespace {

std::size_t round_up(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

bool wants_slope(const GemmBackward& p) { return p.epilogue.activation != Activation::none; }

/// Rows of dc over all leading axes, and where they lie.
struct Parts {
  std::int64_t rows = 0, n = 0, row_blocks = 0;
  int block_rows = 8;
  std::size_t dt_bytes = 0, partial_bytes = 0;
};

Parts parts_of(const GemmBackward& p) {
  Parts out;
  const Matrix c = matrix_of(p.dc);
  out.rows = c.rows * c.batch, out.n = c.columns;
  // enough blocks for every multiprocessor, but partial sums stay few
  const std::int64_t column_blocks = ceil_div(out.n, 32 * 16 / size_of(p.dc.dtype));
  const std::int64_t share = ceil_div(out.rows * column_blocks, 528);
  out.block_rows = static_cast<int>(std::clamp<std::int64_t>(ceil_div(share, 8) * 8, 8, 64));
  out.row_blocks = ceil_div(out.rows, out.block_rows);
  if (wants_slope(p)) {
    out.dt_bytes = round_up(static_cast<std::size_t>(out.rows * out.n) * size_of(p.dc.dtype));
  }
  if (p.dbias) {
    const bool column = p.epilogue.bias_kind == BiasKind::column;
    out.partial_bytes =
        round_up(static_cast<std::size_t>(column ? out.row_blocks * out.n : out.rows) * 4);
  }
  return out;
}

/// dc, or the dense dt in the workspace, as a tensor of dc's shape.
Tensor dt_tensor(const GemmBackward& p, Workspace workspace) {
  Tensor t = p.dc;
  if (!wants_slope(p)) return t;
  t.data = workspace.data;
  std::int64_t dense = 1;
  for (int d = t.rank - 1; d >= 0; --d) t.stride[d] = dense, dense *= t.shape[d];
  return t;
}

template <class T, int kV>
Status launch_slope_vector(const GemmSlopeArgs& a, Stream stream) {
  // a grid's second axis ends at 65535: blocks loop over the rest of the rows
  const std::int64_t row_blocks = std::min<std::int64_t>(ceil_div(a.rows, a.block_rows), 65535);
  const dim3 grid(static_cast<unsigned>(ceil_div(a.n, 32 * kV)), static_cast<unsigned>(row_blocks));
  return launch("gemm", gemm_slope<T, kV>, {grid, dim3(32, 8), 0, 1, true}, stream, a);
}

template <class T>
Status launch_slope(const GemmBackward& p, const GemmSlopeArgs& a, Stream stream) {
  constexpr int V = 16 / static_cast<int>(sizeof(T));
  bool vector = a.n % V == 0 && is_aligned(a.dc, a.dc_pitch, p.dc.dtype, 16) && a.dc_batch % V == 0;
  if (a.aux) {
    vector = vector && is_aligned(a.aux, a.aux_pitch, p.dc.dtype, 16) && a.aux_batch % V == 0;
  }
  return vector ? launch_slope_vector<T, V>(a, stream) : launch_slope_vector<T, 1>(a, stream);
}

/// dbias from dt's rows; sums of columns are left to the products' launch.
template <class T>
Status launch_bias(const GemmBackward& p, const Parts& parts, const Tensor& dt, float* partial,
                   Stream stream) {
  if (p.epilogue.bias_kind == BiasKind::column) return {};
  const Matrix m = matrix_of(dt);
  const auto warps = [](std::int64_t results) -> Launch {
    return {static_cast<unsigned>(ceil_div(results, 8)), 256};
  };
  const GemmSums rows{parts.rows, m.columns, m.rows, m.batch_stride, m.pitch, 1};
  if (Status s = launch("gemm", gemm_sums<T, float>, warps(parts.rows), stream,
                        static_cast<const T*>(dt.data), partial, rows);
      !s) {
    return s;
  }
  const bool scalar = p.epilogue.bias_kind == BiasKind::scalar;
  const std::int64_t results = scalar ? 1 : m.rows;
  const GemmSums all{results, scalar ? parts.rows : m.batch, results, 0, 1, scalar ? 1 : m.rows};
  return launch("gemm", gemm_sums<float, T>, warps(results), stream,
                static_cast<const float*>(partial), static_cast<T*>(p.dbias->data), all);
}

Status slope_and_bias(const GemmBackward& p, const Parts& parts, const Tensor& dt, float* partial,
                      Stream stream) {
  const bool column = p.dbias && p.epilogue.bias_kind == BiasKind::column;
  GemmSlopeArgs a{};
  const Matrix c = matrix_of(p.dc);
  a.dc = p.dc.data, a.rows = parts.rows, a.n = parts.n,
  a.rows_a_batch = std::max<std::int64_t>(1, c.rows);
  a.dc_pitch = c.pitch, a.dc_batch = c.batch_stride, a.dt_pitch = parts.n;
  a.activation = static_cast<int>(p.epilogue.activation), a.slope = p.epilogue.slope;
  a.block_rows = parts.block_rows;
  if (wants_slope(p)) {
    const Matrix x = matrix_of(*p.epilogue.aux);
    a.dt = dt.data, a.aux = p.epilogue.aux->data, a.aux_pitch = x.pitch;
    a.aux_batch = x.batch_stride;
  }
  if (column) a.partial = partial;
  return dispatch_float(p.dc.dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    if (a.dt || a.partial) {
      if (Status s = launch_slope<T>(p, a, stream); !s) return s;
    }
    return p.dbias ? launch_bias<T>(p, parts, dt, partial, stream) : Status{};
  });
}

/// One b for all of a's leading axes.
bool shares_b(const GemmBackward& p) {
  return p.a.rank > 2 && matrix_of(p.b).batch == 1 &&
         (p.b.rank != p.a.rank || matrix_of(p.a).batch > 1);
}

/// [B, M, N] as [B * M, N] where b is shared, so that db sums over the leading axes.
Status flatten(const Tensor t, const char* what, Tensor* out) {
  const Matrix m = matrix_of(t);
  if (m.batch > 1 && m.batch_stride != m.rows * m.pitch) {
    return invalid(std::string("[gemm] expected ") + what +
                   " whose leading axes are rows (b is shared), got other strides; try contiguous");
  }
  *out = t;
  out->rank = 2;
  out->shape[0] = m.batch * m.rows, out->shape[1] = m.columns;
  out->stride[0] = m.pitch, out->stride[1] = 1;
  return {};
}

Gemm product(const GemmBackward& p, const Tensor& a, bool trans_a, const Tensor& b, bool trans_b,
             const Tensor& c) {
  Gemm g{a, b, c, trans_a, trans_b, p.tf32, {}, p.library, p.tune};
  g.epilogue.scale = p.epilogue.scale;
  return g;
}

Status check(const GemmBackward& p, Workspace workspace) {
  if (!is_float(p.dc.dtype) || !matrix_of(p.dc).valid || !matrix_of(p.a).valid ||
      !matrix_of(p.b).valid || p.a.dtype != p.dc.dtype || p.b.dtype != p.dc.dtype) {
    return invalid("[gemm] expected dc, a and b of one float dtype with dense rows, got others");
  }
  if (wants_slope(p)) {
    if (!p.epilogue.aux) return invalid("[gemm] expected aux with an activation, got none");
    if (Status s = check_like_c("gemm", "aux", *p.epilogue.aux, p.dc); !s) return s;
  }
  if (p.dbias) {
    Epilogue e;
    e.bias = p.dbias, e.bias_kind = p.epilogue.bias_kind;
    if (Status s = check_epilogue("gemm", e, p.dc); !s) return s;
  }
  if (p.da && (!same_shape(*p.da, p.a) || p.da->dtype != p.a.dtype)) {
    return invalid("[gemm] expected da like a, got another shape or dtype");
  }
  if (p.db && (!same_shape(*p.db, p.b) || p.db->dtype != p.b.dtype)) {
    return invalid("[gemm] expected db like b, got another shape or dtype");
  }
  const Parts parts = parts_of(p);
  if (Status s = check_workspace("gemm", parts.dt_bytes + parts.partial_bytes, workspace); !s) {
    return s;
  }
  return check_memory(
      "gemm", {{"da", p.da}, {"db", p.db}, {"dbias", p.dbias}},
      {{"dc", &p.dc}, {"a", &p.a}, {"b", &p.b}, {"aux", wants_slope(p) ? p.epilogue.aux : nullptr}},
      workspace);
}

}  // namespace

Status launch_column_sums(DType dtype, const ColumnSums& sums, Stream stream) {
  if (sums.columns == 0) return {};
  dispatch_float(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    gemm_column_sums<T>
        <<<static_cast<unsigned>(ceil_div(sums.columns, 32)), dim3(32, 8), 0, stream>>>(
            sums.partial, static_cast<T*>(sums.out), sums.columns, sums.count);
  });
  return launch_status("gemm");
}

std::size_t gemm_backward_workspace(const GemmBackward& p) {
  const Parts parts = parts_of(p);
  Gemm any;
  any.library = p.library;
  return parts.dt_bytes + parts.partial_bytes + gemm_workspace(any);
}

Status gemm_backward(const GemmBackward& p, const char* kernel, Workspace workspace,
                     Stream stream) {
  if (Status s = check(p, workspace); !s) return s;
  if (Status s = earlier_error("gemm"); !s) return s;
  const Parts parts = parts_of(p);
  auto* memory = static_cast<char*>(workspace.data);
  Tensor dt = dt_tensor(p, workspace);
  auto* partial = reinterpret_cast<float*>(memory + parts.dt_bytes);
  if (numel(p.dc) > 0) {
    if (Status s = slope_and_bias(p, parts, dt, partial, stream); !s) return s;
  } else if (p.dbias && numel(*p.dbias) > 0) {
    const cudaError_t e = cudaMemsetAsync(
        p.dbias->data, 0, static_cast<std::size_t>(numel(*p.dbias)) * size_of(p.dbias->dtype),
        stream);
    if (e != cudaSuccess) return cuda_status("gemm", e, "a cleared gradient");
  }
  const std::size_t used = parts.dt_bytes + parts.partial_bytes;
  const Workspace rest{memory ? memory + used : nullptr, workspace.bytes - used};
  Tensor a = p.a, b = p.b;
  Tensor da = p.da ? *p.da : Tensor{}, db = p.db ? *p.db : Tensor{};
  if (shares_b(p)) {
    if (p.trans_a) {
      return unsupported(
          "[gemm] expected b with a's leading axes where a is transposed, got one b for all; try "
          "a.mT.contiguous()");
    }
    for (const auto& [what, t] : {std::pair("a", &a), std::pair("dc", &dt), std::pair("b", &b),
                                  std::pair("da", &da), std::pair("db", &db)}) {
      if (t->rank <= 2) continue;
      if (Status s = flatten(*t, what, t); !s) return s;
    }
  }
  Gemm for_a, for_b;
  if (p.da) {
    for_a = p.trans_a ? product(p, b, p.trans_b, dt, true, da)
                      : product(p, dt, false, b, !p.trans_b, da);
  }
  if (p.db) {
    for_b = p.trans_b ? product(p, dt, true, a, p.trans_a, db)
                      : product(p, a, !p.trans_a, dt, false, db);
  }
  ColumnSums sums{};
  if (p.dbias && p.epilogue.bias_kind == BiasKind::column && numel(p.dc) > 0) {
    sums = {partial, p.dbias->data, static_cast<int>(parts.n), static_cast<int>(parts.row_blocks)};
  }
  if (p.da && p.db) return gemm_pair(for_a, for_b, sums, kernel, rest, stream);
  if (Status s = launch_column_sums(p.dc.dtype, sums, stream); !s) return s;
  if (p.da) return gemm(for_a, "", rest, stream);
  if (p.db) return gemm(for_b, "", rest, stream);
  return {};
}

}  // namespace rm::cuda_ops
