// The table of sdpa: checks, choice and launches.
#include "_shim/alias_shim.hpp"
#include "_shim/launch_shim.hpp"
#include "sdpa/common.hpp"
#include "sdpa/kernels/sdpa_decode_f32_sm80.cuh"
#include "sdpa/kernels/sdpa_decode_sm80.cuh"
#include "sdpa/kernels/sdpa_flash_sm80.cuh"
#include "sdpa/kernels/sdpa_naive_any.cuh"
#include "sdpa/kernels/sdpa_tiles_any.cuh"

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

}  // namespace

const char* decode_why_not(const Sdpa& p) {
  if (p.q.shape[2] * (p.q.shape[1] / p.k.shape[1]) > kDecodeRows) {
    return "more than 16 query rows a key head";
  }
  if (const char* why = tensor_why_not(p, 256)) return why;
  return with_decode_shape(p.q.shape[3],
                           [](auto shape) { return shared_why_not(decltype(shape)::kMemory); });
}

namespace {

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

const char* flash_why_not(const Sdpa& p) {
  if (const char* why = tensor_why_not(p, 256)) return why;
  using T = __nv_bfloat16;  // float16 takes as much
  return shared_why_not(p.q.shape[3] <= 64    ? FlashShape<Flash16<T, 64>>::kMemory
                        : p.q.shape[3] <= 128 ? FlashShape<Flash16<T, 128>>::kMemory
                                              : FlashShape<Flash16<T, 256>>::kMemory);
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

template <class Warp>
Status launch_flash_shape(const SdpaArgs& a, Stream stream) {
  using Shape = FlashShape<Warp>;
  if (Status s = allow_shared_memory("sdpa", sdpa_flash<Warp>, Shape::kMemory); !s) return s;
  const dim3 grid(static_cast<unsigned>(ceil_div(a.rows, Shape::kRows)),
                  static_cast<unsigned>(a.batch * a.heads));
  sdpa_flash<Warp><<<grid, Shape::kThreads, Shape::kMemory, stream>>>(a);
  return launch_status("sdpa");
}

Status launch_decode(const Sdpa& p, Workspace workspace, Stream stream) {
  const SdpaArgs a = args_of(p);
  return with_type(p, [&](auto type) {
    using T = typename decltype(type)::type;
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

Status launch_flash(const Sdpa& p, Workspace, Stream stream) {
  const SdpaArgs a = args_of(p);
  const bool few = ceil_div(a.rows, 128) * a.batch * a.heads < multiprocessors();
  return with_type(p, [&](auto type) {
    using T = typename decltype(type)::type;
    if (a.dim <= 64) {
      return few ? launch_flash_shape<Flash16<T, 64, 1>>(a, stream)
                 : launch_flash_shape<Flash16<T, 64>>(a, stream);
    }
    if (a.dim <= 128) {
      return few ? launch_flash_shape<Flash16<T, 128, 1>>(a, stream)
                 : launch_flash_shape<Flash16<T, 128>>(a, stream);
    }
    return launch_flash_shape<Flash16<T, 256>>(a, stream);
  });
}

Status launch_flash_f32(const Sdpa& p, Workspace, Stream stream) {
  const SdpaArgs a = args_of(p);
  if (a.dim <= 64) return launch_flash_shape<FlashF32<64>>(a, stream);
  return launch_flash_shape<FlashF32<128>>(a, stream);
}

Status launch_naive(const Sdpa& p, Workspace, Stream stream) {
  const SdpaArgs a = args_of(p);
  const std::int64_t rows = static_cast<std::int64_t>(a.batch) * a.heads * a.rows;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(ceil_div(rows, 4), 1 << 20));
  dispatch_float(p.q.dtype, [&](auto type) {
    sdpa_naive<typename decltype(type)::type><<<blocks, 128, 0, stream>>>(a);
  });
  return launch_status("sdpa");
}

template <class T, int kD>
Status launch_tiles_dim(const SdpaArgs& a, Stream stream) {
  if (Status s = allow_shared_memory("sdpa", sdpa_tiles<T, kD>, tiles_memory(kD)); !s) return s;
  const dim3 grid(static_cast<unsigned>(ceil_div(a.rows, kTilesRows)),
                  static_cast<unsigned>(a.batch * a.heads));
  sdpa_tiles<T, kD><<<grid, kTilesThreads, tiles_memory(kD), stream>>>(a);
  return launch_status("sdpa");
}

Status launch_tiles(const Sdpa& p, Workspace, Stream stream) {
  const SdpaArgs a = args_of(p);
  return dispatch_float(p.q.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (a.dim <= 64) return launch_tiles_dim<T, 64>(a, stream);
    if (a.dim <= 128) return launch_tiles_dim<T, 128>(a, stream);
    return launch_tiles_dim<T, 256>(a, stream);
  });
}

const char* flash_f32_why_not(const Sdpa& p) {
  if (const char* why = sm80_why_not()) return why;
  if (p.q.dtype != DType::f32) return "not float32";
  if (p.q.shape[3] > 128 || p.q.shape[3] % 4 != 0) {
    return "the head dim is not a multiple of 4 up to 128";
  }
  for (const Tensor* t : {&p.q, &p.k, &p.v}) {
    if (!rows_aligned(*t)) return "rows are not 16-byte aligned";
  }
  if (p.q.shape[0] * p.q.shape[1] > 65535) return "more than 65535 heads";
  return shared_why_not(p.q.shape[3] <= 64 ? FlashShape<FlashF32<64>>::kMemory
                                           : FlashShape<FlashF32<128>>::kMemory);
}

const char* plain_tiles_why_not(const Sdpa& p) {
  if (p.q.shape[3] > 256) return "the head dim is above 256";
  if (p.q.shape[0] * p.q.shape[1] > 65535) return "more than 65535 heads";
  return shared_why_not(tiles_memory(p.q.shape[3] <= 64 ? 64 : p.q.shape[3] <= 128 ? 128 : 256));
}

double key_bytes(const Sdpa& p) { return static_cast<double>(numel(p.k)) * 2 * size_of(p.k.dtype); }
double flops(const Sdpa& p) {
  return 4.0 * static_cast<double>(numel(p.q)) * static_cast<double>(p.k.shape[2]);
}

/// Blocks of `tile` query rows in turns on the card, each of which goes through all keys by itself.
double plain_us(const Sdpa& p, int tile, double flops_per_us) {
  const std::int64_t blocks = p.q.shape[0] * p.q.shape[1] * ceil_div(p.q.shape[2], tile);
  const std::int64_t turns = ceil_div(blocks, std::max(1, multiprocessors()));
  const double one = 4.0 * tile * static_cast<double>(p.k.shape[2] * p.q.shape[3]);
  return 10 + static_cast<double>(turns) * one / flops_per_us;
}
double tiles_us(const Sdpa& p) { return plain_us(p, kTilesRows, multiprocessor_rate(24e6)); }
double flash_f32_us(const Sdpa& p) { return plain_us(p, 128, multiprocessor_rate(60e6)); }
/// A warp goes through all keys of a query row by itself.
double naive_us(const Sdpa& p) {
  return 20 + std::max(flops(p) / compute_rate(1e6),
                       static_cast<double>(p.k.shape[2] * p.q.shape[3]) / 100);
}

constexpr KernelRow<Sdpa> kRows[] = {
    {"sdpa_decode_sm80", "bfloat16, float16; up to 16 query rows a key head, D <= 256",
     decode_why_not, [](const Sdpa& p) { return 2 + move_us(key_bytes(p)); }, launch_decode},
    {"sdpa_decode_f32_sm80", "float32; up to 16 query rows a key head, D <= 256",
     decode_f32_why_not, [](const Sdpa& p) { return 2 + move_us(key_bytes(p)); },
     launch_decode_f32},
    {"sdpa_wgmma_sm90a", "bfloat16, float16; no mask, D <= 256", wgmma_why_not,
     [](const Sdpa& p) {
       return 8 + std::max(flops(p) / compute_rate(500e6), 4 * move_us(key_bytes(p)));
     },
     launch_wgmma},
    {"sdpa_flash_sm80", "bfloat16, float16; D <= 256", flash_why_not,
     [](const Sdpa& p) {
       return 8 + std::max(flops(p) / compute_rate(300e6), 4 * move_us(key_bytes(p)));
     },
     launch_flash},
    {"sdpa_flash_f32_sm80", "float32; D <= 128", flash_f32_why_not, flash_f32_us, launch_flash_f32},
    {"sdpa_tiles_any", "D <= 256, by multiply-adds", plain_tiles_why_not, tiles_us, launch_tiles},
    {"sdpa_naive_any", "any problem with D <= 512",
     [](const Sdpa&) -> const char* { return nullptr; }, naive_us, launch_naive},
};

}  // namespace

std::span<const KernelRow<Sdpa>> sdpa_rows() { return kRows; }

std::size_t decode_workspace(const Sdpa& p) {
  const SdpaArgs a = args_of(p);
  return partial_bytes(a, split_of(a, false));
}

Status launch_decode_step(const Sdpa& p, const SdpaStepArgs& step, Workspace workspace,
                          Stream stream) {
  const SdpaArgs a = args_of(p);
  return with_type(p, [&](auto type) {
    using T = typename decltype(type)::type;
    return with_decode_shape(a.dim, [&](auto shape) {
      using Shape = decltype(shape);
      return launch_decode_shape<T, Shape>(sdpa_decode_step<T, Shape>, a, p.overlap, workspace,
                                           stream, step);
    });
  });
}

std::size_t sdpa_workspace(const Sdpa& p) {
  if (p.q.rank != 4 || p.k.rank != 4 || p.k.shape[1] == 0 || numel(p.q) == 0 ||
      (decode_why_not(p) && decode_f32_why_not(p))) {
    return 0;
  }
  const SdpaArgs a = args_of(p);
  return partial_bytes(a, split_of(a, p.q.dtype == DType::f32));
}

Status legal(const Sdpa& p) {
  if (Status s = check_sdpa(p); !s) return s;
  return check_memory(
      "sdpa", {{"o", &p.o}, {"lse", p.lse}},
      {{"q", &p.q}, {"k", &p.k}, {"v", &p.v}, {"mask", p.mask}, {"lengths", p.lengths}});
}

Status sdpa(const Sdpa& p, const char* kernel, Workspace workspace, Stream stream) {
  if (Status s = check_sdpa(p); !s) return s;
  if (Status s = check_memory(
          "sdpa", {{"o", &p.o}, {"lse", p.lse}},
          {{"q", &p.q}, {"k", &p.k}, {"v", &p.v}, {"mask", p.mask}, {"lengths", p.lengths}},
          workspace);
      !s) {
    return s;
  }
  if (Status s = check_workspace("sdpa", 0, workspace); !s) return s;
  if (numel(p.o) == 0) return {};
  const KernelRow<Sdpa>* row = nullptr;
  if (Status s = select_row<Sdpa>("sdpa", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, workspace, stream);
}

}  // namespace rm::cuda_ops
