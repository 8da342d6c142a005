// The table of gemm: checks, shapes, choice and launches of the kernels of our own.
#include <algorithm>
#include <bit>

#include "_shim/alias_shim.hpp"
#include "gemm/common.hpp"
#include "gemm/few.hpp"
#include "gemm/kernels/gemm_epilogue_any.cuh"
#include "gemm/kernels/gemm_tiled_any.cuh"
#include "gemm/timing.hpp"
#include "gemm/wgmma.hpp"

namespace rm::cuda_ops {
namespace {

/// Microseconds of the multiplications alone at `tera` TFLOP/s.
double flop_us(const Gemm& p, double tera) {
  const GemmShape s = gemm_shape(p);
  return 2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k) *
         static_cast<double>(s.batch) / (tera * 1e6);
}

double library_us(const Gemm& p) {
  const double tera = compute_rate(p.c.dtype != DType::f32 ? 600 : p.tf32 ? 300 : 40);
  return 3 + flop_us(p, tera);
}

/// Of a pass of its own: a second launch, and what it moves.
double epilogue_us(const Gemm& p) {
  constexpr double kLaunch = 1.5;
  const int tensors = 2 + (p.epilogue.residual ? 1 : 0) + (p.epilogue.aux ? 1 : 0);
  return kLaunch + move_us(static_cast<double>(numel(p.c)) * size_of(p.c.dtype) * tensors);
}

Status launch_tiled(const Gemm& p, Workspace, Stream stream) {
  const GemmShape s = gemm_shape(p);
  const GemmArgs a = gemm_args(p, s);
  const std::int64_t tiles = ceil_div(s.m, kTiled) * ceil_div(s.n, kTiled) * s.batch;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(tiles, 1 << 30));
  dispatch_float(p.c.dtype, [&](auto type) {
    gemm_tiled<typename decltype(type)::type><<<blocks, 256, 0, stream>>>(a);
  });
  return launch_status("gemm");
}

/// Waves of tiles over the multiprocessors; a tile's time is what its products take, and where parts
/// of K meet (measured between products of 128 rows: docs/experiments/cuda_gemm.md).
double wgmma_us(const Gemm& p, int columns, int parts) {
  const GemmShape s = gemm_shape(p);
  const std::int64_t tiles = ceil_div(s.m, 128) * ceil_div(s.n, columns) * s.batch * parts;
  const std::int64_t waves = ceil_div(tiles, std::max(1, multiprocessors()));
  const double depth = static_cast<double>(s.k) / parts * (columns == 64 ? 1.35 : 1.0);
  const double rate = block_rate(2.8e6);  // multiply-adds
  const double meeting = parts == 1 ? 1.0 : parts == 2 ? 2.6 : 4.0;
  return 1.7 + static_cast<double>(waves) * (meeting + 128.0 * columns * depth / rate);
}

template <int kColumns, int kCluster, bool kSplit, bool kTurns = false>
constexpr KernelRow<Gemm> wgmma_row(const char* name, const char* range) {
  return {name, range, wgmma_why_not,
          [](const Gemm& p) {
            return wgmma_us(p, kColumns, kSplit ? kCluster : 1) + 0.1 * (kCluster - 1);
          },
          [](const Gemm& p, Workspace, Stream stream) {
            return launch_wgmma(p, {kColumns, kCluster, {kSplit, false}, kTurns}, stream);
          }};
}

