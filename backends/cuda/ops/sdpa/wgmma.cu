// Launches of sdpa_wgmma_sm90a: tensor maps of q, k, v and the order of the blocks.
#include "sdpa/common.hpp"
#include "sdpa/kernels/sdpa_wgmma_sm90a.cuh"
#include "sdpa/tensor_map.hpp"

namespace rm::cuda_ops {
namespace {

/// Heads at a time whose keys and values fit the L2 cache; 0 where blocks need no order.
int heads_of_set(const SdpaArgs& a) {
  if (!a.causal) return 0;
  const std::int64_t bytes = static_cast<std::int64_t>(a.keys) * a.dim * 4;
  const std::int64_t groups =
      std::max<std::int64_t>(1, (24 << 20) / std::max<std::int64_t>(1, bytes));
  return static_cast<int>(std::min<std::int64_t>(groups * a.ratio, a.batch * a.heads));
}

template <class T, class Shape>
Status launch_shape(const Sdpa& p, Stream stream) {
  const SdpaArgs a = args_of(p);
  CUtensorMap q, k, v;
  if (Status s = encode_tiles(p.q, Shape::kRows, &q); !s) return s;
  if (Status s = encode_tiles(p.k, Shape::kKeys, &k); !s) return s;
  if (Status s = encode_tiles(p.v, Shape::kKeys, &v); !s) return s;
  auto* kernel = sdpa_wgmma<T, Shape>;
  if (Status s = allow_shared_memory("sdpa", kernel, Shape::kMemory); !s) return s;
  WgmmaOrder order{};
  order.blocks = static_cast<int>(ceil_div(a.rows, Shape::kRows));
  order.total = order.blocks * a.batch * a.heads;
  order.set = heads_of_set(a);
  const int blocks = std::min(order.total, std::max(1, multiprocessors()));
  kernel<<<blocks, Shape::kThreads, Shape::kMemory, stream>>>(a, order, q, k, v);
  return launch_status("sdpa");
}

}  // namespace

const char* wgmma_why_not(const Sdpa& p) {
  if (compute_capability() != 90) return "the device is not sm_90";
  if (p.q.dtype == DType::f32) return "float32: the tensor cores would round it";
  if (p.q.shape[3] > 256 || p.q.shape[3] % 8 != 0) {
    return "the head dim is not a multiple of 8 up to 256";
  }
  if (p.mask != nullptr) return "a mask";
  if (!(p.scale > 0.0f)) return "the scale is not positive";
  if (p.k.shape[2] == 0) return "no keys";
  for (const Tensor* t : {&p.q, &p.k, &p.v}) {
    if (const char* why = tiles_why_not(*t)) return why;
  }
  if (!rows_aligned(p.o)) return "rows are not 16-byte aligned";
  if (p.q.shape[0] * p.q.shape[1] * ceil_div(p.q.shape[2], 64) > 1 << 30) return "too many rows";
  return nullptr;
}

Status launch_wgmma(const Sdpa& p, Workspace, Stream stream) {
  return with_type(p, [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.q.shape[3] <= 64) return launch_shape<T, WgmmaShape<64, 3, 128, 2>>(p, stream);
    if (p.q.shape[3] <= 128) return launch_shape<T, WgmmaShape<128, 2, 128, 2>>(p, stream);
    return launch_shape<T, WgmmaShape<256, 2, 64, 1>>(p, stream);
  });
}

}  // namespace rm::cuda_ops
