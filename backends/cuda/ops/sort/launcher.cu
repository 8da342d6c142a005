// The table of sort: checks, choice and launches.
#include <algorithm>
#include <cmath>

#include "_shim/alias_shim.hpp"
#include "sort/api.hpp"
#include "sort/kernels/sort_any.cuh"

namespace rm::cuda_ops {
namespace {

constexpr std::int64_t kMostOfWarp = 256;

bool is_wide(const Sort& p) { return size_of(p.x.dtype) == 8; }
std::int64_t length_of(const Sort& p) { return p.x.shape[p.axis]; }
std::int64_t lines_of(const Sort& p) { return numel(p.x) / std::max<std::int64_t>(1, length_of(p)); }

std::int64_t most_of_block(const Sort& p) {
  return is_wide(p) ? std::int64_t{WideItem::kMost} : std::int64_t{ShortItem::kMost};
}

SortArgs args_of(const Sort& p) {
  SortArgs a{};
  a.x = p.x.data, a.values = p.values.data;
  a.indices = static_cast<std::int64_t*>(p.indices.data);
  a.dtype = p.x.dtype, a.descending = p.descending;
  a.length = length_of(p), a.kept = p.values.shape[p.axis];
  a.x_step = p.x.stride[p.axis], a.values_step = p.values.stride[p.axis];
  a.indices_step = p.indices.stride[p.axis];
  Tensor x = p.x, values = p.values, indices = p.indices;
  x.shape[p.axis] = values.shape[p.axis] = indices.shape[p.axis] = 1;
  a.lines = walk_of<3>({&x, &values, &indices});
  return a;
}

/// fn of the type of items.
template <class Fn>
auto with_item(const Sort& p, Fn&& fn) {
  return is_wide(p) ? fn(Type<WideItem>{}) : fn(Type<ShortItem>{});
}

unsigned blocks_for(std::int64_t wanted) {
  return static_cast<unsigned>(std::min<std::int64_t>(wanted, 1 << 20));
}

Status launch_warps(const Sort& p, Workspace, Stream stream) {
  const SortArgs a = args_of(p);
  return with_item(p, [&](auto type) {
    using Item = typename decltype(type)::type;
    return dispatch_at_least<1, 2, 4, 8>(ceil_div(a.length, 32), [&](auto each) {
      return launch_overlapped("sort", sort_warps<Item, decltype(each)::value>,
                               blocks_for(ceil_div(a.lines.total, 4)), 128, 0, stream, a);
    });
  });
}

Status launch_blocks(const Sort& p, Workspace, Stream stream) {
  const SortArgs a = args_of(p);
  int places = 64;
  while (places < a.length) places *= 2;
  return with_item(p, [&](auto type) {
    using Item = typename decltype(type)::type;
    return launch_overlapped("sort", sort_blocks<Item>, blocks_for(a.lines.total),
                             std::min(512, places / 2), 0, stream, a, places);
  });
}

template <class Item>
Status launch_merges(const SortArgs& a, Item* items, Stream stream) {
  const std::int64_t total = a.lines.total * a.length;
  Item *from = items, *to = items + total;
  if (Status s = launch_overlapped("sort", sort_runs<Item>,
                                   blocks_for(a.lines.total * ceil_div(a.length, Item::kMost)), 512,
                                   0, stream, a, from);
      !s) {
    return s;
  }
  for (std::int64_t width = Item::kMost;; width *= 2, std::swap(from, to)) {
    const bool last = 2 * width >= a.length;
    const auto kernel = last ? sort_merge<Item, true> : sort_merge<Item, false>;
    Status s = launch_overlapped("sort", kernel, blocks_for(ceil_div(total, 256)), 256, 0, stream, a,
                                 static_cast<const Item*>(from), to, width);
    if (!s || last) return s;
  }
}

Status launch_long(const Sort& p, Workspace workspace, Stream stream) {
  if (length_of(p) <= most_of_block(p)) return launch_blocks(p, workspace, stream);  // one run
  return with_item(p, [&](auto type) {
    using Item = typename decltype(type)::type;
    return launch_merges(args_of(p), static_cast<Item*>(workspace.data), stream);
  });
}

double moved_us(const Sort& p) {
  return move_us(static_cast<double>(numel(p.x)) * size_of(p.x.dtype) +
                 static_cast<double>(numel(p.values)) * (size_of(p.x.dtype) + 8));
}

/// Steps of the network over `n` values.
double steps_of(double n) {
  const double doublings = std::log2(std::max(n, 2.0));
  return doublings * (doublings + 1) / 2;
}

/// Microseconds, roughly: each turn of the card's blocks takes the network's steps one by one.
double block_us(double lines, double n) {
  const double turns = std::max(1.0, lines / (4.0 * std::max(1, multiprocessors())));
  return turns * steps_of(n) * std::max(1.0, n / 1024) * 0.05;
}

constexpr KernelRow<Sort> kRows[] = {
    {"sort_warps_any", "lines of up to 256 values",
     [](const Sort& p) -> const char* {
       return length_of(p) <= kMostOfWarp ? nullptr : "lines of more than 256 values";
     },
     [](const Sort& p) { return moved_us(p) + 0.01 * steps_of(static_cast<double>(length_of(p))); },
     launch_warps},
    {"sort_blocks_any", "lines of up to 4096 values, of eight bytes 2048",
     [](const Sort& p) -> const char* {
       return length_of(p) <= most_of_block(p) ? nullptr : "lines longer than a block holds";
     },
     [](const Sort& p) {
       return moved_us(p) +
              block_us(static_cast<double>(lines_of(p)), static_cast<double>(length_of(p)));
     },
     launch_blocks},
    {"sort_merges_any", "any problem", [](const Sort&) -> const char* { return nullptr; },
     [](const Sort& p) {
       const auto most = static_cast<double>(most_of_block(p));
       const double runs = std::ceil(static_cast<double>(length_of(p)) / most);
       const double passes = 1 + std::ceil(std::log2(std::max(2.0, runs)));
       return 1 + (1 + passes) * moved_us(p) +
              block_us(static_cast<double>(lines_of(p)) * runs, most);
     },
     launch_long},
};

bool shapes_agree(const Sort& p) {
  if (p.x.rank < 1 || p.axis < 0 || p.axis >= p.x.rank || p.values.rank != p.x.rank ||
      !same_shape(p.values, p.indices)) {
    return false;
  }
  for (int d = 0; d < p.x.rank; ++d) {
    if (d == p.axis ? p.values.shape[d] > p.x.shape[d] : p.values.shape[d] != p.x.shape[d]) {
      return false;
    }
  }
  return p.x.shape[p.axis] < std::int64_t{1} << 31;
}

Status check(const Sort& p, const Workspace& workspace = {}) {
  if (p.values.dtype != p.x.dtype || p.indices.dtype != DType::i64 || !shapes_agree(p)) {
    return invalid(
        "[sort] expected values of x's dtype and indices of int64, both of x's shape but for up to as many "
        "elements along an axis of fewer than 2^31, got others");
  }
  return check_memory("sort", {{"values", &p.values}, {"indices", &p.indices}}, {{"x", &p.x}},
                      workspace);
}

}  // namespace

std::span<const KernelRow<Sort>> sort_rows() { return kRows; }

Status legal(const Sort& p) { return check(p); }

std::size_t sort_workspace(const Sort& p) {
  if (numel(p.values) == 0 || length_of(p) <= most_of_block(p)) return 0;
  const std::size_t item = is_wide(p) ? sizeof(WideItem) : sizeof(ShortItem);
  return 2 * item * static_cast<std::size_t>(numel(p.x));
}

Status sort(const Sort& p, const char* kernel, Workspace workspace, Stream stream) {
  if (Status s = check(p, workspace); !s) return s;
  if (numel(p.values) == 0) return {};
  const std::size_t needed = sort_workspace(p);
  if (Status s = check_workspace("sort", needed, workspace, "sort_workspace()"); !s) return s;
  const KernelRow<Sort>* row = nullptr;
  if (Status s = select_row<Sort>("sort", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, workspace, stream);
}

}  // namespace rm::cuda_ops