constexpr KernelRow<Gemm> kRows[] = {
    {"gemm_few_sm90a",
     "16-bit floats, a [9 to 128, K], b [N, K], any epilogue; tiles of 64 rows, K in parts",
     few_why_not, few_us, launch_few},
    {"gemm_cublaslt_library",
     "bias a column, none / relu / gelu_tanh, aux of gelu_tanh; a residual without activation",
     library_why_not, library_us, launch_library},
    {"gemm_cublaslt_ewise",
     "any epilogue, in a pass of its own over the product, which is rounded before it",
     library_ewise_why_not, [](const Gemm& p) { return library_us(p) + epilogue_us(p); },
     launch_library_ewise},
    wgmma_row<256, 2, false>("gemm_wgmma_256x2_sm90a",
                             "16-bit floats, any epilogue; tiles of 128 x 256, clusters of two"),
    wgmma_row<256, 1, false>("gemm_wgmma_256_sm90a", "the same by single blocks"),
    wgmma_row<128, 2, false>("gemm_wgmma_128x2_sm90a", "the same, tiles of 128 x 128"),
    wgmma_row<128, 1, false>("gemm_wgmma_128_sm90a", "the same by single blocks"),
    wgmma_row<128, 1, false, true>("gemm_wgmma_128t_sm90a", "the same, epilogues beside products"),
    wgmma_row<128, 2, false, true>("gemm_wgmma_128tx2_sm90a", "the same by clusters of two"),
    wgmma_row<64, 1, false>("gemm_wgmma_64_sm90a", "the same, tiles of 128 x 64"),
    wgmma_row<128, 2, true>("gemm_wgmma_128k2_sm90a", "few tiles, long K: two parts of K"),
    wgmma_row<128, 4, true>("gemm_wgmma_128k4_sm90a", "the same, four parts"),
    wgmma_row<64, 2, true>("gemm_wgmma_64k2_sm90a", "the same, two parts, tiles of 128 x 64"),
    wgmma_row<64, 4, true>("gemm_wgmma_64k4_sm90a", "the same, four parts"),
    {"gemm_tiled_any", "any problem", [](const Gemm&) -> const char* { return nullptr; },
     [](const Gemm& p) { return 5 + flop_us(p, compute_rate(8)); }, launch_tiled},
};

std::string text_of(const Tensor& t) {
  std::string out = "[";
  for (int d = 0; d < t.rank; ++d) out += (d ? ", " : "") + std::to_string(t.shape[d]);
  return out + "] of " + name_of(t.dtype);
}

Status check(const Gemm& p, const Workspace& workspace) {
  for (const Tensor* t : {&p.a, &p.b, &p.c}) {
    if (!is_float(t->dtype) || t->dtype != p.c.dtype || !matrix_of(*t).valid) {
      return invalid(
          "[gemm] expected a, b and c of one dtype (float32, bfloat16 or float16), rank >= 2, rows "
          "dense and leading axes of one stride, got " +
          text_of(*t) + "; try a contiguous tensor");
    }
  }
  const Matrix a = matrix_of(p.a), b = matrix_of(p.b), c = matrix_of(p.c);
  const std::int64_t m = p.trans_a ? a.columns : a.rows, k = p.trans_a ? a.rows : a.columns;
  const std::int64_t n = p.trans_b ? b.rows : b.columns, kb = p.trans_b ? b.columns : b.rows;
  bool leading = p.a.rank == p.c.rank && (b.batch == 1 || p.b.rank == p.c.rank);
  for (int d = 0; leading && d < p.c.rank - 2; ++d) {
    leading = p.a.shape[d] == p.c.shape[d] && (b.batch == 1 || p.b.shape[d] == p.c.shape[d]);
  }
  if (m != c.rows || n != c.columns || k != kb || !leading) {
    return invalid("[gemm] expected a [.., M, K], b [K, N] or [.., K, N] and c [.., M, N] (as " +
                   std::string("transposed), got ") + text_of(p.a) + ", " + text_of(p.b) + ", " +
                   text_of(p.c) + "; try trans_a, trans_b");
  }
  if (Status s = check_epilogue("gemm", p.epilogue, p.c); !s) return s;
  if (Status s = check_workspace("gemm", 0, workspace, "workspace()"); !s) return s;
  const Epilogue& e = p.epilogue;
  return check_memory("gemm", {{"c", &p.c, true}, {"aux", e.aux}},
                      {{"a", &p.a}, {"b", &p.b}, {"bias", e.bias}, {"residual", e.residual, true}},
                      workspace);
}

