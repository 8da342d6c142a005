// Checks and launches of quantize and dequantize.
#include "_shim/alias_shim.hpp"
#include "_shim/epilogue_shim.hpp"
#include "quant/api.hpp"
#include "quant/kernels/quant_any.cuh"

namespace rm::cuda_ops {
namespace {

unsigned blocks_of(std::int64_t parts, int a_block) {
  return static_cast<unsigned>(std::min<std::int64_t>(ceil_div(parts, a_block), 1 << 20));
}

/// The quantised form of a weight [N, K] of type t.
bool matches(const Tensor& q, const Tensor& scales, const Tensor& w, int bits, int group) {
  const bool known = (bits == 8 || bits == 4) && (group == 32 || group == 64 || group == 128);
  if (!known || w.rank != 2 || !is_float(w.dtype)) return false;
  const std::int64_t n = w.shape[0], k = w.shape[1];
  return q.rank == 2 && q.dtype == (bits == 8 ? DType::i8 : DType::u8) && q.shape[0] == n &&
         q.shape[1] == quant_padded(k) * bits / 8 && is_contiguous(q) && scales.rank == 2 &&
         scales.dtype == w.dtype && scales.shape[0] == ceil_div(k, group) &&
         scales.shape[1] == n && matrix_of(scales).valid;
}

QuantArgs args_of(const Tensor& q, const Tensor& scales, const Tensor& w, int group) {
  QuantArgs a{};
  a.q = static_cast<std::uint8_t*>(q.data), a.scales = scales.data;
  a.n = w.shape[0], a.k = w.shape[1], a.padded = quant_padded(a.k);
  a.groups = ceil_div(a.k, group), a.group = group, a.scales_pitch = matrix_of(scales).pitch;
  a.vectors = is_aligned(q.data, 0, q.dtype, 8);
  return a;
}

Status launch_groups(const Quantize& p, Workspace, Stream stream) {
  QuantArgs a = args_of(p.q, p.scales, p.w, p.group);
  a.w = p.w.data;
  return dispatch_float(p.w.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    auto* kernel = p.bits == 8 ? quantize_groups<T, 8> : quantize_groups<T, 4>;
    const Launch how{blocks_of(a.n * a.groups, 8), 256};
    return launch("quantize", kernel, how, stream, a);
  });
}

constexpr KernelRow<Quantize> kRows[] = {
    {"quantize_groups_any", "any weight", [](const Quantize&) -> const char* { return nullptr; },
     [](const Quantize& p) {
       return move_us(2.0 * static_cast<double>(numel(p.w)) * size_of(p.w.dtype));
     },
     launch_groups},
};

}  // namespace

std::span<const KernelRow<Quantize>> quantize_rows() { return kRows; }

Status legal(const Quantize& p) {
  if (!matches(p.q, p.scales, p.w, p.bits, p.group) || !is_contiguous(p.w) ||
      !is_contiguous(p.scales)) {
    return invalid(
        "[quantize] expected w dense [N, K] of floats, q [N, P] of 8 bits or [N, P/2] of 4 and "
        "scales [K/group, N] of w's dtype, dense, got others");
  }
  return check_memory("quantize", {{"q", &p.q}, {"scales", &p.scales}}, {{"w", &p.w}});
}

Status legal(const Dequantize& p) {
  if (!matches(p.q, p.scales, p.y, p.bits, p.group) || p.y.stride[1] != 1 ||
      (p.y.shape[0] > 1 && p.y.stride[0] != quant_padded(p.y.shape[1])) ||
      !is_aligned(p.y.data, 0, p.y.dtype, 32)) {
    return invalid(
        "[dequantize] expected q and scales as quantize makes them and y [N, K] of the scales' "
        "dtype in rows of P elements on 32 bytes, got others");
  }
  return check_memory("dequantize", {{"y", &p.y}}, {{"q", &p.q}, {"scales", &p.scales}});
}

Status quantize(const Quantize& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (numel(p.w) == 0) return {};
  const KernelRow<Quantize>* row = nullptr;
  if (Status s = select_row<Quantize>("quantize", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

Status dequantize(const Dequantize& p, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (numel(p.y) == 0) return {};
  QuantArgs a = args_of(p.q, p.scales, p.y, p.group);
  a.y = p.y.data;
  return dispatch_float(p.y.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    auto* kernel = p.bits == 8 ? dequantize_eights<T, 8> : dequantize_eights<T, 4>;
    return launch_overlapped("dequantize", kernel, blocks_of(a.n * (a.padded / 8), 256), 256, 0,
                             stream, a);
  });
}

}  // namespace rm::cuda_ops
