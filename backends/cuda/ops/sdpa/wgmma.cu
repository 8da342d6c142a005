// Launches of sdpa_wgmma_sm90a: tensor maps of q, k, v and the order of the blocks.
#include "sdpa/common.hpp"
#include "sdpa/kernels/sdpa_wgmma_sm90a.cuh"

namespace rm::cuda_ops {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

/// The driver's function, asked for through the runtime: this module does not link the driver.
Encode encode_function() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      function = nullptr;
    }
    return reinterpret_cast<Encode>(function);
  }();
  return found;
}

/// t [B, H, S, D] in boxes of `rows` rows and 64 columns.
Status encode(const Tensor& t, int rows, CUtensorMap* map) {
  const Encode function = encode_function();
  if (function == nullptr) {
    return unsupported("[sdpa] expected cuTensorMapEncodeTiled in the driver, got none; try another kernel");
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
      map, t.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      4, t.data, shape, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {Code::device_error, "[sdpa] expected a tensor map, got driver error " +
                                  std::to_string(static_cast<int>(result))};
}

/// Heads at a time whose keys and values fit the L2 cache; 0 where blocks need no order.
int heads_of_set(const SdpaArgs& a) {
  if (!a.causal) return 0;
  const std::int64_t bytes = static_cast<std::int64_t>(a.keys) * a.dim * 4;
  const std::int64_t groups = std::max<std::int64_t>(1, (24 << 20) / std::max<std::int64_t>(1, bytes));
  return static_cast<int>(std::min<std::int64_t>(groups * a.ratio, a.batch * a.heads));
}

template <class T, int kD, bool kTurns>
Status launch_dim(const Sdpa& p, Stream stream) {
  using Shape = WgmmaShape<kD>;
  const SdpaArgs a = args_of(p);
  CUtensorMap q, k, v;
  if (Status s = encode(p.q, Shape::kRows, &q); !s) return s;
  if (Status s = encode(p.k, Shape::kKeys, &k); !s) return s;
  if (Status s = encode(p.v, Shape::kKeys, &v); !s) return s;
  auto* kernel = sdpa_wgmma<T, kD, kTurns>;
  if (Status s = allow_shared_memory("sdpa", kernel, Shape::kMemory); !s) return s;
  WgmmaOrder order{};
  order.blocks = static_cast<int>(ceil_div(a.rows, Shape::kRows));
  order.total = order.blocks * a.batch * a.heads;
  order.set = heads_of_set(a);
  // Equal blocks: as many as run at once take all in turn. Unequal ones: the card's scheduler.
  const int blocks = order.set == 0 ? std::min(order.total, std::max(1, multiprocessors())) : order.total;
  kernel<<<blocks, Shape::kThreads, Shape::kMemory, stream>>>(a, order, q, k, v);
  return launch_status("sdpa");
}

template <bool kTurns>
Status launch_turns(const Sdpa& p, Stream stream) {
  return with_type(p, [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.q.shape[3] <= 64) return launch_dim<T, 64, kTurns>(p, stream);
    if (p.q.shape[3] <= 128) return launch_dim<T, 128, kTurns>(p, stream);
    return launch_dim<T, 256, kTurns>(p, stream);
  });
}

bool strides_go_forward(const Tensor& t) {
  for (int d = 0; d < 3; ++d) {
    if (t.shape[d] > 1 && t.stride[d] <= 0) return false;
  }
  return true;
}

}  // namespace

const char* wgmma_why_not(const Sdpa& p) {
  if (compute_capability() != 90) return "the device is not sm_90";
  if (p.q.dtype == DType::f32) return "float32: the tensor cores would round it";
  if (p.q.shape[3] > 256 || p.q.shape[3] % 8 != 0) {
    return "the head dim is not a multiple of 8 up to 256";
  }
  if (p.mask != nullptr) return "a mask";
  if (!(p.scale > 0.0f)) return "the scale is not positive";
  if (p.k.shape[2] == 0) return "no keys";
  for (const Tensor* t : {&p.q, &p.k, &p.v, &p.o}) {
    if (!rows_aligned(*t)) return "rows are not 16-byte aligned";
  }
  for (const Tensor* t : {&p.q, &p.k, &p.v}) {
    if (!strides_go_forward(*t)) return "an axis without a stride of its own";
  }
  if (p.q.shape[0] * p.q.shape[1] * ceil_div(p.q.shape[2], 64) > 1 << 30) return "too many rows";
  return nullptr;
}

Status launch_wgmma(const Sdpa& p, Workspace, Stream stream) { return launch_turns<true>(p, stream); }
Status launch_wgmma_free(const Sdpa& p, Workspace, Stream stream) { return launch_turns<false>(p, stream); }

}  // namespace rm::cuda_ops
