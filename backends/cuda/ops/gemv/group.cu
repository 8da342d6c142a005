// Several weights against one row of x: the table, its checks, and launches of gemv_waves' kernels.
#include "_shim/alias_shim.hpp"
#include "gemv/common.hpp"
#include "gemv/kernels/gemv_group_naive_any.cuh"
#include "gemv/kernels/gemv_waves_sm90.cuh"

namespace rm::cuda_ops {
namespace {

constexpr int kMostWeights = 3;
constexpr std::int64_t kTurnRows = 16;  // the most rows of a turn: all turns fit parts of so many

std::int64_t rows_of_weight(const GemvGroup& p, int i) { return p.w[i].shape[p.turned ? 1 : 0]; }

std::int64_t all_rows(const GemvGroup& p) {
  std::int64_t n = 0;
  for (int i = 0; i < p.count; ++i) n += rows_of_weight(p, i);
  return n;
}

double weight_bytes(const GemvGroup& p) {
  const int bits = weight_bits(p.w[0]);
  return static_cast<double>(all_rows(p)) * static_cast<double>(p.x.shape[1]) *
         (bits ? bits : 8 * size_of(p.x.dtype)) / 8;
}

/// Whether waves' blocks hold whole rows of x: above, each turn reads them anew.
bool whole_turns(const GemvGroup& p) { return p.x.shape[0] <= 4 || p.x.shape[1] <= 2048; }

template <class T, int kPairs, int kSegments, class Group>
Status launch(GemvArgs& a, const Group& g, bool overlap, Stream stream) {
  constexpr int kRows = gemv_waves_rows(kSegments, kPairs);
  auto* kernel = gemv_group_waves<T, kPairs, kSegments, Group>;
  a.steps = static_cast<int>(ceil_div(a.row_bytes, 64 * kSegments));
  a.stages_at = 128 + 2 * kGemvWavesWarps * kRows * 32 + kGemvWavesSquares;
  a.stage_bytes = kRows * a.row_bytes;
  const std::int64_t tiles = ceil_div(a.n, kRows);
  const std::int64_t blocks = std::min<std::int64_t>(tiles, 2 * std::max(1, multiprocessors()));
  a.stages = a.stage_bytes <= kGemvWavesSmall ? kGemvWavesStages : 1;
  a.stages = static_cast<int>(std::min<std::int64_t>(a.stages, ceil_div(tiles, blocks)));
  const int bytes = std::max(kGemvTwoBlocksMemory, a.stages_at + a.stages * a.stage_bytes + 512);
  if (Status s = allow_shared_memory("gemv", kernel, kGemvHalfMemory); !s) return s;
  const Launch how{static_cast<unsigned>(blocks), kGemvWavesWarps * 32,
                   static_cast<std::size_t>(bytes), 1, overlap};
  return rm::cuda_ops::launch("gemv", kernel, how, stream, a, g);
}

template <class T, class Group>
Status launch_once(GemvArgs& a, const Group& g, bool overlap, Stream stream) {
  a.stages_at = 128 + kGemvWavesWarps * kGemvOnceRows * 32;
  auto* kernel = gemv_group_once<T, Group>;
  if (Status s = allow_shared_memory("gemv", kernel, kGemvHalfMemory); !s) return s;
  const Launch how{static_cast<unsigned>(ceil_div(a.n, kGemvOnceRows)), kGemvWavesWarps * 32,
                   static_cast<std::size_t>(kGemvTwoBlocksMemory), 1, overlap};
  return rm::cuda_ops::launch("gemv", kernel, how, stream, a, g);
}

/// One row of x: as gemv_waves_sm90 cuts one weight of all the rows.
template <class T, class Group>
Status launch_row(GemvArgs& a, const Group& g, int rows, bool overlap, Stream stream) {
  const bool once = a.n <= 2 * kGemvOnceRows * multiprocessors() && a.row_bytes <= kGemvOnceBytes;
  if (once) return launch_once<T>(a, g, overlap, stream);
  return rows >= 16  ? launch<T, 8, 8>(a, g, overlap, stream)
         : rows >= 8 ? launch<T, 4, 8>(a, g, overlap, stream)
         : rows >= 4 ? launch<T, 2, 8>(a, g, overlap, stream)
                     : launch<T, 1, 8>(a, g, overlap, stream);
}

/// Of several rows, too.
template <class T>
Status launch_of(GemvArgs& a, const GemvGroupArgs& g, bool overlap, Stream stream) {
  const int rows = gemv_waves_turn(a) / a.row_bytes;
  if (a.m > 4) {
    return 16 * a.row_bytes <= kGemvWavesMost ? launch<T, 1, 1>(a, g, overlap, stream)
                                         : launch<T, 0, 1>(a, g, overlap, stream);
  }
  if (a.m > 2) {
    return rows >= 16 ? launch<T, 2, 2>(a, g, overlap, stream) : launch<T, 1, 2>(a, g, overlap, stream);
  }
  if (a.m > 1) {
    return rows >= 16  ? launch<T, 4, 4>(a, g, overlap, stream)
           : rows >= 8 ? launch<T, 2, 4>(a, g, overlap, stream)
                       : launch<T, 1, 4>(a, g, overlap, stream);
  }
  if (g.norm == nullptr || !g.centred) return launch_row<T>(a, g, rows, overlap, stream);
  GemvCentredArgs centred{g, g.norm, g.norm_bias};
  centred.norm = nullptr;
  return launch_row<T>(a, centred, rows, overlap, stream);
}

const char* waves_why_not(const GemvGroup& p) {
  if (const char* why = gemv_group_rows_why_not(p)) return why;
  const std::int64_t m = p.x.shape[0], k = p.x.shape[1];
  if (p.centred && m != 1) return "several rows of x are centred";
  if (m > 1 && 2 * k * (m > 2 ? 8 : 4) > kGemvWavesMost) return "a block's rows of w do not fit 72 KiB";
  return nullptr;
}

Status launch_waves(const GemvGroup& p, Workspace, Stream stream) {
  GemvArgs a = gemv_args(p);
  a.row_bytes = a.k * 2;
  const GemvGroupArgs g = gemv_group_args(p).group;
  return p.x.dtype == DType::bf16 ? launch_of<__nv_bfloat16>(a, g, p.overlap, stream)
                                  : launch_of<__half>(a, g, p.overlap, stream);
}

Status launch_naive(const GemvGroup& p, Workspace, Stream stream) {
  const GemvArgs a = gemv_args(p);
  const GemvQuantGroupArgs q = gemv_group_args(p);
  const std::int64_t rows = (p.gated ? rows_of_weight(p, 0) : all_rows(p)) * p.x.shape[0];
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(ceil_div(rows, 8), 1 << 20));
  dispatch_float(p.x.dtype, [&](auto type) {
    gemv_group_naive<typename decltype(type)::type><<<blocks, 256, 0, stream>>>(a, q, rows);
  });
  return launch_status("gemv");
}

constexpr KernelRow<GemvGroup> kRows[] = {
    {"gemv_group_waves_sm90", "x and w of 16 bits, K a multiple of 8 up to 16384", waves_why_not,
     [](const GemvGroup& p) { return (whole_turns(p) ? 0.7 : 0.9) * move_us(weight_bytes(p)); }, launch_waves},
    {"gemv_group_parts_sm90", "M from 3 to 8, else as gemv_group_waves_sm90, K from 1024: blocks share rows of w",
     gemv_group_parts_why_not,
     [](const GemvGroup& p) { return 0.8 * move_us(weight_bytes(p)); }, launch_gemv_group_parts},
    {"gemv_group_f32_sm90", "M = 1, fp32, K a multiple of 4 up to 8192; layer norms too",
     gemv_group_f32_why_not,
     [](const GemvGroup& p) { return 0.8 * move_us(weight_bytes(p)); }, launch_gemv_group_f32},
    {"gemv_group_turned_sm80", "M = 1, w [K, N], K up to 6144; on sm_90 above 768", gemv_turned_why_not,
     [](const GemvGroup& p) { return 0.8 * move_us(weight_bytes(p)); }, launch_gemv_turned},
    {"gemv_group_quant_sm90", "x of 16 bits, int8 or int4, K up to 16384; groups as gemv_quant_sm90",
     gemv_group_quant_why_not,
     [](const GemvGroup& p) { return 0.75 * move_us(weight_bytes(p)); }, launch_gemv_group_quant},
    {"gemv_group_naive_any", "any K, any address", [](const GemvGroup&) -> const char* { return nullptr; },
     [](const GemvGroup& p) { return 3 * move_us(weight_bytes(p)); }, launch_naive},
};

Status wrong(const char* what) {
  return invalid(text_of({"[gemv_group] expected ", what, ", got another"}));
}

/// As many rows as x has, without gaps.
bool are_rows(const Tensor& t, const Tensor& x, std::int64_t n) {
  return t.rank == 2 && t.dtype == x.dtype && t.shape[0] == x.shape[0] && t.shape[1] == n &&
         (n <= 1 || t.stride[1] == 1) && (t.shape[0] <= 1 || t.stride[0] == n);
}

bool is_vector(const Tensor& t, const Tensor& x, std::int64_t n) {
  return t.rank == 1 && t.dtype == x.dtype && t.shape[0] == n && is_contiguous(t);
}

/// [K/group, N] without gaps, of the same groups as the first weight's.
bool are_scales(const GemvGroup& p, int i) {
  const std::int64_t k = p.x.shape[1];
  if (!p.scales[i] || p.scales[i]->rank != 2) return false;
  const Tensor& s = *p.scales[i];
  return s.dtype == p.x.dtype && s.shape[0] == p.scales[0]->shape[0] &&
         s.shape[1] == p.w[i].shape[0] && is_contiguous(s) &&
         (k == 0 || (s.shape[0] > 0 && k % s.shape[0] == 0));
}

}  // namespace

