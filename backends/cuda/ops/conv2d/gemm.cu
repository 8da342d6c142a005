// Convolutions on tensor cores: operands packed where they do not lie as the kernel wants them,
// tile and split chosen by a rough estimate, launches.

#include "conv2d/common.hpp"
#include "conv2d/kernels/conv2d_gemm_sm80.cuh"
#include "conv2d/kernels/conv2d_maps_sm90a.cuh"
#include "conv2d/kernels/conv2d_pack_any.cuh"
#include "conv2d/kernels/conv2d_warpgroup_sm90a.cuh"
#include "conv2d/maps.hpp"

namespace rm::cuda_ops {
namespace {

struct Tile {
  int m, n;
  double rate;  // operations a microsecond of one multiprocessor, 16-bit types
};
constexpr Tile kTiles[] = {{128, 128, 1.8e6}, {64, 64, 1.3e6}};
constexpr Tile kWarpgroupTiles[] = {{128, 128, 4.0e6}, {128, 64, 3.0e6}, {64, 64, 2.7e6}};

std::span<const Tile> tiles_of(const ConvProblem& p) {
  return p.warpgroups ? std::span<const Tile>(kWarpgroupTiles) : std::span<const Tile>(kTiles);
}

struct Plan {
  bool pack_x, pack_w, unfold;
  int padded, taps, tile, splits, steps, steps_per_split;
  std::size_t x_bytes, w_bytes, parts_bytes;
  double us;
};

std::int64_t rows_of(const ConvArgs& a) { return static_cast<std::int64_t>(a.n) * a.oh * a.ow; }

/// Weights as the kernels read them: whole vectors of channels, the groups in line.
bool weights_in_vectors(const ConvArgs& a, DType t) {
  std::int64_t stride[4];
  const int sizes[4] = {a.out, a.in, a.kh, a.kw};
  for (int d = 0; d < 4; ++d) stride[d] = d != 1 && sizes[d] == 1 ? 0 : a.w_stride[d];
  return conv_in_vectors(a.w, stride, a.in, t) &&
         (a.groups == 1 || a.w_group == a.out * a.w_stride[0]);
}

/// What is copied first, and how: channels that are no whole vectors, other orders of the axes.
void plan_packing(const ConvProblem& p, Plan& out) {
  const ConvArgs& a = p.args;
  const int bytes = size_of(p.dtype), vector = 16 / bytes;
  out.padded = static_cast<int>(ceil_div(a.in, vector)) * vector, out.taps = a.kh * a.kw;
  out.pack_x = a.in % vector != 0 || !conv_in_vectors(a.x, a.x_stride, a.in, p.dtype);
  out.pack_w = a.in % vector != 0 || !weights_in_vectors(a, p.dtype);
  out.unfold =
      conv_unfolds(a.in, a.groups, a.kw, vector, static_cast<std::int64_t>(a.n) * a.h * a.ow);
  if (out.unfold) {
    out.padded = static_cast<int>(ceil_div(a.kw * a.in, vector)) * vector, out.taps = a.kh;
  }
  const int across = out.unfold ? a.ow : a.wd;
  const auto image = static_cast<std::size_t>(a.n) * a.h * across * a.groups * out.padded * bytes;
  const auto weights = static_cast<std::size_t>(a.groups) * a.out * out.taps * out.padded * bytes;
  if (out.pack_x) out.x_bytes = whole(image);
  if (out.pack_w) out.w_bytes = whole(weights);
}

Plan plan_of(const ConvProblem& p) {
  const ConvArgs& a = p.args;
  const int vector = 16 / size_of(p.dtype);
  Plan out{};
  plan_packing(p, out);
  out.steps =
      static_cast<int>(ceil_div(static_cast<std::int64_t>(out.taps) * out.padded, 8 * vector));
  const double sms = std::max(1, multiprocessors()), rows = static_cast<double>(rows_of(a));
  const auto tiles_here = tiles_of(p);
  for (std::size_t t = 0; t < tiles_here.size(); ++t) {
    const Tile& tile = tiles_here[t];
    const double tiles =
        std::ceil(rows / tile.m) * static_cast<double>(ceil_div(a.out, tile.n)) * a.groups;
    const double step_us = 2.0 * tile.m * tile.n * 8 * vector /
                           (block_rate(tile.rate) * (p.dtype == DType::f32 ? 0.5 : 1.0));
    for (const int splits : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32}) {
      const auto per = static_cast<int>(ceil_div(out.steps, splits));
      if (ceil_div(out.steps, per) != splits || (splits > 1 && per < 4)) continue;
      const double parts = splits > 1 ? rows * a.groups * a.out * 4 * splits : 0;
      const double us = std::ceil(tiles * splits / sms) * (per + 4) * step_us +
                        (splits > 1 ? 2 : 0) + 2 * parts / memory_rate(3e6);
      if (out.splits != 0 && us >= out.us) continue;
      out.tile = static_cast<int>(t), out.splits = splits, out.steps_per_split = per, out.us = us;
      out.parts_bytes = static_cast<std::size_t>(parts);
    }
  }
  out.us += 3 + (out.pack_x ? move_us(2.0 * static_cast<double>(out.x_bytes)) : 0) +
            (out.pack_w ? move_us(2.0 * static_cast<double>(out.w_bytes)) : 0);
  return out;
}

ConvPackArgs pack_x_args(const ConvArgs& a, int padded, void* dst) {
  ConvPackArgs k{};
  k.src = a.x, k.dst = dst;
  std::copy(a.x_stride, a.x_stride + 4, k.stride);
  k.outer = a.n, k.inner = 1, k.outer_stride = a.x_stride[0];
  k.group_stride = a.in * a.x_stride[1];
  k.h = a.h, k.wd = a.wd, k.groups = a.groups, k.in = a.in, k.padded = padded;
  return k;
}
ConvPackArgs pack_w_args(const ConvArgs& a, int padded, void* dst) {
  ConvPackArgs k{};
  k.src = a.w, k.dst = dst;
  std::copy(a.w_stride, a.w_stride + 4, k.stride);
  k.outer = a.groups, k.inner = a.out, k.outer_stride = a.w_group;
  k.h = a.kh, k.wd = a.kw, k.groups = 1, k.in = a.in, k.padded = padded;
  return k;
}

template <class T, int kM, int kN, int kWarpM, int kWarpN, int kStages>
Status launch_tile(const ConvGemmArgs& g, Stream stream) {
  const auto kernel = conv2d_gemm<T, kM, kN, kWarpM, kWarpN, kStages>;
  constexpr int kShared = conv_gemm_shared<kM, kN, kStages>();
  if (Status s = allow_shared_memory("conv2d", kernel, kShared); !s) return s;
  const dim3 grid(static_cast<unsigned>(g.tiles_m) * g.tiles_n, 1,
                  static_cast<unsigned>(g.conv.groups) * g.splits);
  return launch_overlapped("conv2d", kernel, grid, 32 * (kM / kWarpM) * (kN / kWarpN), kShared, stream,
                           g);
}

template <class T, int kM, int kN, int kStages>
Status launch_warpgroups(const ConvGemmArgs& g, Stream stream) {
  const auto kernel = conv2d_warpgroup<T, kM, kN, kStages>;
  constexpr int kMost = conv_warpgroup_shared<kM, kN, kStages>(kStages);
  const int shared = conv_warpgroup_shared<kM, kN, kStages>(g.steps_per_split);
  if (Status s = allow_shared_memory("conv2d", kernel, kMost); !s) return s;
  const dim3 grid(static_cast<unsigned>(g.tiles_m) * g.tiles_n, 1,
                  static_cast<unsigned>(g.conv.groups) * g.splits);
  return launch_overlapped("conv2d", kernel, grid, 2 * kM, static_cast<std::size_t>(shared), stream, g);
}

template <class T, int kM, int kN, int kStages>
Status launch_maps(const ConvGemmArgs& g, DType dtype, Stream stream) {
  const auto kernel = conv2d_maps<T, kM, kN, kStages>;
  constexpr int kMost = conv_warpgroup_shared<kM, kN, kStages>(kStages);
  const int shared = conv_warpgroup_shared<kM, kN, kStages>(g.steps_per_split);
  if (Status s = allow_shared_memory("conv2d", kernel, kMost); !s) return s;
  ConvMapsArgs args;
  if (Status s = encode_conv_maps(g, dtype, kM, kN, &args); !s) return s;
  const dim3 grid(static_cast<unsigned>(g.tiles_m) * g.tiles_n, 1,
                  static_cast<unsigned>(g.conv.groups) * g.splits);
  return launch_overlapped("conv2d", kernel, grid, 2 * kM + 32, static_cast<std::size_t>(shared),
                           stream, args);
}

template <class T>
Status launch_product(const ConvGemmArgs& g, int tile, bool warpgroups, Stream stream) {
  if constexpr (sizeof(T) == 2) {
    constexpr DType kType = std::is_same_v<T, __half> ? DType::f16 : DType::bf16;
    if (warpgroups && !conv_maps_why_not(g, kType)) {
      return tile == 0   ? launch_maps<T, 128, 128, 3>(g, kType, stream)
             : tile == 1 ? launch_maps<T, 128, 64, 4>(g, kType, stream)
                         : launch_maps<T, 64, 64, 4>(g, kType, stream);
    }
  }
  if (!warpgroups) {
    return tile == 0 ? launch_tile<T, 128, 128, 64, 32, 3>(g, stream)
                     : launch_tile<T, 64, 64, 32, 32, 4>(g, stream);
  }
  return tile == 0   ? launch_warpgroups<T, 128, 128, 3>(g, stream)
         : tile == 1 ? launch_warpgroups<T, 128, 64, 4>(g, stream)
                     : launch_warpgroups<T, 64, 64, 4>(g, stream);
}

template <class T>
Status launch_finish(const ConvGemmArgs& g, Stream stream) {
  constexpr int V = 16 / static_cast<int>(sizeof(T));
  const std::int64_t total = static_cast<std::int64_t>(g.rows) * g.conv.groups * g.conv.out;
  const auto kernel = g.vectors ? conv2d_gemm_finish<T, V> : conv2d_gemm_finish<T, 1>;
  const std::int64_t threads = g.vectors ? total / V : total;
  return launch_overlapped("conv2d", kernel, static_cast<unsigned>(ceil_div(threads, 256)), 256, 0,
                           stream, g);
}

}  // namespace

