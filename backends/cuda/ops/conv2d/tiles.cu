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
    const double rate = tile == 128 ? 3.0e5 : 2.2e5;  // operations a microsecond
    const int k = 1024 / tile, steps = static_cast<int>(ceil_div(out.depth, k));
    const double tiles =
        std::ceil(rows / tile) * static_cast<double>(ceil_div(a.out, tile)) * a.groups;
    const double step_us = 2.0 * tile * tile * k / rate;
    for (const int splits : {1, 2, 3, 4, 6, 8, 12, 16}) {
      const auto per = static_cast<int>(ceil_div(steps, splits));
      if (ceil_div(steps, per) != splits || (splits > 1 && per < 8)) continue;
      const double parts = splits > 1 ? rows * a.groups * a.out * 4 * splits : 0;
      const double us = std::ceil(tiles * splits / sms) * (per + 8) * step_us +
                        (splits > 1 ? 2 : 0) + 2 * parts / 3e6;
      if (out.tile != 0 && us >= out.us) continue;
      out.tile = tile, out.steps = steps, out.splits = splits, out.steps_per_split = per;
      out.us = us, out.parts_bytes = static_cast<std::size_t>(parts);
    }
  }
  out.us += 3;
  return out;
}

template <int kTile>
Status launch_tile(const ConvTileArgs& t, bool dense, Stream stream) {
  const auto kernel = dense ? conv2d_tiles<kTile, true> : conv2d_tiles<kTile, false>;
  constexpr int kShared = conv_tile_shared<kTile>();
  if (Status s = allow_shared_memory("conv2d", kernel, kShared); !s) return s;
  const dim3 grid(static_cast<unsigned>(t.g.tiles_m) * t.g.tiles_n, 1,
                  static_cast<unsigned>(t.g.conv.groups) * t.g.splits);
  kernel<<<grid, 256, kShared, stream>>>(t);
  return launch_status("conv2d");
}

}  // namespace

const char* conv_tiles_why_not(const ConvProblem& p) {
  const ConvArgs& a = p.args;
  if (p.dtype != DType::f32) return "16-bit types have tensor cores";
  if (a.in == 0 || a.kh == 0 || a.kw == 0) return "nothing to sum";
  if (rows_of(a) >= 0x7fff0000) return "2^31 places or more";
  if (static_cast<std::int64_t>(a.kh) * a.kw * a.in >= 1 << 30) return "a sum of 2^30 or more";
  if (a.groups > 4000) return "more than 4000 groups";  // with splits the grid's third axis
  if (ceil_div(rows_of(a), 64) * ceil_div(a.out, 64) > 0x3fffffff) return "too many tiles";
  return nullptr;
}
double conv_tiles_us(const ConvProblem& p) { return plan_of(p).us; }
std::size_t conv_tiles_workspace(const ConvProblem& p) { return plan_of(p).parts_bytes; }

Status launch_conv_tiles(const ConvProblem& p, Workspace workspace, Stream stream) {
  const Plan plan = plan_of(p);
  if (Status s = check_workspace(plan.parts_bytes, workspace); !s) return s;
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
  g.vectors = conv_stores_in_vectors(a, p.dtype);
  t.depth = plan.depth, t.by_in = FastDivisor(static_cast<std::uint32_t>(a.in));
  t.by_kw = FastDivisor(static_cast<std::uint32_t>(a.kw));
  const bool dense = a.x_stride[1] == 1;
  if (Status s =
          plan.tile == 128 ? launch_tile<128>(t, dense, stream) : launch_tile<64>(t, dense, stream);
      !s)
    return s;
  return g.splits > 1 ? launch_conv_finish(g, p.dtype, stream) : Status{};
}

}  // namespace rm::cuda_ops