const char* gemv_group_rows_why_not(const GemvGroup& p) {
  if (const char* why = gemv_card_why_not()) return why;
  if (p.x.dtype == DType::f32) return "x is fp32";
  if (weight_bits(p.w[0]) != 0) return "w is quantised";
  if (p.turned) return "w is [K, N]";
  const std::int64_t k = p.x.shape[1];
  if (k == 0 || k % 8 != 0 || k > 16384) return "K is no multiple of 8 up to 16384";
  if (p.x.shape[0] > 8) return "more than 8 rows of x";
  for (int i = 0; i < p.count; ++i) {
    const std::int64_t n = rows_of_weight(p, i);
    if (n == 0) return "a weight has no rows";
    if (i + 1 < p.count && !p.gated && n % kTurnRows != 0) {
      return "rows of a weight are no multiple of 16";
    }
    if (n > 1 && p.w[i].stride[0] != k) return "rows of a weight have gaps";
    if (!is_aligned(p.w[i].data, k, p.w[i].dtype, 16)) return "a weight is not 16-byte aligned";
  }
  return gemv_group_x_why_not(p);
}

const char* gemv_group_x_why_not(const GemvGroup& p) {
  if (all_rows(p) > 1 << 30) return "N is too large";
  if (!is_aligned(p.x.data, 0, p.x.dtype, 16)) return "x is not 16-byte aligned";
  for (const Tensor* t : {p.norm, p.norm_bias}) {
    if (t && !is_aligned(t->data, 0, t->dtype, 16)) return "the norm's weight is not 16-byte aligned";
  }
  return nullptr;
}