bool conv_is_flat(const ConvArgs& a) {
  return (a.oh == 1 || a.y_stride[2] == a.ow * a.y_stride[3]) &&
         (a.n == 1 || a.y_stride[0] == static_cast<std::int64_t>(a.oh) * a.ow * a.y_stride[3]);
}

bool conv_stores_in_vectors(const ConvArgs& a, DType t) {
  if (!conv_in_vectors(a.y, a.y_stride, a.out, t)) return false;
  for (const void* q : {a.bias, a.residual, static_cast<const void*>(a.aux)}) {
    if (reinterpret_cast<std::uintptr_t>(q) % 16 != 0) return false;
  }
  return true;
}

Status launch_conv_finish(const ConvGemmArgs& g, DType dtype, Stream stream) {
  return dispatch_float(
      dtype, [&](auto type) { return launch_finish<typename decltype(type)::type>(g, stream); });
}

const char* conv_gemm_why_not(const ConvProblem& p) {
  if (p.dtype == DType::f32 && !p.tf32) return "float32 without tf32 has no tensor cores";
  if (const char* why = p.warpgroups ? sm90a_why_not() : sm80_why_not()) return why;
  const ConvArgs& a = p.args;
  if (a.in == 0) return "no input channels";
  if (rows_of(a) >= 0x7fffffff) return "2^31 places or more";
  if (static_cast<std::int64_t>(a.kh) * a.kw * (a.in + 8) >= 1 << 30)
    return "a sum of 2^30 or more";
  if (a.groups > 2000) return "more than 2000 groups";  // with splits the grid's third axis
  const std::int64_t vector = 16 / size_of(p.dtype);
  if (ceil_div(rows_of(a), 64) * ceil_div(a.out, 64) > 0x3fffffff / vector) return "too many tiles";
  return nullptr;
}

