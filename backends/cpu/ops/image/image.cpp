// Decodes image operands.
#include "ops/image/image.hpp"

#include <stdexcept>

namespace rm::cpu {

RM_CPU_TABLE(ImageKernels, image_kernels)

Image image_of(const View& v) {
  if (v.rank() < 2 || v.rank() > 5 || !is_float32_class(v.dtype)) {
    throw std::invalid_argument("[image] expected f32, bf16 or f16 of rank 2 to 5");
  }
  Image out;
  out.dtype = v.dtype;
  out.bytes = dtype_bytes(v.dtype);
  out.batch = v.shape[0];
  out.channels = v.shape[1];
  out.step[0] = v.stride[0];
  out.step[1] = v.stride[1];
  const size_t axes = v.shape.size() - 2;
  for (size_t a = 0; a < axes; ++a) {
    out.size[3 - axes + a] = v.shape[2 + a];
    out.step[5 - axes + a] = v.stride[2 + a];
  }
  return out;
}

const ImageKernels& image_kernels_for(Isa isa) { return *RM_CPU_PICK(isa, image_kernels); }

void spread_attribute(const std::vector<int64_t>& values, size_t axes, size_t from,
                      int64_t otherwise, int64_t out[3]) {
  for (int i = 0; i < 3; ++i) out[i] = otherwise;
  if (values.empty()) return;
  for (size_t a = 0; a < axes; ++a) out[3 - axes + a] = values.at(from + a);
}

}  // namespace rm::cpu
