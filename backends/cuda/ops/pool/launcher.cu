// The table of pool: checks, choice and launches.
#include "_shim/alias_shim.hpp"
#include "pool/api.hpp"
#include "pool/kernels/pool_any.cuh"

namespace rm::cuda_ops {
namespace {

double bytes_of(const Pool& p) {
  return static_cast<double>(numel(p.x) + numel(p.y)) * size_of(p.x.dtype);
}

template <bool kVectors>
Status launch_windows(const Pool& p, Workspace, Stream stream) {
  PoolArgs a{};
  a.x = p.x.data, a.y = p.y.data, a.from = image_of(p.x), a.to = image_of(p.y);
  for (int d = 0; d < 3; ++d) {
    a.kernel[d] = p.kernel[d], a.stride[d] = p.stride[d], a.dilation[d] = p.dilation[d];
    a.begin[d] = p.begin[d];
  }
  a.mean = p.mean, a.count_padding = p.count_padding, a.divisor = p.divisor;
  a.channels_last = p.y.shape[1] > 1 && p.y.stride[1] == 1;
  return dispatch_float(p.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kV = kVectors ? kVec<T> : 1;
    const std::int64_t total = numel(p.y) / kV;
    const auto kernel = total < 0x7fff0000 ? pool_windows<T, kV, std::uint32_t>
                                           : pool_windows<T, kV, std::uint64_t>;
    return launch_overlapped("pool", kernel, static_cast<unsigned>(ceil_div(total, 256)), 256, 0,
                             stream, a);
  });
}

constexpr KernelRow<Pool> kRows[] = {
    {"pool_vector_any", "channels last in whole 16-byte vectors",
     [](const Pool& p) -> const char* {
       return channels_in_vectors(p.x) && channels_in_vectors(p.y)
                  ? nullptr
                  : "x or y is not channels last in vectors";
     },
     [](const Pool& p) { return move_us(bytes_of(p)); }, launch_windows<true>},
    {"pool_any", "any image", [](const Pool&) -> const char* { return nullptr; },
     [](const Pool& p) { return 4 * move_us(bytes_of(p)); }, launch_windows<false>},
};

}  // namespace

std::span<const KernelRow<Pool>> pool_rows() { return kRows; }

Status legal(const Pool& p) {
  bool ok = p.x.rank >= 3 && p.x.rank <= 5 && p.y.rank == p.x.rank && is_float(p.x.dtype) &&
            p.y.dtype == p.x.dtype && p.divisor >= 0;
  for (int d = 0; ok && d < 2; ++d) ok = p.x.shape[d] == p.y.shape[d];
  for (int d = 2; ok && d < p.x.rank; ++d) {
    ok = p.x.shape[d] < 1 << 26 && p.y.shape[d] < 1 << 26;
  }
  for (int d = 0; ok && d < 3; ++d) {
    ok = p.kernel[d] >= 1 && p.stride[d] >= 1 && p.dilation[d] >= 1 && p.begin[d] >= 0;
    for (const int size : {p.kernel[d], p.stride[d], p.dilation[d], p.begin[d]}) {
      ok = ok && size < 1 << 12;
    }
    // Places of windows are counted in 32 bits.
    const int axis = p.x.rank - 3 + d;
    if (ok && axis >= 2) ok = p.y.shape[axis] * p.stride[d] < 1ll << 30;
  }
  if (!ok) {
    return invalid(
        "[pool] expected x and y [N, C, 1 to 3 spatial axes] of one float dtype, kernel, stride and "
        "dilation of 1 to 4095, got others");
  }
  return check_memory("pool", {{"y", &p.y}}, {{"x", &p.x}});
}

Status pool(const Pool& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (numel(p.y) == 0) return {};
  const KernelRow<Pool>* row = nullptr;
  if (Status s = select_row<Pool>("pool", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