double conv_gemm_us(const ConvProblem& p) { return plan_of(p).us; }

std::size_t conv_gemm_workspace(const ConvProblem& p) {
  const Plan plan = plan_of(p);
  return plan.x_bytes + plan.w_bytes + plan.parts_bytes;
}

namespace {

/// Whole vectors along the images and, as dst has them, along the channels.
bool turns(const ConvPackArgs& a, DType t) {
  std::int64_t stride[4] = {a.stride[1], a.stride[0], a.stride[2], a.stride[3]};
  if (a.h == 1) stride[2] = 0;
  if (a.wd == 1) stride[3] = 0;
  const std::int64_t vector = 16 / size_of(t);
  return conv_in_vectors(a.src, stride, a.inner, t) && a.in == a.padded && a.in % vector == 0 &&
         a.groups == 1 && a.aux == nullptr && a.outer_stride % vector == 0 && a.outer <= 65535 &&
         static_cast<std::int64_t>(a.in + 64) * (a.inner + 64) * a.h * a.wd < 1 << 30;
}

}  // namespace

Status launch_conv_pack(const ConvPackArgs& a, DType dtype, Stream stream) {
  if (turns(a, dtype)) {
    const std::int64_t vector = 16 / size_of(dtype);
    const std::int64_t warps =
        ceil_div(a.in / vector, 8) * ceil_div(a.inner / vector, 4) * a.h * a.wd;
    const dim3 grid(static_cast<unsigned>(ceil_div(warps, 8)), static_cast<unsigned>(a.outer));
    return dispatch_float(dtype, [&](auto type) {
      return launch_overlapped("conv2d", conv2d_turn<typename decltype(type)::type>, grid, 256, 0,
                               stream, a);
    });
  }
  const std::int64_t images = static_cast<std::int64_t>(a.outer) * a.groups;
  const std::int64_t rows = static_cast<std::int64_t>(a.inner) * a.h * a.wd;
  const dim3 block(32, 8);
  for (std::int64_t first = 0; first < images; first += 65535) {
    const dim3 grid(static_cast<unsigned>(ceil_div(rows, 32)),
                    static_cast<unsigned>(ceil_div(a.padded, 32)),
                    static_cast<unsigned>(std::min<std::int64_t>(65535, images - first)));
    Status s = dispatch_float(dtype, [&](auto type) {
      return launch_overlapped("conv2d", conv2d_pack<typename decltype(type)::type>, grid, block, 0,
                               stream, a, static_cast<int>(first), a.stride[1] == 1);
    });
    if (!s) return s;
  }
  return {};
}