GemvArgs gemv_args(const GemvGroup& p) {
  GemvArgs a{};
  a.x = p.x.data, a.m = static_cast<int>(p.x.shape[0]), a.n = static_cast<int>(all_rows(p));
  a.k = static_cast<int>(p.x.shape[1]), a.x_pitch = p.x.shape[1], a.bits = weight_bits(p.w[0]);
  a.group = static_cast<int>(gemv_group(p));
  a.w_pitch = p.w[0].shape[1] * size_of(p.w[0].dtype), a.together = 1;
  return a;
}

GemvQuantGroupArgs gemv_group_args(const GemvGroup& p) {
  GemvQuantGroupArgs q{};
  GemvGroupArgs& g = q.group;
  std::int64_t first = 0;
  for (int i = 0; i < kMostWeights; ++i) {
    g.first[i] = i < p.count ? static_cast<int>(first) : 0x7fffffff;
    if (i >= p.count) continue;
    g.w[i] = p.w[i].data, g.y[i] = p.y[i].data;
    q.scales[i] = p.scales[i] ? p.scales[i]->data : nullptr;
    g.bias[i] = p.bias[i] ? p.bias[i]->data : nullptr;
    first += rows_of_weight(p, i);
  }
  g.turned = p.turned, g.gated = p.gated, g.eps = p.eps, g.weight_offset = p.weight_offset;
  g.norm = p.norm ? p.norm->data : nullptr;
  g.centred = p.centred, g.norm_bias = p.norm_bias ? p.norm_bias->data : nullptr;
  g.residual = p.residual ? p.residual->data : nullptr;
  g.activation = static_cast<int>(p.activation);
  return q;
}