/// The measured row, measuring it now if need be.
Status measured_row(const Gemm& p, Workspace workspace, Stream stream, int* out) {
  const std::string key = choice_key(p, workspace.bytes);
  *out = p.library->known_row(key);
  if (*out >= 0 && kRows[*out].why_not(p) != nullptr) *out = -1;
  if (*out >= 0 || !p.tune || !may_repeat(p) || is_capturing(stream)) return {};
  double least = 0;
  for (const auto& row : kRows) {
    if (row.why_not(p) == nullptr && (least == 0 || row.cost_us(p) < least)) least = row.cost_us(p);
  }
  const GemmShape shape = gemm_shape(p);
  const std::int64_t elements = shape.batch * shape.k * (shape.m + shape.n);
  TimedChoice choice(stream, cold_for(elements * size_of(p.c.dtype), workspace), least);
  for (std::size_t i = 0; i < std::size(kRows); ++i) {
    if (kRows[i].why_not(p) || kRows[i].cost_us(p) > 8 * least) continue;
    const auto run = [&](Stream on) { return kRows[i].launch(p, workspace, on); };
    if (Status s = choice.add(static_cast<int>(i), run); !s) return s;
  }
  if (Status s = choice.fastest(out); !s) return s;
  if (*out >= 0) p.library->remember_row(key, *out);
  return {};
}

}  // namespace

namespace {

bool residual_is_c(const Gemm& p) {
  return p.epilogue.residual != nullptr && p.epilogue.residual->data == p.c.data;
}

/// Of each operand on how many bytes it lies: 1, 2, 4, 8 or 16 and more, three bits each.
std::int64_t alignments_of(const Gemm& p) {
  const Epilogue& e = p.epilogue;
  std::int64_t out = 0;
  for (const Tensor* t : {&p.a, &p.b, &p.c, e.bias, e.residual, e.aux}) {
    const auto address = t ? reinterpret_cast<std::uintptr_t>(t->data) : 0;
    const int low = address == 0 ? 4 : std::min(4, std::countr_zero(address));
    out = out * 8 + low;
  }
  return out;
}

}  // namespace

std::string choice_key(const Gemm& p, std::size_t workspace_bytes) {
  const GemmShape s = gemm_shape(p);
  const Epilogue& e = s.epilogue;
  const Matrix residual = e.residual ? matrix_of(*e.residual) : Matrix{};
  const Matrix aux = e.aux ? matrix_of(*e.aux) : Matrix{};
  const std::int64_t fields[] = {s.m,
                                 s.n,
                                 s.k,
                                 s.batch,
                                 s.a.pitch,
                                 s.b.pitch,
                                 s.c.pitch,
                                 s.a.batch_stride,
                                 s.b.batch_stride,
                                 s.c.batch_stride,
                                 residual.pitch,
                                 residual.batch_stride,
                                 aux.pitch,
                                 aux.batch_stride,
                                 alignments_of(p),
                                 residual_is_c(p),
                                 card().device,
                                 p.trans_a * 2 + p.trans_b + 4 * p.tf32,
                                 static_cast<std::int64_t>(p.c.dtype),
                                 static_cast<std::int64_t>(e.bias_kind) * 64 +
                                     static_cast<std::int64_t>(e.activation) * 4 +
                                     (e.residual ? 2 : 0) + (e.aux ? 1 : 0),
                                 static_cast<std::int64_t>(workspace_bytes)};
  return {reinterpret_cast<const char*>(fields), sizeof fields};
}

bool may_repeat(const Gemm& p) {  // c is no operand: the launches may be timed in place
  return !residual_is_c(p);
}

