// The rows of gemm by wgmma and the copy engine: what they need, tensor maps, launches.
#include "_shim/launch_shim.hpp"
#include "_shim/tensor_map_shim.hpp"
#include "gemm/common.hpp"
#include "gemm/kernels/gemm_wgmma_sm90a.cuh"
#include "gemm/wgmma.hpp"

namespace rm::cuda_ops {
namespace {

bool mappable(const void* data, const Matrix& m) {
  const auto bytes = [](std::int64_t elements) { return elements * 2; };
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && bytes(m.pitch) % 16 == 0 &&
         bytes(m.batch_stride) % 16 == 0 && m.batch_stride >= 0;
}

bool in_pairs(const void* data, std::int64_t pitch, std::int64_t batch_stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 4 == 0 && pitch % 2 == 0 && batch_stride % 2 == 0;
}

template <int kN>
Status make_problem(const Gemm& g, int cluster, bool split, WgmmaProblem* out) {
  const GemmShape s = gemm_shape(g);
  WgmmaProblem& p = *out;
  p.m = static_cast<int>(s.m), p.n = static_cast<int>(s.n), p.batch = static_cast<int>(s.batch);
  p.split = split, p.share = split ? 1 : cluster;
  p.k_blocks = static_cast<int>(ceil_div(s.k, kWgmmaK * (split ? cluster : 1)));
  p.units_m = static_cast<int>(ceil_div(s.m, kWgmmaM * p.share));
  const auto units_n = static_cast<int>(ceil_div(s.n, kN));
  p.units = p.units_m * units_n * p.batch;
  p.group = std::min(16 / p.share, p.units_m);
  const auto divisor = [](int by) { return FastDivisor(static_cast<std::uint32_t>(by)); };
  p.in_batch = divisor(p.units_m * units_n), p.in_group = divisor(p.group * units_n);
  p.whole_rows = divisor(p.group);
  p.last_rows = divisor(p.units_m % p.group ? p.units_m % p.group : p.group);
  p.trans_a = g.trans_a, p.trans_b = !g.trans_b;
  p.a_batched = s.batch > 1 && s.a.batch_stride != 0;
  p.b_batched = s.batch > 1 && s.b.batch_stride != 0;
  p.epilogue = epilogue_args(s.epilogue);
  p.c = g.c.data, p.c_pitch = s.c.pitch, p.c_batch = s.c.batch_stride;
  // The copy engine writes whole 16 bytes: columns that are no multiple of 8 would spill behind a
  // row.
  p.c_lines =
      s.n % 8 == 0 && mappable(g.c.data, s.c) &&
      make_wgmma_map(&p.c_map, g.c.dtype, g.c.data, s.batch, s.m, s.n, s.c.pitch, s.c.batch_stride, 16);
  p.pairs = in_pairs(g.c.data, s.c.pitch, s.c.batch_stride);
  if (p.epilogue.residual) {
    p.pairs = p.pairs &&
              in_pairs(p.epilogue.residual, p.epilogue.residual_pitch, p.epilogue.residual_batch);
  }
  const DType t = g.c.dtype;
  const std::int64_t a_rows = g.trans_a ? s.k : s.m, a_columns = g.trans_a ? s.m : s.k;
  const std::int64_t b_rows = g.trans_b ? s.n : s.k, b_columns = g.trans_b ? s.k : s.n;
  bool ok = make_wgmma_map(&p.a, t, g.a.data, p.a_batched ? s.batch : 1, a_rows, a_columns, s.a.pitch,
                     s.a.batch_stride, p.trans_a ? 64 : kWgmmaM) &&
            make_wgmma_map(&p.b, t, g.b.data, p.b_batched ? s.batch : 1, b_rows, b_columns, s.b.pitch,
                     s.b.batch_stride, p.trans_b ? std::min(64, kN / p.share) : kN / p.share);
  if (p.epilogue.aux) {
    const Matrix x = matrix_of(*s.epilogue.aux);
    p.aux_lines = mappable(p.epilogue.aux, x);
    p.pairs = p.pairs && in_pairs(p.epilogue.aux, x.pitch, x.batch_stride);
  }
  const Activation kind = s.epilogue.activation;
  const bool columns =
      s.epilogue.bias_kind == BiasKind::none || s.epilogue.bias_kind == BiasKind::column;
  p.plain = p.c_lines && !p.epilogue.residual && !p.epilogue.aux && columns && !split &&
            kind != Activation::leaky_relu && kind != Activation::tanh &&
            kind != Activation::sigmoid;
  if (!ok) {
    return {Code::device_error, "[gemm] expected tensor maps of the operands, got a refusal for " +
                                    std::to_string(s.m) + " x " + std::to_string(s.n) + " x " +
                                    std::to_string(s.k) + ", batch " + std::to_string(s.batch) +
                                    ", pitches " + std::to_string(s.a.pitch) + " and " +
                                    std::to_string(s.b.pitch) + ", batch strides " +
                                    std::to_string(s.a.batch_stride) + " and " +
                                    std::to_string(s.b.batch_stride) + "; try another kernel"};
  }
  return {};
}

template <class T, int kN, WgmmaMode kMode>
Status launch_args(const WgmmaArgs& args, int cluster, Stream stream) {
  constexpr int kBytes = WgmmaLayout<kN, kMode>::kBytes;
  static_assert(kBytes <= 227 * 1024);
  static thread_local int allowed_on = -1;
  const int device = card().device;
  if (allowed_on != device) {
    if (Status s = allow_shared_memory("gemm", gemm_wgmma<T, kN, kMode>, kBytes); !s) return s;
    allowed_on = device;
  }
  int units = 0;
  for (int i = 0; i < args.problems; ++i) units += args.problem[i].units;
  const int clusters = std::min(units, multiprocessors() / cluster);
  const Launch how{static_cast<unsigned>(clusters * cluster), WgmmaLayout<kN, kMode>::kThreads,
                   kBytes, static_cast<unsigned>(cluster), true};
  return launch("gemm", gemm_wgmma<T, kN, kMode>, how, stream, args);
}

template <int kN, WgmmaMode kMode>
Status launch_products(const Gemm* const (&products)[2], const WgmmaPlan& plan,
                       const ColumnSums& sums, Stream stream) {
  const int cluster = plan.cluster;
  WgmmaArgs args{};
  args.sums = sums;
  for (const Gemm* g : products) {
    if (g == nullptr) break;
    const int i = args.problems++;
    if (Status s = make_problem<kN>(*g, cluster, plan.split[i], &args.problem[i]); !s) return s;
  }
  return products[0]->c.dtype == DType::bf16
             ? launch_args<__nv_bfloat16, kN, kMode>(args, cluster, stream)
             : launch_args<__half, kN, kMode>(args, cluster, stream);
}

}  // namespace

bool make_wgmma_map(CUtensorMap* map, DType dtype, const void* data, std::int64_t batch,
                    std::int64_t rows, std::int64_t columns, std::int64_t pitch,
                    std::int64_t batch_stride, int y) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(batch)};
  const auto row_bytes = static_cast<cuuint64_t>(pitch) * 2;
  const cuuint64_t strides[] = {row_bytes,
                                batch > 1 ? static_cast<cuuint64_t>(batch_stride) * 2 : row_bytes};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(y), 1}, steps[] = {1, 1, 1};
  return tensor_map_encoder()(map,
                              dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                   : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                              3, const_cast<void*>(data), sizes, strides, box, steps,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

const char* wgmma_why_not(const Gemm& p) {
  if (p.c.dtype != DType::bf16 && p.c.dtype != DType::f16) return "wgmma is for 16-bit floats";
  if (p.epilogue.activation == Activation::tanh && p.c.dtype != DType::bf16) {
    return "the fast tanh is too coarse for float16";
  }
  const GemmShape s = gemm_shape(p);
  if (s.k == 0) return "the product sums over nothing";
  if (!mappable(p.a.data, s.a) || !mappable(p.b.data, s.b)) {
    return "the copy engine wants operands and their strides in multiples of 16 bytes";
  }
  const std::int64_t tiles = ceil_div(s.m, kWgmmaM) * ceil_div(s.n, 64) * s.batch;
  if (s.m > 1 << 30 || s.n > 1 << 30 || s.k > 1 << 30 || tiles > 1 << 30) return "it is too large";
  if (const char* why = sm90a_why_not()) return why;
  if (tensor_map_encoder() == nullptr) return "the driver makes no tensor maps";
  return nullptr;
}

Status launch_wgmma(const Gemm& p, const WgmmaPlan& plan, Stream stream) {
  return launch_wgmma_pair(p, nullptr, plan, {}, stream);
}

Status launch_wgmma_pair(const Gemm& first, const Gemm* second, const WgmmaPlan& plan,
                         const ColumnSums& sums, Stream stream) {
  const Gemm* const products[] = {&first, second};
  const bool any = plan.split[0] || plan.split[1];
  switch (plan.columns) {
    case 256:
      return launch_products<256, WgmmaMode::together>(products, plan, sums, stream);
    case 128:
      if (any) return launch_products<128, WgmmaMode::parts>(products, plan, sums, stream);
      if (plan.turns) {
        return launch_products<128, WgmmaMode::turns>(products, plan, sums, stream);
      }
      return launch_products<128, WgmmaMode::together>(products, plan, sums, stream);
    default:
      return launch_products<64, WgmmaMode::parts>(products, plan, sums, stream);
  }
}

}  // namespace rm::cuda_ops
