#include "copy/api.hpp"
#include "rows/row.hpp"

namespace rm::cuda {

void check_status(const cuda_ops::Status& status) {
  switch (status.code) {
    case cuda_ops::Code::ok:
      return;
    case cuda_ops::Code::invalid_argument:
      throw plugin::Error(RM_INTERNAL, status.message);
    case cuda_ops::Code::unsupported:
      throw plugin::Error(RM_UNIMPLEMENTED, status.message);
    default:
      throw plugin::Error(RM_UNAVAILABLE, status.message);
  }
}

bool is_recorded(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    cudaGetLastError();  // the launch will say what is wrong
    return false;
  }
  return status == cudaStreamCaptureStatusActive;
}

cuda_ops::Tensor dense(const cuda_ops::Tensor& t) {
  cuda_ops::Tensor out = t;
  int64_t stride = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    if (t.stride[d] == 0 || t.shape[d] == 1) {
      out.stride[d] = t.shape[d] == 1 ? stride : 0;
      continue;
    }
    out.stride[d] = stride;
    stride *= t.shape[d];
  }
  return out;
}

size_t dense_bytes(const cuda_ops::Tensor& t) {
  size_t bytes = static_cast<size_t>(cuda_ops::size_of(t.dtype));
  for (int d = 0; d < t.rank; ++d) {
    if (t.stride[d] != 0) bytes *= static_cast<size_t>(t.shape[d]);
  }
  return (bytes + cuda_ops::kWorkspaceAlignment - 1) / cuda_ops::kWorkspaceAlignment *
         cuda_ops::kWorkspaceAlignment;
}

namespace {

// An element that repeats is copied once.
void launch_copy(cuda_ops::Tensor from, cuda_ops::Tensor to, cudaStream_t stream) {
  for (int d = 0; d < from.rank; ++d) {
    if (from.stride[d] == 0) from.shape[d] = to.shape[d] = 1;
  }
  check_status(cuda_ops::copy({from, to}, "", stream));
}

}  // namespace

void copy_at_once(const cuda_ops::Tensor& from, const cuda_ops::Tensor& to) {
  const RelaxedCapture relaxed;
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  try {
    check_status(cuda_ops::copy({from, to}, "", stream));
    check_cuda(cudaStreamSynchronize(stream), "a copy without errors");
  } catch (...) {
    cudaStreamDestroy(stream);
    throw;
  }
  cudaStreamDestroy(stream);
}

void launch_copies_in(const std::vector<Densed>& copies, cuda_ops::Tensor* t, char* workspace,
                      cudaStream_t stream) {
  for (const Densed& copy : copies) {
    cuda_ops::Tensor from = copy.given;
    from.data = t[copy.tensor].data;
    t[copy.tensor].data = workspace + copy.offset;
    if (!copy.result) launch_copy(from, t[copy.tensor], stream);
  }
}

void launch_copies_out(const std::vector<Densed>& copies, const cuda_ops::Tensor* t,
                       const std::vector<Placed>& tensors, void* const* outputs,
                       cudaStream_t stream) {
  for (const Densed& copy : copies) {
    if (!copy.result) continue;
    cuda_ops::Tensor to = copy.given;
    to.data = outputs[tensors[copy.tensor].index];
    launch_copy(t[copy.tensor], to, stream);
  }
}

std::vector<rm_kernel> all_rows() {
  std::vector<rm_kernel> out;
  add_linears_rows(out);
  add_gemm_rows(out);
  add_small_rows(out);
  add_norm_rows(out);
  add_attention_rows(out);
  add_ewise_rows(out);
  add_move_rows(out);
  add_reduce_rows(out);
  add_image_rows(out);
  add_quant_rows(out);
  add_update_rows(out);
  add_loss_rows(out);
  add_expert_rows(out);
  return out;
}

}  // namespace rm::cuda