GemmShape gemm_shape(const Gemm& p) {
  GemmShape s;
  s.a = matrix_of(p.a), s.b = matrix_of(p.b), s.c = matrix_of(p.c), s.epilogue = p.epilogue;
  s.m = s.c.rows, s.n = s.c.columns, s.k = p.trans_a ? s.a.rows : s.a.columns;
  s.batch = s.c.batch;
  if (s.b.batch == 1) s.b.batch_stride = 0;
  const auto rows_follow = [&](const Matrix& m) { return m.batch_stride == m.rows * m.pitch; };
  bool collapse = s.batch > 1 && s.b.batch == 1 && !p.trans_a && rows_follow(s.a) &&
                  rows_follow(s.c) && p.epilogue.bias_kind != BiasKind::row;
  for (const Tensor* t : {p.epilogue.residual, p.epilogue.aux}) {
    if (t) collapse = collapse && rows_follow(matrix_of(*t));
  }
  if (collapse) s.m *= s.batch, s.batch = 1;
  if (s.batch == 1) s.a.batch_stride = s.b.batch_stride = s.c.batch_stride = 0;
  return s;
}

GemmArgs gemm_args(const Gemm& p, const GemmShape& s) {
  GemmArgs a{};
  a.a = p.a.data, a.b = p.b.data, a.c = p.c.data;
  a.m = s.m, a.n = s.n, a.k = s.k, a.batch = s.batch;
  a.a_row = p.trans_a ? 1 : s.a.pitch, a.a_column = p.trans_a ? s.a.pitch : 1;
  a.b_row = p.trans_b ? 1 : s.b.pitch, a.b_column = p.trans_b ? s.b.pitch : 1;
  a.a_batch = s.a.batch_stride, a.b_batch = s.b.batch_stride;
  a.c_pitch = s.c.pitch, a.c_batch = s.c.batch_stride;
  a.epilogue = epilogue_args(s.epilogue);
  return a;
}

Status launch_epilogue(const Gemm& p, Stream stream) {
  const GemmShape s = gemm_shape(p);
  const GemmArgs a = gemm_args(p, s);
  dispatch_float(p.c.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int V = 16 / static_cast<int>(sizeof(T));
    const bool vector = s.n % V == 0 && rows_in_vectors(p.c) && epilogue_in_vectors(s.epilogue);
    const std::int64_t total = s.m * s.batch * s.n / (vector ? V : 1);
    const auto blocks = static_cast<unsigned>(
        std::max<std::int64_t>(1, std::min<std::int64_t>(ceil_div(total, 256), 1 << 30)));
    if (vector) {
      gemm_epilogue<T, V><<<blocks, 256, 0, stream>>>(a);
    } else {
      gemm_epilogue<T, 1><<<blocks, 256, 0, stream>>>(a);
    }
  });
  return launch_status("gemm");
}

std::span<const KernelRow<Gemm>> gemm_rows() { return kRows; }
Status legal(const Gemm& p) { return check(p, {}); }

std::size_t gemm_workspace(const Gemm& p) {
  return p.library && p.library->why_not() == nullptr ? kLibraryWorkspace : 0;
}

Status gemm(const Gemm& given, const char* kernel, Workspace workspace, Stream stream) {
  if (Status s = check(given, workspace); !s) return s;
  if (numel(given.c) == 0) return {};
  if (Status s = earlier_error("gemm"); !s) return s;
  Gemm p = given;
  p.workspace_bytes = std::min(workspace.bytes, kLibraryWorkspace);
  const bool any = kernel == nullptr || *kernel == '\0';
  if (any && p.library) {
    int row = -1;
    if (Status s = measured_row(p, workspace, stream, &row); !s) return s;
    if (row >= 0) {
      Status s = kRows[row].launch(p, workspace, stream);
      if (s.code != Code::unsupported) return s;
    }
  }
  if (p.tune && (is_capturing(stream) || !may_repeat(p))) p.tune = false;
  // Only the library's rows find out at the launch that they cannot; they remember it, so that the
  // next turn chooses another row.
  Status status;
  for (std::size_t turn = 0; turn < std::size(kRows); ++turn) {
    const KernelRow<Gemm>* row = nullptr;
    if (Status s = select_row<Gemm>("gemm", kRows, p, kernel, &row); !s) return s;
    status = row->launch(p, workspace, stream);
    if (!any || status.code != Code::unsupported) break;
  }
  return status;
}

}  // namespace rm::cuda_ops
