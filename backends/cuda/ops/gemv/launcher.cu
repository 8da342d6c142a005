// The table of gemv: checks, choice and the launch of the naive kernel.
#include "_shim/alias_shim.hpp"
#include "gemv/common.hpp"
#include "gemv/kernels/gemv_naive_any.cuh"

namespace rm::cuda_ops {
namespace {

double weight_bytes(const Gemv& p) {
  return static_cast<double>(p.w.shape[0]) * p.w.shape[1] * size_of(p.w.dtype);
}

Status launch_naive(const Gemv& p, Workspace, Stream stream) {
  const GemvArgs a = gemv_args(p);
  const std::int64_t total = static_cast<std::int64_t>(a.m) * a.n;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(ceil_div(total, 8), 1 << 20));
  dispatch_float(p.x.dtype, [&](auto type) {
    gemv_naive<typename decltype(type)::type><<<blocks, 256, 0, stream>>>(a);
  });
  return launch_status("gemv");
}

constexpr KernelRow<Gemv> kRows[] = {
    {"gemv_rows_sm90", "M = 1, fp32, rows of whole 16-byte vectors up to 48 KiB", gemv_rows_why_not,
     [](const Gemv& p) { return 0.9 * move_us(weight_bytes(p)); }, launch_gemv_rows},
    {"gemv_waves_sm90", "M <= 8, x and w of 16 bits; 2, 4, 8 or 16 rows of w within 72 KiB",
     gemv_waves_why_not, [](const Gemv& p) { return 0.7 * move_us(weight_bytes(p)); },
     launch_gemv_waves},
    {"gemv_quant_sm90", "M = 1, int8 or int4, K up to 16384; else as gemv_bulk_sm90",
     gemv_quant_why_not, [](const Gemv& p) { return 0.75 * move_us(weight_bytes(p)); },
     launch_gemv_quant},
    {"gemv_tensor_sm90", "M = 1, int8 or int4, K up to 32768; else as gemv_bulk_sm90",
     gemv_tensor_why_not, [](const Gemv& p) { return 0.8 * move_us(weight_bytes(p)); },
     launch_gemv_tensor},
    {"gemv_bulk_sm90", "M <= 8, rows of whole 16-byte vectors; groups of 128, 256, .. or a row",
     gemv_bulk_why_not, [](const Gemv& p) { return move_us(weight_bytes(p)); }, launch_gemv_bulk},
    {"gemv_naive_any", "any K, any group", [](const Gemv&) -> const char* { return nullptr; },
     [](const Gemv& p) { return 2 * move_us(weight_bytes(p) * static_cast<double>(p.x.shape[0])); },
     launch_naive},
};

std::string shape_text(const Tensor& t) {
  std::string out = "[";
  for (int d = 0; d < t.rank; ++d) out += (d ? ", " : "") + std::to_string(t.shape[d]);
  return out + "] of " + name_of(t.dtype);
}

Status check(const Gemv& p) {
  const int bits = gemv_bits(p);
  if (p.x.rank != 2 || !is_float(p.x.dtype) || !matrix_of(p.x).valid || p.x.shape[0] > 1 << 20) {
    return invalid("[gemv] expected x [M, K] of float32, bfloat16 or float16, rows dense, got " +
                   shape_text(p.x));
  }
  const std::int64_t width = bits == 4 ? (gemv_k(p) + 1) / 2 : gemv_k(p);
  if (p.w.rank != 2 || p.w.shape[1] != width || !matrix_of(p.w).valid ||
      (bits == 0 && p.w.dtype != p.x.dtype) || p.w.shape[0] > 0x7fffffff ||
      gemv_k(p) > 0x7fffffff) {
    return invalid("[gemv] expected w [N, " + std::to_string(width) + "] of " + name_of(p.x.dtype) +
                   ", int8 or (int4) uint8 [N, K/2], rows dense, got " + shape_text(p.w));
  }
  if ((bits != 0) != (p.scales != nullptr)) {
    return invalid("[gemv] expected scales exactly where w is quantised, got w of " +
                   std::string(name_of(p.w.dtype)));
  }
  if (p.scales &&
      (p.scales->rank != 2 || p.scales->dtype != p.x.dtype || p.scales->shape[1] != p.w.shape[0] ||
       !matrix_of(*p.scales).valid ||
       (gemv_k(p) > 0 && (p.scales->shape[0] <= 0 || gemv_k(p) % p.scales->shape[0] != 0)))) {
    return invalid("[gemv] expected scales [K/group, N] of " + std::string(name_of(p.x.dtype)) +
                   ", got " + shape_text(*p.scales));
  }
  if (p.y.rank != 2 || p.y.dtype != p.x.dtype || p.y.shape[0] != p.x.shape[0] ||
      p.y.shape[1] != p.w.shape[0] || !matrix_of(p.y).valid) {
    return invalid("[gemv] expected y [M, N] of " + std::string(name_of(p.x.dtype)) + ", got " +
                   shape_text(p.y));
  }
  if (Status s = check_epilogue("gemv", p.epilogue, p.y); !s) return s;
  const Epilogue& e = p.epilogue;
  return check_memory("gemv", {{"y", &p.y, true}, {"aux", e.aux}},
                      {{"x", &p.x},
                       {"w", &p.w},
                       {"scales", p.scales},
                       {"bias", e.bias},
                       {"residual", e.residual, true}});
}

}  // namespace

GemvArgs gemv_args(const Gemv& p) {
  GemvArgs a{};
  a.x = p.x.data, a.w = p.w.data, a.y = p.y.data;
  a.x_pitch = matrix_of(p.x).pitch, a.y_pitch = matrix_of(p.y).pitch;
  a.w_pitch = matrix_of(p.w).pitch * size_of(p.w.dtype);
  a.m = static_cast<int>(p.x.shape[0]), a.n = static_cast<int>(p.w.shape[0]);
  a.k = static_cast<int>(gemv_k(p)), a.bits = gemv_bits(p);
  a.group = static_cast<int>(gemv_group(p));
  if (p.scales) a.scales = p.scales->data, a.scales_pitch = matrix_of(*p.scales).pitch;
  a.epilogue = epilogue_args(p.epilogue);
  return a;
}

std::span<const KernelRow<Gemv>> gemv_rows() { return kRows; }
Status legal(const Gemv& p) { return check(p); }

Status gemv(const Gemv& given, const char* kernel, Stream stream) {
  if (Status s = check(given); !s) return s;
  if (numel(given.y) == 0) return {};
  Gemv p = given;
  p.overlap = given.overlap && given.stable_weights;
  const KernelRow<Gemv>* row = nullptr;
  const bool empty_k = gemv_k(p) == 0;  // only the naive kernel sums over nothing
  if (Status s = select_row<Gemv>("gemv", kRows, p, empty_k ? "gemv_naive_any" : kernel, &row); !s)
    return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
