// The table of sdpa: checks, choice and launches.
#include "_shim/alias_shim.hpp"
#include "_shim/launch_shim.hpp"
#include "sdpa/common.hpp"
#include "sdpa/kernels/sdpa_flash_sm80.cuh"
#include "sdpa/kernels/sdpa_naive_any.cuh"
#include "sdpa/kernels/sdpa_step_naive_any.cuh"
#include "sdpa/kernels/sdpa_tiles_any.cuh"

namespace rm::cuda_ops {
namespace {

const char* flash_why_not(const Sdpa& p) {
  if (const char* why = tensor_why_not(p, 256)) return why;
  using T = __nv_bfloat16;  // float16 takes as much
  return shared_why_not(p.q.shape[3] <= 64    ? FlashShape<Flash16<T, 64>>::kMemory
                        : p.q.shape[3] <= 128 ? FlashShape<Flash16<T, 128>>::kMemory
                                              : FlashShape<Flash16<T, 256>>::kMemory);
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

/// What sdpa_wgmma_sm90a begins with pays from 512 keys or one turn of blocks on: BERT's 12 heads of 128
/// rows take 5.9 us on an H200, sdpa_flash_sm80 4.3 (8 batches 6.8, 6.3; 32 batches 13.0, 15.3; 512 rows
/// 7.5, 11.1).
bool few_short_rows(const Sdpa& p) {
  const std::int64_t blocks = p.q.shape[0] * p.q.shape[1] * ceil_div(p.q.shape[2], 128);
  return p.k.shape[2] <= 256 && blocks <= multiprocessors();
}

constexpr KernelRow<Sdpa> kRows[] = {
    {"sdpa_decode_sm80", "bfloat16, float16; up to 16 query rows a key head, D <= 256",
     decode_why_not, [](const Sdpa& p) { return 2 + move_us(key_bytes(p)); }, launch_decode},
    {"sdpa_decode_f32_sm80", "float32; up to 16 query rows a key head, D <= 256",
     decode_f32_why_not, [](const Sdpa& p) { return 2 + move_us(key_bytes(p)); },
     launch_decode_f32},
    {"sdpa_short_sm80", "bfloat16, float16; up to 128 keys, D 64", short_why_not, short_us,
     launch_short},
    {"sdpa_wgmma_sm90a", "bfloat16, float16; no mask, D <= 256", wgmma_why_not,
     [](const Sdpa& p) {
       const double late = few_short_rows(p) ? 3 : 0;
       return 8 + late + std::max(flops(p) / compute_rate(500e6), 4 * move_us(key_bytes(p)));
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

Status launch_step_naive(const Sdpa& p, const SdpaStepArgs& step, Stream stream) {
  const SdpaArgs a = args_of(p);
  const std::int64_t rows = static_cast<std::int64_t>(a.batch) * a.heads;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(ceil_div(rows, 4), 1 << 20));
  dispatch_float(p.q.dtype, [&](auto type) {
    sdpa_step_naive<typename decltype(type)::type><<<blocks, 128, 0, stream>>>(a, step);
  });
  return launch_status("sdpa");
}

std::size_t sdpa_workspace(const Sdpa& p) {
  if (p.q.rank != 4 || p.k.rank != 4 || p.k.shape[1] == 0 || numel(p.q) == 0 ||
      (decode_why_not(p) && decode_f32_why_not(p))) {
    return 0;
  }
  return decode_workspace(p);
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
