// The table of copy: checks, choice and launches.
#include "_shim/alias_shim.hpp"
#include "_shim/launch_shim.hpp"
#include "copy/api.hpp"
#include "copy/kernels/copy_any.cuh"

namespace rm::cuda_ops {
namespace {

Walk<2> walk_of(const Copy& p) { return cuda_ops::walk_of<2>({&p.x, &p.y}); }

/// fn(E{}) for the unsigned integer of an element's size.
template <class Fn>
Status with_element(int bytes, Fn&& fn) {
  if (bytes == 1) return fn(std::uint8_t{});
  if (bytes == 2) return fn(std::uint16_t{});
  if (bytes == 4) return fn(std::uint32_t{});
  return fn(std::uint64_t{});
}

CopyWalk divided(const Walk<2>& w) {
  CopyWalk out;
  out.rank = w.rank, out.total = static_cast<std::uint32_t>(w.total);
  for (int d = 0; d < w.rank; ++d) {
    out.by[d] = FastDivisor(static_cast<std::uint32_t>(w.shape[d]));
    for (int t = 0; t < 2; ++t) out.stride[t][d] = w.stride[t][d];
  }
  return out;
}
/// What 32-bit counters hold, with the steps that a block takes past the end.
constexpr std::int64_t kCounted = 0x7fff0000;

/// One launch of `parts` walks over E's, each of less than kCounted.
template <class E, int kParts>
Status launch_elements(CopyParts<kParts>& all, Stream stream) {
  std::uint32_t blocks = 0;
  for (int k = 0; k < all.parts; ++k) {
    all.first_block[k] = blocks;
    blocks += static_cast<std::uint32_t>(ceil_div(all.part[k].walk.total, 1024));
  }
  return launch_overlapped("copy", copy_elements<E, kParts>, blocks, 256, 0, stream, all);
}

const char* vector_why_not(const Copy& p) {
  const Walk<2> w = walk_of(p);
  const int size = size_of(p.x.dtype), per = 16 / size;
  if (w.rank == 0) return "a single element";
  if (reinterpret_cast<std::uintptr_t>(p.x.data) % 16 ||
      reinterpret_cast<std::uintptr_t>(p.y.data) % 16)
    return "x or y is not 16-byte aligned";
  for (int t = 0; t < 2; ++t) {
    if (w.stride[t][w.rank - 1] != 1) return "the last axis is not dense in both";
    for (int d = 0; d < w.rank - 1; ++d) {
      if (w.stride[t][d] % per != 0) return "rows are not 16-byte aligned";
    }
  }
  if (w.total / per >= kCounted) return "32 GiB or more";
  return w.shape[w.rank - 1] % per == 0 ? nullptr : "rows are not whole 16-byte vectors";
}

Walk<2> vectors_of(const Copy& p) {
  Walk<2> w = walk_of(p);
  const int per = 16 / size_of(p.x.dtype);
  w.shape[w.rank - 1] /= per, w.total /= per;
  for (int t = 0; t < 2; ++t) {
    for (int d = 0; d < w.rank - 1; ++d) w.stride[t][d] /= per;
  }
  return w;
}

Status launch_vector(const Copy& p, Workspace, Stream stream) {
  CopyParts<1> all{{}, 1, {{p.x.data, p.y.data, divided(vectors_of(p))}}};
  return launch_elements<uint4>(all, stream);
}

/// The axis along which x is dense, or -1.
int dense_axis(const Walk<2>& w) {
  for (int d = 0; d < w.rank - 1; ++d) {
    if (w.stride[0][d] == 1) return d;
  }
  return -1;
}

const char* tiled_why_not(const Copy& p) {
  const Walk<2> w = walk_of(p);
  if (w.rank < 2 || w.stride[1][w.rank - 1] != 1) return "y's last axis is not dense";
  return dense_axis(w) < 0 ? "x is dense along no other axis" : nullptr;
}

/// Packs of `per` elements along x's dense axis a and along y's, the last one, start on whole
/// packs.
bool tiles_in_packs(const Copy& p, const Walk<2>& w, int a, int per) {
  const int last = w.rank - 1, bytes = per * size_of(p.x.dtype);
  if (reinterpret_cast<std::uintptr_t>(p.x.data) % bytes ||
      reinterpret_cast<std::uintptr_t>(p.y.data) % bytes)
    return false;
  if (w.shape[a] % per || w.shape[last] % per) return false;
  for (int d = 0; d < w.rank; ++d) {
    if ((d != a && w.stride[0][d] % per) || (d != last && w.stride[1][d] % per)) return false;
  }
  return true;
}

Status launch_tiled(const Copy& p, Workspace, Stream stream) {
  const Walk<2> w = walk_of(p);
  const int a = dense_axis(w), last = w.rank - 1;
  const std::int64_t blocks = w.total / w.shape[a] / w.shape[last] *
                              ceil_div(w.shape[a], kCopyTile) * ceil_div(w.shape[last], kCopyTile);
  return with_element(size_of(p.x.dtype), [&](auto e) {
    using E = decltype(e);
    constexpr int V = 8 / static_cast<int>(sizeof(E));
    const E* x = static_cast<const E*>(p.x.data);
    E* y = static_cast<E*>(p.y.data);
    auto* kernel = tiles_in_packs(p, w, a, V) ? copy_tiles<E, V> : copy_tiles<E, 1>;
    return launch_overlapped("copy", kernel, static_cast<unsigned>(blocks), 256, 0, stream, w, a, x,
                             y);
  });
}

const char* turned_why_not(const Copy& p) {
  if (const char* why = tiled_why_not(p)) return why;
  const Walk<2> w = walk_of(p);
  if (size_of(p.x.dtype) != 2) return "elements are not of two bytes";
  if (w.total >= kCounted) return "2^31 elements or more";
  return tiles_in_packs(p, w, dense_axis(w), 8) ? nullptr : "an axis is not in 16-byte vectors";
}

Status launch_turned(const Copy& p, Workspace, Stream stream) {
  const Walk<2> w = walk_of(p);
  const int a = dense_axis(w), last = w.rank - 1;
  CopyTurn t{};
  t.x = static_cast<const std::uint16_t*>(p.x.data), t.y = static_cast<std::uint16_t*>(p.y.data);
  t.size_a = static_cast<std::uint32_t>(w.shape[a]);
  t.size_l = static_cast<std::uint32_t>(w.shape[last]);
  t.x_step = w.stride[0][last], t.y_step = w.stride[1][a];
  const std::int64_t tiles_a = ceil_div(w.shape[a], kTurnA);
  const std::int64_t tiles_l = ceil_div(w.shape[last], kTurnL);
  t.tiles_a = FastDivisor(static_cast<std::uint32_t>(tiles_a));
  t.tiles_l = FastDivisor(static_cast<std::uint32_t>(tiles_l));
  std::int64_t blocks = tiles_a * tiles_l;
  for (int d = 0; d < last; ++d) {
    if (d == a) continue;
    const int k = t.outer.rank++;
    t.outer.by[k] = FastDivisor(static_cast<std::uint32_t>(w.shape[d]));
    t.outer.stride[0][k] = w.stride[0][d], t.outer.stride[1][k] = w.stride[1][d];
    blocks *= w.shape[d];
  }
  return launch_overlapped("copy", copy_turned, static_cast<unsigned>(blocks), 256, 0, stream, t);
}

Status launch_naive(const Copy& p, Workspace, Stream stream) {
  const Walk<2> w = walk_of(p);
  return with_element(size_of(p.x.dtype), [&](auto e) {
    using E = decltype(e);
    if (w.total < kCounted) {
      CopyParts<1> all{{}, 1, {{p.x.data, p.y.data, divided(w)}}};
      return launch_elements<E>(all, stream);
    }
    return launch_overlapped("copy", copy_many_elements<E>,
                             static_cast<unsigned>(ceil_div(w.total, 256)), 256, 0, stream, w,
                             static_cast<const E*>(p.x.data), static_cast<E*>(p.y.data));
  });
}

double cost(const Copy& p, double factor) {
  return factor * move_us(2.0 * static_cast<double>(numel(p.x)) * size_of(p.x.dtype));
}

constexpr KernelRow<Copy> kRows[] = {
    {"copy_vector_sm80", "the last axis dense in both, rows of whole 16-byte vectors",
     vector_why_not, [](const Copy& p) { return cost(p, 1); }, launch_vector},
    {"copy_turned_any", "the same, elements of two bytes in 16-byte vectors", turned_why_not,
     [](const Copy& p) { return cost(p, 1.1); }, launch_turned},
    {"copy_tiled_any", "y dense along its last axis, x along another", tiled_why_not,
     [](const Copy& p) { return cost(p, 1.3); }, launch_tiled},
    {"copy_naive_any", "any strides", [](const Copy&) -> const char* { return nullptr; },
     [](const Copy& p) { return cost(p, 4); }, launch_naive},
};

}  // namespace

std::span<const KernelRow<Copy>> copy_rows() { return kRows; }

namespace {
Status check(const Copy& p) {
  if (p.x.dtype != p.y.dtype || !same_shape(p.x, p.y)) {
    return invalid(std::string("[copy] expected x and y of one shape and dtype, got ") +
                   name_of(p.x.dtype) + " of rank " + std::to_string(p.x.rank) + " and " +
                   name_of(p.y.dtype) + " of rank " + std::to_string(p.y.rank));
  }
  return check_memory("copy", {{"y", &p.y, true}}, {{"x", &p.x, true}});
}
}  // namespace

Status legal(const Copy& p) { return check(p); }

Status copy(const Copy& p, const char* kernel, Stream stream) {
  if (Status s = check(p); !s) return s;
  if (numel(p.y) == 0) return {};
  const KernelRow<Copy>* row = nullptr;
  if (Status s = select_row<Copy>("copy", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

Status copy_parts(std::span<const Copy> parts, const char* kernel, Stream stream) {
  CopyParts<kCopyParts> all{};
  const auto flush = [&]() -> Status {
    const Status s = all.parts > 0 ? launch_elements<uint4>(all, stream) : Status{};
    all.parts = 0;
    return s;
  };
  std::int64_t vectors = 0;
  for (const Copy& p : parts) {
    if (Status s = check(p); !s) return s;
    if (numel(p.y) == 0) continue;
    const KernelRow<Copy>* row = nullptr;
    if (Status s = select_row<Copy>("copy", kRows, p, kernel, &row); !s) return s;
    if (row != &kRows[0]) {
      if (Status s = row->launch(p, {}, stream); !s) return s;
      continue;
    }
    const Walk<2> w = vectors_of(p);
    if (all.parts == kCopyParts || vectors + w.total >= kCounted) {
      if (Status s = flush(); !s) return s;
      vectors = 0;
    }
    all.part[all.parts++] = {p.x.data, p.y.data, divided(w)};
    vectors += w.total;
  }
  return flush();
}

}  // namespace rm::cuda_ops