Status launch_conv_pack_weights(const ConvArgs& a, int padded, void* dst, DType dtype,
                                Stream stream) {
  return launch_conv_pack(pack_w_args(a, padded, dst), dtype, stream);
}

bool conv_unfolds(int in, int groups, int kw, int vector, std::int64_t places) {
  const std::int64_t apart = kw * ceil_div(in, vector) * vector;
  const std::int64_t together = ceil_div(static_cast<std::int64_t>(kw) * in, vector) * vector;
  return groups == 1 && in % vector != 0 && 4 * together <= 3 * apart &&
         places * (together / vector) < 0x7fff0000;
}

Status launch_conv_unfold(ConvUnfoldArgs u, int n, int h, int ow, DType dtype, Stream stream) {
  const int across = u.padded * size_of(dtype) / 16;
  u.vectors = n * h * ow * across;
  u.by_vectors = FastDivisor(static_cast<std::uint32_t>(across));
  u.by_ow = FastDivisor(static_cast<std::uint32_t>(ow));
  u.by_h = FastDivisor(static_cast<std::uint32_t>(h));
  u.by_in = FastDivisor(static_cast<std::uint32_t>(u.in));
  const auto blocks = static_cast<unsigned>(ceil_div(u.vectors, 256));
  if (blocks == 0) return {};
  return dispatch_float(dtype, [&](auto type) {
    return launch_overlapped("conv2d", conv2d_unfold<typename decltype(type)::type>, blocks, 256, 0,
                             stream, u);
  });
}

