// The table of resize: checks, choice and launches.
#include "_shim/alias_shim.hpp"
#include "resize/api.hpp"
#include "resize/kernels/resize_any.cuh"

namespace rm::cuda_ops {
namespace {

double bytes_of(const Resize& p) {
  return static_cast<double>(numel(p.x) + numel(p.y)) * size_of(p.x.dtype);
}

template <bool kVectors>
Status launch_places(const Resize& p, Workspace, Stream stream) {
  ResizeArgs a{};
  a.x = p.x.data, a.y = p.y.data, a.from = image_of(p.x), a.to = image_of(p.y);
  for (int d = 0; d < 3; ++d) a.ratio[d] = p.ratio[d];
  a.linear = p.linear, a.align_corners = p.align_corners;
  a.channels_last = p.y.shape[1] > 1 && p.y.stride[1] == 1;
  return dispatch_float(p.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kV = kVectors ? kVec<T> : 1;
    const std::int64_t total = numel(p.y) / kV;
    const auto kernel = total < 0x7fff0000 ? resize_places<T, kV, std::uint32_t>
                                           : resize_places<T, kV, std::uint64_t>;
    return launch_overlapped("resize", kernel, static_cast<unsigned>(ceil_div(total, 256)), 256, 0,
                             stream, a);
  });
}

constexpr KernelRow<Resize> kRows[] = {
    {"resize_vector_any", "channels last in whole 16-byte vectors",
     [](const Resize& p) -> const char* {
       return channels_in_vectors(p.x) && channels_in_vectors(p.y)
                  ? nullptr
                  : "x or y is not channels last in vectors";
     },
     [](const Resize& p) { return move_us(bytes_of(p)); }, launch_places<true>},
    {"resize_any", "any image", [](const Resize&) -> const char* { return nullptr; },
     [](const Resize& p) { return 4 * move_us(bytes_of(p)); }, launch_places<false>},
};

}  // namespace

std::span<const KernelRow<Resize>> resize_rows() { return kRows; }

Status legal(const Resize& p) {
  bool ok = p.x.rank >= 3 && p.x.rank <= 5 && p.y.rank == p.x.rank && is_float(p.x.dtype) &&
            p.y.dtype == p.x.dtype;
  for (int d = 0; ok && d < 2; ++d) ok = p.x.shape[d] == p.y.shape[d];
  for (int d = 2; ok && d < p.x.rank; ++d) {
    ok = p.x.shape[d] < 1 << 26 && p.y.shape[d] < 1 << 26;
    ok = ok && (p.x.shape[d] > 0 || numel(p.y) == 0);
  }
  for (int d = 0; ok && d < 3; ++d) ok = p.ratio[d] >= 0 && p.ratio[d] < 1e6;
  if (!ok) {
    return invalid(
        "[resize] expected x and y [N, C, 1 to 3 spatial axes] of one float dtype and ratios of 0 to "
        "a million, got others");
  }
  return check_memory("resize", {{"y", &p.y}}, {{"x", &p.x}});
}

Status resize(const Resize& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (numel(p.y) == 0) return {};
  const KernelRow<Resize>* row = nullptr;
  if (Status s = select_row<Resize>("resize", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
