// Convolutions of float32 without tensor cores: tile and split chosen by a rough estimate,
// launches.
#include "conv2d/common.hpp"
#include "conv2d/kernels/conv2d_tiles_any.cuh"

namespace rm::cuda_ops {
namespace {

struct Plan {
  int tile, depth, steps, splits, steps_per_split;
  std::size_t parts_bytes;
  double us;
};

std::int64_t rows_of(const ConvArgs& a) { return static_cast<std::int64_t>(a.n) * a.oh * a.ow; }

Plan plan_of(const ConvProblem& p) {
  const ConvArgs& a = p.args;
  Plan out{};
  out.depth = a.kh * a.kw * a.in;
  const double sms = std::max(1, multiprocessors()), rows = static_cast<double>(rows_of(a));
  for (const int tile : {128, 64}) {
    const double rate = block_rate(tile == 128 ? 3.0e5 : 2.2e5);  // operations a microsecond
    const int k = 1024 / tile, steps = static_cast<int>(ceil_div(out.depth, k));
    const double tiles =
        std::ceil(rows / tile) * static_cast<double>(ceil_div(a.out, tile)) * a.groups;
    const double step_us = 2.0 * tile * tile * k / rate;
    for (const int splits : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}) {
      const auto per = static_cast<int>(ceil_div(steps, splits));
      if (ceil_div(steps, per) != splits || (splits > 1 && per < 8)) continue;
      if (splits * a.groups > 65535) continue;  // the grid's third axis
      const double parts = splits > 1 ? rows * a.groups * a.out * 4 * splits : 0;
      const double us = std::ceil(tiles * splits / sms) * (per + 8) * step_us +
                        (splits > 1 ? 2 : 0) + 2 * parts / memory_rate(3e6);
      if (out.tile != 0 && us >= out.us) continue;
      out.tile = tile, out.steps = steps, out.splits = splits, out.steps_per_split = per;
      out.us = us, out.parts_bytes = static_cast<std::size_t>(parts);
    }
  }
  out.us += 3;
  return out;
}

template <int kTile>
Status launch_tile(const ConvTileArgs& t, ConvTileOrder order, Stream stream) {
  const auto kernel =
      order == ConvTileOrder::channels ? conv2d_tiles<kTile, ConvTileOrder::channels>
      : order == ConvTileOrder::places ? conv2d_tiles<kTile, ConvTileOrder::places>
                                       : conv2d_tiles<kTile, ConvTileOrder::columns>;
  constexpr int kShared = conv_tile_shared<kTile>();
  if (Status s = allow_shared_memory("conv2d", kernel, kShared); !s) return s;
  const dim3 grid(static_cast<unsigned>(t.g.tiles_m) * t.g.tiles_n, 1,
                  static_cast<unsigned>(t.g.conv.groups) * t.g.splits);
  return launch_overlapped("conv2d", kernel, grid, 256, kShared, stream, t);
}

/// dw of a group as a convolution: its images are x's channels, its channels x's images, its
/// weights dy, stride and dilation change places.
ConvProblem weight_as_image(const ConvWeightProblem& p, int g) {
  const ConvWeightArgs& a = p.args;
  ConvProblem out{{}, p.dtype};
  ConvArgs& c = out.args;
  const auto swapped = [](const std::int64_t(&from)[4], std::int64_t(&to)[4]) {
    to[0] = from[1], to[1] = from[0], to[2] = from[2], to[3] = from[3];
  };
  swapped(a.x_stride, c.x_stride), swapped(a.dy_stride, c.w_stride);
  swapped(a.dw_stride, c.y_stride);
  const int bytes = size_of(p.dtype);
  c.x = static_cast<const char*>(a.x) + g * a.in * a.x_stride[1] * bytes;
  c.w = static_cast<const char*>(a.dy) + g * a.out * a.dy_stride[1] * bytes;
  c.y = static_cast<char*>(a.dw) + g * a.out * a.dw_stride[0] * bytes;
  c.n = a.in, c.groups = 1, c.in = a.n, c.out = a.out, c.h = a.h, c.wd = a.wd;
  c.oh = a.kh, c.ow = a.kw, c.kh = a.oh, c.kw = a.ow;
  for (int d = 0; d < 2; ++d) {
    c.map.mul[d] = a.map.step[d], c.map.off[d] = a.map.off[d], c.map.step[d] = a.map.mul[d];
    c.map.div[d] = 1;
  }
  c.channels_last = c.y_stride[1] == 1;
  return out;
}

Status launch_in(const ConvProblem& p, ConvTileOrder order, Workspace workspace, Stream stream) {
  const Plan plan = plan_of(p);
  if (Status s = check_workspace("conv2d", plan.parts_bytes, workspace, kWorkspaceFrom); !s)
    return s;
  const ConvArgs& a = p.args;
  ConvTileArgs t{};
  ConvGemmArgs& g = t.g;
  g.conv = a, g.parts = static_cast<float*>(workspace.data);
  g.rows = static_cast<int>(rows_of(a)), g.padded = a.in;
  g.tiles_m = static_cast<int>(ceil_div(g.rows, plan.tile));
  g.tiles_n = static_cast<int>(ceil_div(a.out, plan.tile));
  g.splits = plan.splits, g.steps = plan.steps, g.steps_per_split = plan.steps_per_split;
  g.by_ow = FastDivisor(static_cast<std::uint32_t>(a.ow));
  g.by_oh = FastDivisor(static_cast<std::uint32_t>(a.oh));
  g.vectors = conv_stores_in_vectors(a, p.dtype), g.flat = conv_is_flat(a);
  t.depth = plan.depth, t.by_in = FastDivisor(static_cast<std::uint32_t>(a.in));
  t.by_kw = FastDivisor(static_cast<std::uint32_t>(a.kw));
  const Status s =
      plan.tile == 128 ? launch_tile<128>(t, order, stream) : launch_tile<64>(t, order, stream);
  if (!s) return s;
  return g.splits > 1 ? launch_conv_finish(g, p.dtype, stream) : Status{};
}

}  // namespace