namespace {

/// The image and the weights where the kernel reads them.
Status pack(const ConvProblem& p, const Plan& plan, const Workspace& workspace, std::size_t& used,
            ConvGemmArgs& g, Stream stream) {
  const ConvArgs& a = p.args;
  ConvUnfoldArgs u{};
  u.in = a.in, u.kw = a.kw, u.padded = plan.padded;
  if (plan.pack_x) {
    void* to = take(workspace, used, plan.x_bytes);
    u.src = a.x, u.dst = to, u.wd = a.wd, u.map = a.map;
    std::copy(a.x_stride, a.x_stride + 4, u.stride);
    Status s = plan.unfold ? launch_conv_unfold(u, a.n, a.h, a.ow, p.dtype, stream)
                           : launch_conv_pack(pack_x_args(a, plan.padded, to), p.dtype, stream);
    if (!s) return s;
    g.x = to, g.x_stride[2] = static_cast<std::int64_t>(a.groups) * plan.padded;
    g.x_stride[1] = g.x_stride[2] * (plan.unfold ? a.ow : a.wd);
    g.x_stride[0] = g.x_stride[1] * a.h;
  }
  if (plan.pack_w) {
    void* to = take(workspace, used, plan.w_bytes);
    u.src = a.w, u.dst = to, u.wd = a.kw;
    u.map.mul[1] = 0, u.map.off[1] = 0, u.map.step[1] = 1, u.map.div[1] = 1;
    std::copy(a.w_stride, a.w_stride + 4, u.stride);
    Status s = plan.unfold ? launch_conv_unfold(u, a.out, a.kh, 1, p.dtype, stream)
                           : launch_conv_pack(pack_w_args(a, plan.padded, to), p.dtype, stream);
    if (!s) return s;
    g.w = to, g.w_stride[2] = plan.padded;
    g.w_stride[1] = static_cast<std::int64_t>(plan.taps / a.kh) * plan.padded;
    g.w_stride[0] = static_cast<std::int64_t>(plan.taps) * plan.padded;
  }
  if (plan.unfold) conv_unfolded(a.ow, g.conv.kw, g.conv.wd, g.conv.map);
  return {};
}

}  // namespace

Status launch_conv_gemm(const ConvProblem& p, Workspace workspace, Stream stream) {
  const Plan plan = plan_of(p);
  if (Status s = check_workspace("conv2d", plan.x_bytes + plan.w_bytes + plan.parts_bytes,
                                 workspace, kWorkspaceFrom);
      !s)
    return s;
  const ConvArgs& a = p.args;
  ConvGemmArgs g{};
  g.conv = a, g.padded = plan.padded, g.x = a.x, g.w = a.w;
  g.w_stride[0] = a.w_stride[0], g.w_stride[1] = a.w_stride[2], g.w_stride[2] = a.w_stride[3];
  g.x_stride[0] = a.x_stride[0], g.x_stride[1] = a.x_stride[2], g.x_stride[2] = a.x_stride[3];
  std::size_t used = 0;
  if (Status s = pack(p, plan, workspace, used, g, stream); !s) return s;
  g.parts = static_cast<float*>(take(workspace, used, plan.parts_bytes));
  g.rows = static_cast<int>(rows_of(a));
  g.tiles_m = static_cast<int>(ceil_div(g.rows, tiles_of(p)[plan.tile].m));
  g.tiles_n = static_cast<int>(ceil_div(a.out, tiles_of(p)[plan.tile].n));
  g.splits = plan.splits, g.steps = plan.steps, g.steps_per_split = plan.steps_per_split;
  g.by_ow = FastDivisor(static_cast<std::uint32_t>(a.ow));
  g.by_oh = FastDivisor(static_cast<std::uint32_t>(a.oh));
  g.vectors = conv_stores_in_vectors(a, p.dtype), g.flat = conv_is_flat(a);
  return dispatch_float(p.dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    Status s = launch_product<T>(g, plan.tile, p.warpgroups, stream);
    if (s && g.splits > 1) s = launch_finish<T>(g, stream);
    return s;
  });
}

}  // namespace rm::cuda_ops
