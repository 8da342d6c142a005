// Decoding: few query rows a key head. How its keys are shared among blocks, and the launches.
#include "_shim/launch_shim.hpp"
#include "sdpa/common.hpp"
#include "sdpa/kernels/sdpa_decode_f32_sm80.cuh"
#include "sdpa/kernels/sdpa_decode_few_sm90.cuh"
#include "sdpa/kernels/sdpa_decode_sm80.cuh"
#include "sdpa/kernels/sdpa_step_f32_sm80.cuh"

namespace rm::cuda_ops {
namespace {

/// What one decoding block reads at most, measured where few of them run.
constexpr double kBlockBytesPerUs = 57e3;

int padded_dim(const SdpaArgs& a) { return a.dim <= 64 ? 64 : a.dim <= 128 ? 128 : 256; }

/// How many blocks share the keys of one head, and whether they are a cluster.
struct Split {
  int blocks = 1;
  bool cluster = false;
};

/// Clusters of n decoding blocks, each of which fills a multiprocessor, that run at once: fewer
/// than their number suggests, for the multiprocessors of a cluster are of one of the card's parts.
int decode_clusters(int n) {
  if (n == 1) return std::max(1, multiprocessors());
  thread_local int known_device = -1, known[kDecodeCluster + 1] = {};
  const int device = card().device;
  if (device != known_device) std::fill(std::begin(known), std::end(known), 0);
  known_device = device;
  if (known[n] > 0) return known[n];
  using Shape = DecodeShape<128, 8, 16, 3>;
  auto* kernel = sdpa_decode<__nv_bfloat16, Shape>;
  const auto blocks = static_cast<unsigned>(n);
  int count = 0;
  if (allow_shared_memory("sdpa", kernel, Shape::kMemory)) {
    count = clusters_at_once(kernel, {blocks, Shape::kThreads, Shape::kMemory, blocks});
  }
  return known[n] = std::max(1, count);
}

/// As many blocks as make the card's turns of them shortest, at least 64 keys each. More than a
/// cluster holds only where few heads have so many keys that a second launch is repaid.
Split split_of(const SdpaArgs& a, bool is_f32) {
  const std::int64_t parts = is_f32 ? ceil_div(a.ratio * a.rows, kDecodeF32Rows) : 1;  // of a head
  const std::int64_t heads = std::max<std::int64_t>(1, std::int64_t{a.batch} * a.groups * parts);
  const std::int64_t sms = std::max(1, multiprocessors()),
                     bytes = std::int64_t{a.keys} * a.dim * (is_f32 ? 8 : 4);
  const std::int64_t most = std::max<std::int64_t>(1, ceil_div(a.keys, 64));
  const bool clusters = compute_capability() >= 90;
  if (!clusters || (4 * heads * kDecodeCluster < sms && heads * bytes > (8 << 20))) {
    return {static_cast<int>(std::clamp<std::int64_t>(sms / heads, 1, most)), false};
  }
  Split best{1, true};
  double least = 0;
  for (int n = 1; n <= std::min<std::int64_t>(most, kDecodeCluster); ++n) {
    const std::int64_t at_once = std::min<std::int64_t>(heads, decode_clusters(n));
    // Bytes a microsecond of a block: its share of the memory's, or what one multiprocessor reads.
    const double speed = std::min(block_rate(kBlockBytesPerUs),
                                  memory_rate(4.4e6) / static_cast<double>(at_once * n));
    const double us = static_cast<double>(ceil_div(heads, at_once)) *
                      (1.5 + static_cast<double>(bytes) / n / speed);
    if (n == 1 || us <= least) least = us, best.blocks = n;
  }
  return best;
}

/// fn of the shape for a head dim, the smaller one where a block has less shared memory.
template <class Fn>
auto with_decode_shape(std::int64_t dim, Fn&& fn) {
  if (dim <= 64) return with_fitting<DecodeShape<64, 8, 32, 3>, DecodeShape<64, 4, 32, 2>>(fn);
  if (dim <= 128) return with_fitting<DecodeShape<128, 8, 16, 3>, DecodeShape<128, 4, 16, 2>>(fn);
  return with_fitting<DecodeShape<256, 4, 16, 3>, DecodeShape<256, 2, 16, 2>>(fn);
}
template <int kRows, class Fn>
auto with_decode_f32_shape(std::int64_t dim, Fn&& fn) {
  if (dim <= 64) return with_fitting<DecodeF32Shape<64, kRows>, DecodeF32Shape<64, kRows, 2>>(fn);
  if (dim <= 128) {
    return with_fitting<DecodeF32Shape<128, kRows>, DecodeF32Shape<128, kRows, 2>>(fn);
  }
  return with_fitting<DecodeF32Shape<256, kRows>, DecodeF32Shape<256, kRows, 2>>(fn);
}

std::size_t partial_bytes(const SdpaArgs& a, Split split) {
  if (split.blocks <= 1 || split.cluster) return 0;
  return static_cast<std::size_t>(a.batch) * a.groups * split.blocks * kDecodeRows *
         (padded_dim(a) + 2) * 4;
}

/// The fewest blocks of a head that hold all its keys at once (sdpa_decode_few_sm90), twice as many
/// where the card has room: a tile a warp. Of eight warps, or of sixteen where a cluster of those does not
/// hold them. None where that takes more than a cluster, or so many blocks that the card takes them in turns.
struct Few {
  int blocks = 0, tiles = 0;  // of a block
};

template <class Fn>
auto with_few_shape(const SdpaArgs& a, Fn&& fn) {
  using Small = DecodeFewShape<64, 8, 12>;
  if (a.dim <= 64 && a.keys > Small::kTiles * Small::kKeys * kDecodeCluster) {
    return fn(DecodeFewShape<64, 16, 32>{});
  }
  if (a.dim <= 64) return fn(Small{});
  if (a.dim <= 128) return fn(DecodeFewShape<128, 8, 12>{});
  return fn(DecodeFewShape<256, 4, 6>{});
}

Few few_of(const SdpaArgs& a) {
  if (compute_capability() < 90) return {};
  return with_few_shape(a, [&](auto shape) -> Few {
    using Shape = decltype(shape);
    // Clusters of blocks that fill a multiprocessor do not take all of them: they lie in parts of the card.
    const std::int64_t sms = std::max(1, multiprocessors()),
                       room = Shape::kBlocks == 1 ? sms / 2 : Shape::kBlocks * sms;
    const std::int64_t tiles = std::max<std::int64_t>(1, ceil_div(a.keys, Shape::kKeys)),
                       heads = std::max<std::int64_t>(1, std::int64_t{a.batch} * a.groups),
                       fewest = ceil_div(tiles, Shape::kTiles),
                       most = Shape::kBlocks == 1 ? fewest : ceil_div(tiles, Shape::kTiles / 2);
    if (shared_why_not(Shape::kMemory) || fewest > kDecodeCluster || heads * fewest > room) return {};
    const std::int64_t blocks = std::clamp<std::int64_t>(
        sms / heads, fewest, std::min<std::int64_t>(most, kDecodeCluster));
    const std::int64_t span = ceil_div(tiles, blocks);
    return {static_cast<int>(ceil_div(tiles, span)), static_cast<int>(span)};
  });
}

/// `more`: what the kernel takes besides SdpaArgs.
template <class T, class Shape, class Kernel, class... More>
Status launch_decode_shape(Kernel* kernel, SdpaArgs a, bool overlap, Workspace workspace,
                           Stream stream, const More&... more) {
  constexpr bool kF32 = std::is_same_v<T, float>;
  const Split split = split_of(a, kF32);
  if (Status s = check_workspace("sdpa", partial_bytes(a, split), workspace, "workspace()"); !s) {
    return s;
  }
  a.splits = split.blocks, a.cluster = split.cluster;
  a.partial = static_cast<float*>(workspace.data);
  if (Status s = allow_shared_memory("sdpa", kernel, Shape::kMemory); !s) return s;
  a.early = overlap;
  const std::int64_t parts = kF32 ? ceil_div(a.ratio * a.rows, kDecodeF32Rows) : 1;
  const auto splits = static_cast<unsigned>(a.splits);
  const auto heads = static_cast<unsigned>(a.batch * a.groups);
  const Launch blocks{dim3(splits, heads, static_cast<unsigned>(parts)), Shape::kThreads,
                      Shape::kMemory, a.cluster ? splits : 1u, overlap};
  if (Status s = rm::cuda_ops::launch("sdpa", kernel, blocks, stream, a, more...);
      !s || a.splits == 1 || a.cluster) {
    return s;
  }
  const Launch rows{dim3(static_cast<unsigned>(a.ratio * a.rows), heads), Shape::kD / 2, 0, 1,
                    true};
  return rm::cuda_ops::launch("sdpa", sdpa_join<T, Shape::kD>, rows, stream, a);
}

/// A head's blocks are a cluster, or one: no second launch.
template <class Shape, class Kernel, class... More>
Status launch_few_shape(Kernel* kernel, SdpaArgs a, Few few, bool overlap, bool stable,
                        Stream stream, const More&... more) {
  a.splits = few.blocks, a.cluster = few.blocks > 1, a.span = few.tiles;
  a.early = overlap, a.stable = stable;
  if (Status s = allow_shared_memory("sdpa", kernel, Shape::kMemory); !s) return s;
  const auto blocks = static_cast<unsigned>(few.blocks);
  const Launch how{dim3(blocks, static_cast<unsigned>(a.batch * a.groups)), Shape::kThreads,
                   Shape::kMemory, blocks, overlap};
  return rm::cuda_ops::launch("sdpa", kernel, how, stream, a, more...);
}

template <class Step>
Status launch_step_of(const Sdpa& p, const Step& step, bool stable_caches, Workspace workspace,
                      Stream stream) {
  const SdpaArgs a = args_of(p);
  return with_type(p, [&](auto type) {
    using T = typename decltype(type)::type;
    if (const Few few = few_of(a); few.blocks > 0) {
      return with_few_shape(a, [&](auto shape) {
        using Shape = decltype(shape);
        return launch_few_shape<Shape>(sdpa_decode_few_step<T, Shape, Step>, a, few, p.overlap,
                                       stable_caches, stream, step);
      });
    }
    return with_decode_shape(a.dim, [&](auto shape) {
      using Shape = decltype(shape);
      return launch_decode_shape<T, Shape>(sdpa_decode_step<T, Shape, Step>, a, p.overlap, workspace,
                                           stream, step);
    });
  });
}

}  // namespace

const char* tensor_why_not(const Sdpa& p, int longest) {
  if (const char* why = sm80_why_not()) return why;
  if (p.q.dtype == DType::f32) return "float32: the tensor cores would round it";
  if (p.q.shape[3] > longest || p.q.shape[3] % 8 != 0) {
    return "the head dim is not a multiple of 8 within its range";
  }
  for (const Tensor* t : {&p.q, &p.k, &p.v, &p.o}) {
    if (!rows_aligned(*t)) return "rows are not 16-byte aligned";
  }
  if (p.q.shape[0] * p.q.shape[1] > 65535) return "more than 65535 heads";
  return nullptr;
}

const char* decode_why_not(const Sdpa& p) {
  if (p.q.shape[2] * (p.q.shape[1] / p.k.shape[1]) > kDecodeRows) {
    return "more than 16 query rows a key head";
  }
  if (const char* why = tensor_why_not(p, 256)) return why;
  return with_decode_shape(p.q.shape[3],
                           [](auto shape) { return shared_why_not(decltype(shape)::kMemory); });
}

const char* decode_f32_why_not(const Sdpa& p) {
  if (const char* why = sm80_why_not()) return why;
  if (p.q.dtype != DType::f32) return "not float32";
  if (p.q.shape[2] * (p.q.shape[1] / p.k.shape[1]) > kDecodeRows) {
    return "more than 16 query rows a key head";
  }
  if (p.q.shape[3] > 256 || p.q.shape[3] % 4 != 0) {
    return "the head dim is not a multiple of 4 up to 256";
  }
  if (!rows_aligned(p.k) || !rows_aligned(p.v)) return "rows are not 16-byte aligned";
  if (p.q.shape[0] * p.q.shape[1] > 65535) return "more than 65535 heads";
  return with_decode_f32_shape<kDecodeF32Rows>(
      p.q.shape[3], [](auto shape) { return shared_why_not(decltype(shape)::kMemory); });
}

Status launch_decode(const Sdpa& p, Workspace workspace, Stream stream) {
  const SdpaArgs a = args_of(p);
  return with_type(p, [&](auto type) {
    using T = typename decltype(type)::type;
    if (const Few few = few_of(a); few.blocks > 0) {
      return with_few_shape(a, [&](auto shape) {
        using Shape = decltype(shape);
        return launch_few_shape<Shape>(sdpa_decode_few<T, Shape>, a, few, p.overlap, false, stream);
      });
    }
    return with_decode_shape(a.dim, [&](auto shape) {
      using Shape = decltype(shape);
      return launch_decode_shape<T, Shape>(sdpa_decode<T, Shape>, a, p.overlap, workspace, stream);
    });
  });
}

Status launch_decode_f32(const Sdpa& p, Workspace workspace, Stream stream) {
  const SdpaArgs a = args_of(p);
  const auto launch = [&](auto shape) {
    using Shape = decltype(shape);
    return launch_decode_shape<float, Shape>(sdpa_decode_f32<Shape>, a, p.overlap, workspace,
                                             stream);
  };
  return a.ratio * a.rows == 1 ? with_decode_f32_shape<1>(a.dim, launch)
                               : with_decode_f32_shape<kDecodeF32Rows>(a.dim, launch);
}

std::size_t decode_workspace(const Sdpa& p) {
  const SdpaArgs a = args_of(p);
  const bool is_f32 = p.q.dtype == DType::f32;
  if (!is_f32 && few_of(a).blocks > 0) return 0;
  return partial_bytes(a, split_of(a, is_f32));
}

Status launch_decode_step(const Sdpa& p, const SdpaStepArgs& step, bool stable_caches,
                          Workspace workspace, Stream stream) {
  if (step.cos == nullptr) {
    return launch_step_of(p, SdpaPlainStepArgs{step}, stable_caches, workspace, stream);
  }
  return launch_step_of(p, step, stable_caches, workspace, stream);
}

Status launch_step_f32(const Sdpa& p, const SdpaStepArgs& step, bool stable_caches,
                       Workspace workspace, Stream stream) {
  SdpaArgs a = args_of(p);
  a.stable = stable_caches;
  const auto launch = [&](auto shape, const auto& of) {
    using Shape = decltype(shape);
    using Step = std::decay_t<decltype(of)>;
    return launch_decode_shape<float, Shape>(sdpa_step_f32<Shape, Step>, a, p.overlap, workspace,
                                             stream, of);
  };
  const auto of = [&](const auto& args) {
    return a.ratio == 1
               ? with_decode_f32_shape<1>(a.dim, [&](auto shape) { return launch(shape, args); })
               : with_decode_f32_shape<kDecodeF32Rows>(a.dim, [&](auto shape) { return launch(shape, args); });
  };
  return step.cos == nullptr ? of(SdpaPlainStepArgs{step}) : of(step);
}

}  // namespace rm::cuda_ops
