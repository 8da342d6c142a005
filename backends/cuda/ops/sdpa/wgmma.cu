// Launches of sdpa_wgmma_sm90a: tensor maps of q, k, v and the order of the blocks.
#include <algorithm>
#include <vector>

#include "sdpa/common.hpp"
#include "sdpa/kernels/sdpa_wgmma_sm90a.cuh"
#include "sdpa/tensor_map.hpp"

namespace rm::cuda_ops {
namespace {

/// The longest of `grid` blocks' work over the mean where sets of `set` heads are gone through.
double imbalance(const SdpaArgs& a, int rows, int keys, int set, int grid) {
  const int heads = a.batch * a.heads, blocks = static_cast<int>(ceil_div(a.rows, rows));
  std::vector<double> load(static_cast<std::size_t>(grid)), cost(static_cast<std::size_t>(blocks));
  double all = 0;
  for (int n = 0; n < blocks; ++n) {
    const std::int64_t seen =
        std::min<std::int64_t>(a.rows, (n + std::int64_t{1}) * rows) + a.causal_offset;
    const std::int64_t tiles =
        ceil_div(std::clamp<std::int64_t>(seen, 0, static_cast<std::int64_t>(a.keys)), keys);
    cost[n] = static_cast<double>(tiles) + 1.5;  // what a block takes besides its tiles
    all += cost[n] * heads;
  }
  int at = 0, step = 1;  // as wgmma_turn goes
  for (int first = 0; first < heads; first += set) {
    const int width = std::min(set, heads - first);
    for (int n = blocks - 1; n >= 0; --n) {
      for (int head = 0; head < width; ++head) {
        load[at] += cost[n];
        if (at + step < 0 || at + step == grid) {
          step = -step;
        } else {
          at += step;
        }
      }
    }
  }
  return *std::max_element(load.begin(), load.end()) * grid / all;
}

/// Heads at a time whose keys and values fit the L2 cache, so many that the blocks' work is even;
/// 0 where blocks need no order. Found once for problems that follow each other.
int heads_of_set(const SdpaArgs& a, int rows, int keys, int grid) {
  if (!a.causal) return 0;
  struct Known {
    std::int64_t offset = 0;
    int numbers[7] = {}, set = 0;
  };
  thread_local Known known;
  const int numbers[7] = {a.batch * a.heads, a.ratio, a.rows, a.keys, a.dim, rows, grid};
  if (known.offset == a.causal_offset && std::equal(numbers, numbers + 7, known.numbers)) {
    return known.set;
  }
  const std::int64_t bytes =
      std::max<std::int64_t>(1, static_cast<std::int64_t>(a.keys) * a.dim * 4);
  const int heads = a.batch * a.heads;
  const std::int64_t limit = std::max<std::int64_t>(1, (40 << 20) / bytes) * a.ratio;
  const int parts = static_cast<int>(ceil_div(heads, limit));
  int best = static_cast<int>(ceil_div(heads, parts));
  if (ceil_div(a.rows, rows) * heads <= 1 << 14) {  // else the rounds even it out
    double least = 1e30;
    for (int n = parts; n < parts + 8 && n <= heads; ++n) {
      const int set = static_cast<int>(ceil_div(heads, n));
      const double found = imbalance(a, rows, keys, set, grid);
      if (found < least) least = found, best = set;
    }
  }
  known.offset = a.causal_offset, known.set = best;
  std::copy(numbers, numbers + 7, known.numbers);
  return best;
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
  const int blocks = std::min(order.total, std::max(1, multiprocessors()));
  order.set = heads_of_set(a, Shape::kRows, Shape::kKeys, blocks);
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
