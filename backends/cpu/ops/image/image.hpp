// An image operand [N, C, up to three spatial axes] with any strides, and its channels as f32.
#pragma once

#include "common/problem.hpp"
#include "common/row.hpp"
#include "ops/image/kernels.hpp"

namespace rm::cpu {

struct Image {
  DType dtype = DType::invalid;
  int64_t bytes = 4;                   // of an element
  int64_t batch = 0, channels = 0;
  int64_t size[3] = {1, 1, 1};         // spatial, missing axes in front
  int64_t step[5] = {0, 0, 0, 0, 0};   // elements: N, C, spatial
  int64_t places() const { return size[0] * size[1] * size[2]; }
  int64_t offset(int64_t n, int64_t a, int64_t b, int64_t c) const {
    return (n * step[0] + a * step[2] + b * step[3] + c * step[4]) * bytes;
  }
};

/// Throws std::invalid_argument unless the rank is 2 to 5 and the type f32, bf16 or f16.
Image image_of(const View& v);
const ImageKernels& image_kernels_for(Isa isa);
/// Spatial attributes with missing axes in front.
void spread_attribute(const std::vector<int64_t>& values, size_t axes, size_t from,
                      int64_t otherwise, int64_t out[3]);

/// Channels [from, from + n) of the place at `offset`: where they lie when they are f32 in a row,
/// else widened into `room`.
inline const float* channels_at(const ImageKernels& k, const Image& image, const void* base,
                                int64_t offset, int64_t from, int64_t n, float* room) {
  const char* at = static_cast<const char*>(base) + offset + from * image.step[1] * image.bytes;
  if (image.dtype == DType::f32 && (image.step[1] == 1 || n == 1)) {
    return reinterpret_cast<const float*>(at);
  }
  k.widen(image.dtype, at, image.step[1], room, n);
  return room;
}
inline void put_channels(const ImageKernels& k, const Image& image, void* base, int64_t offset,
                         int64_t from, int64_t n, const float* values) {
  char* at = static_cast<char*>(base) + offset + from * image.step[1] * image.bytes;
  k.narrow(image.dtype, values, at, image.step[1], n);
}

/// Channels handled at a time: sums stay in the first-level cache and on the stack.
inline constexpr int64_t kChannelBlock = 512;

}  // namespace rm::cpu
