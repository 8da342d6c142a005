// Tensor maps of attention's tensors.
#include "sdpa/tensor_map.hpp"

#include "_shim/dispatch_shim.hpp"
#include "_shim/tensor_map_shim.hpp"
#include "sdpa/common.hpp"

namespace rm::cuda_ops {

Status encode_tiles(const Tensor& t, int rows, CUtensorMap* map) {
  const TensorMapEncoder function = tensor_map_encoder();
  if (function == nullptr) {
    return unsupported(
        "[sdpa] expected cuTensorMapEncodeTiled in the driver, got none; try another kernel");
  }
  const auto size = static_cast<std::int64_t>(size_of(t.dtype));
  cuuint64_t shape[4], stride[3];
  cuuint32_t box[4] = {64, static_cast<cuuint32_t>(rows), 1, 1}, step[4] = {1, 1, 1, 1};
  for (int d = 0; d < 4; ++d) shape[d] = static_cast<cuuint64_t>(t.shape[3 - d]);
  for (int d = 0; d < 3; ++d) {  // an axis of one element may have any stride
    stride[d] = static_cast<cuuint64_t>(t.shape[2 - d] == 1 ? 16 * ceil_div(t.shape[3] * size, 16)
                                                            : t.stride[2 - d] * size);
  }
  const CUresult result = function(
      map,
      t.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      4, t.data, shape, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {Code::device_error, "[sdpa] expected a tensor map, got driver error " +
                                  std::to_string(static_cast<int>(result))};
}

const char* tiles_why_not(const Tensor& t) {
  if (!rows_aligned(t)) return "rows are not 16-byte aligned";
  for (int d = 0; d < 3; ++d) {
    if (t.shape[d] > 1 && t.stride[d] <= 0) return "an axis without a stride of its own";
  }
  return nullptr;
}

}  // namespace rm::cuda_ops
