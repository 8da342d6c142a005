// Launches of sdpa_wgmma_sm90a: tensor maps of q, k, v and the order of the blocks.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "_shim/launch_shim.hpp"
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

/// How many blocks of `rows` rows a head: the rest is blocks of 64 shared rows, which take about a
/// third of the time and are gone through last, so that the card's last turn is full. Found once
/// for problems that follow each other.
int whole_blocks(const SdpaArgs& a, int rows, int keys, int sms) {
  struct Known {
    int numbers[6] = {}, whole = 0;
  };
  thread_local Known known;
  const int numbers[6] = {a.batch * a.heads, a.rows, a.keys, rows, keys, sms};
  if (std::equal(numbers, numbers + 6, known.numbers)) return known.whole;
  const std::int64_t heads = numbers[0];
  const double tiles = static_cast<double>(ceil_div(a.keys, keys));
  const double whole_us = tiles + 1.5, shared_us = tiles / (rows / 64) + 2.5;  // in tiles
  const int all = static_cast<int>(ceil_div(a.rows, rows));
  double least = 0;
  int best = all;
  for (int n = all; n >= 0 && n + 4 >= all; --n) {
    const std::int64_t rest = std::max<std::int64_t>(0, a.rows - std::int64_t{n} * rows);
    const std::int64_t many = n * heads, few = ceil_div(rest, 64) * heads;
    const std::int64_t full = many / sms, left = many % sms;  // in the last turn of whole blocks
    // Shared ones go to those without a block in that turn first, then to all.
    const std::int64_t idle = left ? sms - left : 0,
                       later = few > idle ? ceil_div(few - idle, sms) : 0;
    const double us = std::max((full + (left ? 1 : 0)) * whole_us + later * shared_us,
                               full * whole_us + (few && idle ? 1 + later : later) * shared_us);
    if (n == all || us < 0.97 * least) least = us, best = n;
  }
  std::copy(numbers, numbers + 6, known.numbers);
  return known.whole = best;
}

/// Shared: the shape of the second kernel's blocks, void: there is none.
template <class T, class Shape, class Shared = void>
Status launch_shape(const Sdpa& p, Stream stream) {
  const SdpaArgs a = args_of(p);
  const int sms = std::max(1, multiprocessors()), heads = a.batch * a.heads;
  CUtensorMap q, k, v;
  if (Status s = encode_tiles(p.q, Shape::kRows, &q); !s) return s;
  if (Status s = encode_tiles(p.k, Shape::kKeys, &k); !s) return s;
  if (Status s = encode_tiles(p.v, Shape::kKeys, &v); !s) return s;
  WgmmaOrder order{};
  order.blocks = static_cast<int>(ceil_div(a.rows, Shape::kRows));
  if constexpr (!std::is_void_v<Shared>) {
    if (!a.causal) order.blocks = whole_blocks(a, Shape::kRows, Shape::kKeys, sms);
  }
  order.total = order.blocks * heads;
  order.pieces_from = order.blocks * Shape::kRows;
  if (order.total > 0) {
    auto* kernel = sdpa_wgmma<T, Shape>;
    if (Status s = allow_shared_memory("sdpa", kernel, Shape::kMemory); !s) return s;
    const int blocks = std::min(order.total, sms);
    order.set = heads_of_set(a, Shape::kRows, Shape::kKeys, blocks);
    kernel<<<blocks, Shape::kThreads, Shape::kMemory, stream>>>(a, order, q, k, v);
    if (Status s = launch_status("sdpa"); !s) return s;
  }
  if constexpr (!std::is_void_v<Shared>) {
    if (a.rows > order.pieces_from) {
      order.pieces = static_cast<int>(ceil_div(a.rows - order.pieces_from, 64));
      const bool after_another = order.total > 0;
      order.total = order.pieces * heads;
      auto* kernel = sdpa_wgmma<T, Shared>;
      if (Status s = allow_shared_memory("sdpa", kernel, Shared::kMemory); !s) return s;
      const Launch how{static_cast<unsigned>(order.total), Shared::kThreads, Shared::kMemory, 1,
                       after_another};
      return launch("sdpa", kernel, how, stream, a, order, q, k, v);
    }
  }
  return {};
}

}  // namespace

const char* wgmma_why_not(const Sdpa& p) {
  if (const char* why = sm90a_why_not()) return why;
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
    if (p.q.shape[3] <= 64) {
      return launch_shape<T, WgmmaShape<64, 3, 128, 2>, WgmmaShape<64, 3, 128, 1, true>>(p, stream);
    }
    if (p.q.shape[3] <= 128) return launch_shape<T, WgmmaShape<128, 2, 128, 2>>(p, stream);
    return launch_shape<T, WgmmaShape<256, 2, 64, 1>>(p, stream);
  });
}

}  // namespace rm::cuda_ops