const char* conv_tiles_why_not(const ConvProblem& p) {
  const ConvArgs& a = p.args;
  if (p.dtype != DType::f32) return "16-bit types have tensor cores";
  if (a.in == 0 || a.kh == 0 || a.kw == 0) return "nothing to sum";
  if (rows_of(a) >= 0x7fff0000) return "2^31 places or more";
  if (static_cast<std::int64_t>(a.kh) * a.kw * a.in >= 1 << 30) return "a sum of 2^30 or more";
  if (a.groups > 65535) return "more than 65535 groups";  // the grid's third axis
  if (ceil_div(rows_of(a), 64) * ceil_div(a.out, 64) > 0x3fffffff) return "too many tiles";
  return nullptr;
}
double conv_tiles_us(const ConvProblem& p) { return plan_of(p).us; }
std::size_t conv_tiles_workspace(const ConvProblem& p) { return plan_of(p).parts_bytes; }

Status launch_conv_tiles(const ConvProblem& p, Workspace workspace, Stream stream) {
  return launch_in(p, p.args.x_stride[1] == 1 ? ConvTileOrder::channels : ConvTileOrder::places,
                   workspace, stream);
}

const char* conv_tiles_weight_why_not(const ConvWeightProblem& p) {
  return p.args.groups > 16 ? "more than 16 groups" : conv_tiles_why_not(weight_as_image(p, 0));
}
double conv_tiles_weight_us(const ConvWeightProblem& p) {
  return p.args.groups * 2 * conv_tiles_us(weight_as_image(p, 0));
}
std::size_t conv_tiles_weight_workspace(const ConvWeightProblem& p) {
  return conv_tiles_workspace(weight_as_image(p, 0));
}
Status launch_conv_tiles_weight(const ConvWeightProblem& p, Workspace workspace, Stream stream) {
  Status s;
  for (int g = 0; s && g < p.args.groups; ++g) {
    s = launch_in(weight_as_image(p, g), ConvTileOrder::columns, workspace, stream);
  }
  return s;
}

}  // namespace rm::cuda_ops
