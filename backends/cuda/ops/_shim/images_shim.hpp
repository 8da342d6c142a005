// Images [N, C, spatial axes]: one to three spatial axes brought to three, and whether channels lie
// last in whole 16-byte vectors.
#pragma once

#include "_shim/tensor_shim.hpp"

namespace rm::cuda_ops {

struct ImageShape {
  std::int64_t n = 1, c = 1, size[3] = {1, 1, 1};
  std::int64_t stride[5] = {};  // N, C, three spatial axes
};

/// `t` has rank 3 to 5; missing axes stand in front, of size 1.
inline ImageShape image_of(const Tensor& t) {
  ImageShape out;
  out.n = t.shape[0], out.c = t.shape[1];
  out.stride[0] = t.stride[0], out.stride[1] = t.stride[1];
  const int axes = t.rank - 2, front = 3 - axes;
  for (int a = 0; a < axes; ++a) {
    out.size[front + a] = t.shape[2 + a], out.stride[2 + front + a] = t.stride[2 + a];
  }
  return out;
}

/// Every place's channels start on 16 bytes, lie side by side and fill whole vectors.
inline bool channels_in_vectors(const Tensor& t) {
  const std::int64_t vector = 16 / size_of(t.dtype);
  bool whole = t.shape[1] % vector == 0 && (t.shape[1] == 1 || t.stride[1] == 1) &&
               reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
  for (int d = 0; d < t.rank; ++d) {
    if (d != 1 && t.shape[d] > 1) whole = whole && t.stride[d] % vector == 0;
  }
  return whole;
}

#ifdef __CUDACC__
/// A place of the result; `c` counts vectors of channels.
template <class I>
struct ImagePlace {
  I n, c, at[3];
};
/// Place `i` in the order of the result's memory.
template <class I>
__device__ __forceinline__ ImagePlace<I> image_place(const ImageShape& s, I i, I channels,
                                                     bool channels_last) {
  ImagePlace<I> out;
  const auto split = [&i](I size) {
    const I rest = i / size, at = i - rest * size;
    i = rest;
    return at;
  };
  if (channels_last) out.c = split(channels);
  for (int a = 2; a >= 0; --a) out.at[a] = split(static_cast<I>(s.size[a]));
  if (!channels_last) out.c = split(channels);
  out.n = i;
  return out;
}
#endif

}  // namespace rm::cuda_ops
