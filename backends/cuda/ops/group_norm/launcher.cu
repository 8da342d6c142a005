// The table of group_norm: checks, choice and launches.
#include "_shim/alias_shim.hpp"
#include "group_norm/api.hpp"
#include "group_norm/kernels/group_norm_places_sm80.cuh"

namespace rm::cuda_ops {
namespace {

double bytes_of(const GroupNorm& p) {
  return static_cast<double>(numel(p.x)) * size_of(p.x.dtype);
}

std::int64_t places_of(const Tensor& t) {
  std::int64_t places = 1;
  for (int d = 2; d < t.rank; ++d) places *= t.shape[d];
  return places;
}

/// Elements from place to place of a sample, where all follow each other; else 0.
std::int64_t place_stride(const Tensor& t) {
  std::int64_t step = 0, expected = 0;
  for (int d = t.rank - 1; d >= 2; --d) {
    if (t.shape[d] == 1) continue;
    if (step == 0) {
      step = t.stride[d];
    } else if (t.stride[d] != expected) {
      return 0;
    }
    expected = t.stride[d] * t.shape[d];
  }
  return step == 0 ? t.shape[1] : step;  // of one place any stride will do
}

GroupNormArgs args_of(const GroupNorm& p) {
  GroupNormArgs a{};
  a.x = p.x.data, a.y = p.y.data;
  if (p.weight) a.weight = p.weight->data;
  if (p.bias) a.bias = p.bias->data;
  a.eps = p.eps, a.silu = p.silu, a.groups = p.groups;
  a.channels = static_cast<int>(p.x.shape[1]), a.per_group = a.channels / p.groups;
  a.from = image_of(p.x), a.to = image_of(p.y);
  return a;
}

/// Chunks of places: enough blocks for the card, and each thread some places.
GroupNormArgs in_chunks(const GroupNorm& p) {
  GroupNormArgs a = args_of(p);
  a.places = static_cast<int>(places_of(p.x));
  a.x_place = place_stride(p.x), a.y_place = place_stride(p.y);
  a.x_sample = p.x.stride[0], a.y_sample = p.y.stride[0];
  const std::int64_t vectors = a.channels / (16 / size_of(p.x.dtype));
  const std::int64_t rows = std::max<std::int64_t>(1, kGroupNormThreads / vectors);
  const std::int64_t wanted =
      ceil_div(2 * std::max(1, multiprocessors()), std::max<std::int64_t>(1, p.x.shape[0]));
  const std::int64_t most = std::max<std::int64_t>(1, ceil_div(a.places, 2 * rows));
  const std::int64_t chunks = std::clamp<std::int64_t>(wanted, 1, std::min<std::int64_t>(most, 256));
  a.places_a_chunk = static_cast<int>(ceil_div(a.places, chunks));
  a.chunks = static_cast<int>(ceil_div(a.places, a.places_a_chunk));
  return a;
}

std::size_t parts_bytes(const GroupNorm& p) {
  const GroupNormArgs a = in_chunks(p);
  return static_cast<std::size_t>(p.x.shape[0]) * a.chunks * a.groups * 2 * sizeof(float);
}

inline constexpr int kMostChannels = 4096;  // sums of all of them lie in shared memory

const char* places_why_not(const GroupNorm& p) {
  if (!channels_in_vectors(p.x) || !channels_in_vectors(p.y)) {
    return "x or y is not channels last in vectors";
  }
  if (place_stride(p.x) == 0 || place_stride(p.y) == 0) return "places do not follow each other";
  if (p.x.shape[1] > kMostChannels) return "more than 4096 channels";
  if (p.x.shape[0] > 65535) return "more than 65535 samples";  // the grid's second axis
  if (places_of(p.x) > 1 << 28) return "more than 2^28 places";
  return nullptr;
}

Status launch_places(const GroupNorm& p, Workspace workspace, Stream stream) {
  GroupNormArgs a = in_chunks(p);
  if (Status s = check_workspace("group_norm", parts_bytes(p), workspace, "workspace()"); !s) return s;
  a.parts = static_cast<float*>(workspace.data);
  const dim3 grid(static_cast<unsigned>(a.chunks), static_cast<unsigned>(p.x.shape[0]));
  return dispatch_float(p.x.dtype, [&](auto type) -> Status {
    using T = typename decltype(type)::type;
    const auto floats = static_cast<std::size_t>(
        group_norm_floats(a.channels, 16 / static_cast<int>(sizeof(T))));
    Status s = launch_overlapped("group_norm", group_norm_parts<T>, grid, kGroupNormThreads,
                                 floats * sizeof(float), stream, a);
    if (!s) return s;
    return launch_overlapped("group_norm", group_norm_write<T>, grid, kGroupNormThreads,
                             2 * static_cast<std::size_t>(a.groups) * sizeof(float), stream, a);
  });
}

Status launch_any(const GroupNorm& p, Workspace, Stream stream) {
  const GroupNormArgs a = args_of(p);
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>(p.x.shape[0] * p.groups, 1 << 20));
  return dispatch_float(p.x.dtype, [&](auto type) {
    return launch_overlapped("group_norm", group_norm_any<typename decltype(type)::type>, blocks, 512,
                             0, stream, a);
  });
}

constexpr KernelRow<GroupNorm> kRows[] = {
    {"group_norm_places_sm80", "channels last in whole 16-byte vectors, up to 4096 of them",
     places_why_not, [](const GroupNorm& p) { return 2 + move_us(3 * bytes_of(p)); }, launch_places},
    {"group_norm_any", "any image", [](const GroupNorm&) -> const char* { return nullptr; },
     [](const GroupNorm& p) { return 4 + 6 * move_us(4 * bytes_of(p)); }, launch_any},
};

}  // namespace

std::span<const KernelRow<GroupNorm>> group_norm_rows() { return kRows; }

Status legal(const GroupNorm& p) {
  bool ok = p.x.rank >= 2 && p.x.rank <= 5 && is_float(p.x.dtype) && p.y.dtype == p.x.dtype &&
            same_shape(p.x, p.y) && p.groups >= 1;
  ok = ok && p.x.shape[1] < 1 << 24 && p.x.shape[1] % p.groups == 0;
  for (const Tensor* t : {p.weight, p.bias}) {
    if (ok && t != nullptr) {
      ok = t->dtype == p.x.dtype && t->rank == 1 && t->shape[0] == p.x.shape[1] && is_contiguous(*t);
    }
  }
  if (!ok) {
    return invalid(
        "[group_norm] expected x and y [N, C, up to 3 axes] of one float dtype, groups that divide C, "
        "weight and bias dense [C] of that dtype, got others");
  }
  return check_memory("group_norm", {{"y", &p.y}},
                      {{"x", &p.x}, {"weight", p.weight}, {"bias", p.bias}});
}

std::size_t group_norm_workspace(const GroupNorm& p) {
  return numel(p.x) == 0 || places_why_not(p) != nullptr ? 0 : parts_bytes(p);
}

Status group_norm(const GroupNorm& p, const char* kernel, Workspace workspace, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (numel(p.y) == 0) return {};
  const KernelRow<GroupNorm>* row = nullptr;
  if (Status s = select_row<GroupNorm>("group_norm", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, workspace, stream);
}

}  // namespace rm::cuda_ops