std::span<const KernelRow<GemvGroup>> gemv_group_rows() { return kRows; }

Status legal(const GemvGroup& p) {
  if (p.count < 1 || p.count > kMostWeights) return wrong("one to three weights");
  if (!is_float(p.x.dtype) || p.x.rank != 2 || p.x.shape[1] > 0x7fffffff ||
      p.x.shape[0] < 1 || p.x.shape[0] > 1 << 20 || !are_rows(p.x, p.x, p.x.shape[1])) {
    return wrong("x [M, K] of float32, bfloat16 or float16, without gaps");
  }
  const std::int64_t k = p.x.shape[1];
  if (p.norm && !is_vector(*p.norm, p.x, k)) return wrong("the norm's weight dense [K]");
  if (p.norm_bias && !is_vector(*p.norm_bias, p.x, k)) return wrong("the norm's bias dense [K]");
  if (p.centred ? !p.norm || p.weight_offset != 0.0f : p.norm_bias != nullptr) {
    return wrong("a layer norm's weight without an offset where x is centred, its bias only there");
  }
  if (p.gated && (p.count != 2 || p.bias[0] || p.bias[1] || p.residual ||
                  rows_of_weight(p, 0) != rows_of_weight(p, 1))) {
    return wrong("two weights of one shape without bias and residual where products are gated");
  }
  if (p.residual && p.count != 1) return wrong("one weight with a residual");
  const int bits = weight_bits(p.w[0]);
  if (p.turned && (p.count != 1 || bits != 0 || p.w[0].rank != 2 || p.w[0].shape[0] != k)) {
    return wrong("one weight [K, N] that is not quantised where it is turned");
  }
  const std::int64_t width = p.turned ? p.w[0].shape[1] : bits == 4 ? (k + 1) / 2 : k;
  Operand results[kMostWeights], operands[4 + 3 * kMostWeights];
  std::size_t made = 0, read = 0;
  operands[read++] = {"x", &p.x};
  operands[read++] = {"norm", p.norm};
  operands[read++] = {"norm's bias", p.norm_bias};
  operands[read++] = {"residual", p.residual, true};
  for (int i = 0; i < p.count; ++i) {
    const Tensor& w = p.w[i];
    if (w.rank != 2 || w.dtype != (bits ? p.w[0].dtype : p.x.dtype) || w.shape[1] != width ||
        !matrix_of(w).valid || w.shape[0] > 0x3fffffff || (w.shape[0] > 1 && w.stride[0] != width)) {
      return wrong("weights [N, K] of x's dtype, int8 or (int4) uint8 [N, K/2], without gaps");
    }
    if (bits != 0 ? !are_scales(p, i) : p.scales[i] != nullptr) {
      return wrong("scales [K/group, N] of x's dtype, of one group, exactly where w is quantised");
    }
    if (p.bias[i] && !is_vector(*p.bias[i], p.x, rows_of_weight(p, i))) return wrong("a bias dense [N]");
    operands[read++] = {"w", &w};
    operands[read++] = {"scales", p.scales[i]};
    operands[read++] = {"bias", p.bias[i]};
    if (p.gated && i > 0) continue;
    if (!are_rows(p.y[i], p.x, rows_of_weight(p, i))) return wrong("y [M, N] of x's dtype, without gaps");
    results[made++] = {"y", &p.y[i], true};
  }
  if (p.residual && !are_rows(*p.residual, p.x, rows_of_weight(p, 0))) {
    return wrong("a residual like y");
  }
  return check_memory("gemv_group", std::span<const Operand>(results, made),
                      std::span<const Operand>(operands, read));
}

Status gemv_group(const GemvGroup& given, const char* kernel, Stream stream) {
  if (Status s = legal(given); !s) return s;
  GemvGroup p = given;
  p.overlap = given.overlap && given.stable_weights;
  const KernelRow<GemvGroup>* row = nullptr;
  if (Status s = select_row<GemvGroup>("gemv_group", kRows, p, kernel, &row); !s) return s;
  if (all_rows(p) == 0) return {};
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
