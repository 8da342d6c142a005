// Gradients of a convolution's weights on tensor cores: packing, tile and split, launches.
#include "conv2d/common.hpp"
#include "conv2d/kernels/conv2d_weight_sm80.cuh"
#include "conv2d/kernels/conv2d_weight_warpgroup_sm90a.cuh"

namespace rm::cuda_ops {
namespace {

struct Tile {
  int m, n;
  double rate;  // operations a microsecond of one multiprocessor
};
constexpr Tile kTiles[] = {{128, 128, 1.6e6}, {64, 64, 1.2e6}};
constexpr Tile kWarpgroupTiles[] = {{128, 128, 3.5e6}, {64, 128, 2.5e6}};

const Tile& tile_of(const ConvWeightProblem& p, int tile) {
  return p.warpgroups ? kWarpgroupTiles[tile] : kTiles[tile];
}

struct Plan {
  bool pack_x, pack_dy, unfold;
  int padded, taps, out_padded, tile, splits, steps, steps_per_split;
  std::size_t x_bytes, dy_bytes, parts_bytes;
  double us;
};

std::int64_t places_of(const ConvWeightArgs& a) {
  return static_cast<std::int64_t>(a.n) * a.oh * a.ow;
}

Plan plan_of(const ConvWeightProblem& p) {
  const ConvWeightArgs& a = p.args;
  const int bytes = size_of(p.dtype), vector = 16 / bytes;
  Plan out{};
  out.padded = static_cast<int>(ceil_div(a.in, vector)) * vector;
  out.out_padded = static_cast<int>(ceil_div(a.out, vector)) * vector;
  out.pack_x = a.in % vector != 0 || !conv_in_vectors(a.x, a.x_stride, a.in, p.dtype);
  out.pack_dy = a.out % vector != 0 || !conv_in_vectors(a.dy, a.dy_stride, a.out, p.dtype);
  out.unfold =
      conv_unfolds(a.in, a.groups, a.kw, vector, static_cast<std::int64_t>(a.n) * a.h * a.ow);
  out.taps = out.unfold ? a.kh : a.kh * a.kw;
  if (out.unfold) out.padded = static_cast<int>(ceil_div(a.kw * a.in, vector)) * vector;
  const int across = out.unfold ? a.ow : a.wd;
  if (out.pack_x)
    out.x_bytes =
        whole(static_cast<std::size_t>(a.n) * a.h * across * a.groups * out.padded * bytes);
  if (out.pack_dy)
    out.dy_bytes =
        whole(static_cast<std::size_t>(places_of(a)) * a.groups * out.out_padded * bytes);
  const int depth = p.warpgroups ? kConvWarpgroupPlaces : kConvPlaces;
  out.steps = static_cast<int>(ceil_div(places_of(a), depth));
  const double sms = std::max(1, multiprocessors()),
               columns = static_cast<double>(out.taps) * out.padded;
  for (int t = 0; t < 2; ++t) {
    const Tile& tile = tile_of(p, t);
    const double tiles =
        std::ceil(columns / tile.n) * static_cast<double>(ceil_div(a.out, tile.m)) * a.groups;
    const double step_us = 2.0 * tile.m * tile.n * depth / block_rate(tile.rate);
    for (int splits = 1; splits <= 128; splits += splits < 8 ? 1 : splits / 4) {
      const auto per = static_cast<int>(ceil_div(out.steps, splits));
      if (ceil_div(out.steps, per) != splits || (splits > 1 && per < 4)) continue;
      const double parts = a.groups * a.out * columns * 4 * splits;
      const double us =
          std::ceil(tiles * splits / sms) * (per + 6) * step_us + 2 * parts / memory_rate(3e6);
      if (out.splits != 0 && us >= out.us) continue;
      out.tile = t, out.splits = splits, out.steps_per_split = per, out.us = us;
      out.parts_bytes = whole(static_cast<std::size_t>(parts));
    }
  }
  out.us += 5 + (out.pack_x ? move_us(2.0 * static_cast<double>(out.x_bytes)) : 0) +
            (out.pack_dy ? move_us(2.0 * static_cast<double>(out.dy_bytes)) : 0);
  return out;
}

ConvPackArgs pack_args(const ConvWeightArgs& a, bool image, int padded, void* dst) {
  ConvPackArgs k{};
  k.src = image ? a.x : a.dy, k.dst = dst;
  std::copy_n(image ? a.x_stride : a.dy_stride, 4, k.stride);
  k.outer = a.n, k.inner = 1, k.outer_stride = k.stride[0];
  k.h = image ? a.h : a.oh, k.wd = image ? a.wd : a.ow;
  k.groups = a.groups, k.in = image ? a.in : a.out, k.padded = padded;
  k.group_stride = k.in * k.stride[1];
  return k;
}

ConvWeightFinishArgs finish_args(const ConvWeightProblem& p, const Plan& plan, const float* parts) {
  const ConvWeightArgs& a = p.args;
  ConvWeightFinishArgs f{};
  f.conv = a, f.parts = parts, f.splits = plan.splits, f.unfolded = plan.unfold;
  f.all = a.groups * a.out * plan.taps * plan.padded;
  f.by_padded = FastDivisor(static_cast<std::uint32_t>(plan.padded));
  f.by_taps = FastDivisor(static_cast<std::uint32_t>(plan.taps));
  f.by_kw = FastDivisor(static_cast<std::uint32_t>(a.kw));
  f.by_in = FastDivisor(static_cast<std::uint32_t>(a.in));
  f.vectors = !plan.unfold && conv_in_vectors(a.dw, a.dw_stride, a.in, p.dtype);
  return f;
}

template <class Kernel>
Status launch_kernel(Kernel* kernel, int threads, int shared, const ConvWeightGemmArgs& g,
                     Stream stream) {
  if (Status s = allow_shared_memory("conv2d", kernel, shared); !s) return s;
  const dim3 grid(static_cast<unsigned>(g.tiles_m) * g.tiles_n, 1,
                  static_cast<unsigned>(g.groups) * g.splits);
  kernel<<<grid, threads, shared, stream>>>(g);
  return launch_status("conv2d");
}

template <class T>
Status launch_product(const ConvWeightGemmArgs& g, int tile, bool warpgroups, Stream stream) {
  if (warpgroups) {
    return tile == 0 ? launch_kernel(conv2d_weight_warpgroup<T, 128>, 256,
                                     conv_weight_warpgroup_shared<128>(), g, stream)
                     : launch_kernel(conv2d_weight_warpgroup<T, 64>, 128,
                                     conv_weight_warpgroup_shared<64>(), g, stream);
  }
  return tile == 0
             ? launch_kernel(conv2d_weight_gemm<T, 128>, 256, conv_weight_shared<128>(), g, stream)
             : launch_kernel(conv2d_weight_gemm<T, 64>, 128, conv_weight_shared<64>(), g, stream);
}

}  // namespace

const char* conv_weight_gemm_why_not(const ConvWeightProblem& p) {
  if (p.dtype == DType::f32) return "float32 weights' gradients have no tensor-core kernel";
  if (places_of(p.args) >= 0x7fffffff - kConvWarpgroupPlaces) return "2^31 places or more";
  if (p.args.groups > 500) return "more than 500 groups";  // with splits the grid's third axis
  if (static_cast<std::int64_t>(p.args.groups) * p.args.out * p.args.kh * p.args.kw *
          (p.args.in + 8) >=
      1 << 30)
    return "2^30 weights or more";
  return nullptr;
}

double conv_weight_gemm_us(const ConvWeightProblem& p) { return plan_of(p).us; }

std::size_t conv_weight_gemm_workspace(const ConvWeightProblem& p) {
  const Plan plan = plan_of(p);
  return plan.x_bytes + plan.dy_bytes + plan.parts_bytes;
}

Status launch_conv_weight_gemm(const ConvWeightProblem& p, Workspace workspace, Stream stream) {
  const Plan plan = plan_of(p);
  if (Status s = check_workspace("conv2d", plan.x_bytes + plan.dy_bytes + plan.parts_bytes,
                                 workspace, kWorkspaceFrom);
      !s)
    return s;
  const ConvWeightArgs& a = p.args;
  ConvWeightGemmArgs g{};
  g.x = a.x, g.dy = a.dy;
  for (int d = 0; d < 3; ++d) {
    g.x_stride[d] = a.x_stride[d == 0 ? 0 : d + 1],
    g.dy_stride[d] = a.dy_stride[d == 0 ? 0 : d + 1];
  }
  std::size_t used = 0;
  if (plan.pack_x) {
    void* to = take(workspace, used, plan.x_bytes);
    ConvUnfoldArgs u{};
    u.src = a.x, u.dst = to, u.in = a.in, u.wd = a.wd, u.kw = a.kw, u.padded = plan.padded;
    u.map = a.map;
    std::copy(a.x_stride, a.x_stride + 4, u.stride);
    Status s = plan.unfold ? launch_conv_unfold(u, a.n, a.h, a.ow, p.dtype, stream)
                           : launch_conv_pack(pack_args(a, true, plan.padded, to), p.dtype, stream);
    if (!s) return s;
    g.x = to, g.x_stride[2] = static_cast<std::int64_t>(a.groups) * plan.padded;
    g.x_stride[1] = g.x_stride[2] * (plan.unfold ? a.ow : a.wd);
    g.x_stride[0] = g.x_stride[1] * a.h;
  }
  if (plan.pack_dy) {
    void* to = take(workspace, used, plan.dy_bytes);
    if (Status s = launch_conv_pack(pack_args(a, false, plan.out_padded, to), p.dtype, stream); !s)
      return s;
    g.dy = to, g.dy_stride[2] = static_cast<std::int64_t>(a.groups) * plan.out_padded;
    g.dy_stride[1] = g.dy_stride[2] * a.ow, g.dy_stride[0] = g.dy_stride[1] * a.oh;
  }
  g.parts = static_cast<float*>(take(workspace, used, plan.parts_bytes));
  g.places = static_cast<int>(places_of(a)), g.groups = a.groups, g.out = a.out;
  g.out_padded = plan.out_padded, g.padded = plan.padded;
  g.h = a.h, g.wd = a.wd, g.kh = a.kh, g.kw = a.kw, g.map = a.map;
  if (plan.unfold) conv_unfolded(a.ow, g.kw, g.wd, g.map);
  g.tiles_m = static_cast<int>(ceil_div(a.out, tile_of(p, plan.tile).m));
  g.tiles_n = static_cast<int>(
      ceil_div(static_cast<std::int64_t>(plan.taps) * plan.padded, tile_of(p, plan.tile).n));
  g.splits = plan.splits, g.steps = plan.steps, g.steps_per_split = plan.steps_per_split;
  g.by_ow = FastDivisor(static_cast<std::uint32_t>(a.ow));
  g.by_oh = FastDivisor(static_cast<std::uint32_t>(a.oh));
  const ConvWeightFinishArgs f = finish_args(p, plan, g.parts);
  const auto run = [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    Status s = launch_product<T>(g, plan.tile, p.warpgroups, stream);
    if (!s) return s;
    conv2d_weight_finish<T><<<static_cast<unsigned>(ceil_div(f.all, 1024)), 256, 0, stream>>>(f);
    return launch_status("conv2d");
  };
  return p.dtype == DType::bf16 ? run(Type<__nv_bfloat16>{}) : run(Type<__half>{});
}

}  // namespace rm::cuda_ops
