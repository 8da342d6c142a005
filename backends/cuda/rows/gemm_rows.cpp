// gemm by the modules gemm and, for few rows, gemv.
#include "_shim/dispatch_shim.hpp"
#include "gemm/api.hpp"
#include "gemv/api.hpp"
#include "rows/product.hpp"

namespace rm::cuda {
namespace {

using cuda_ops::Tensor;

/// Swaps the last two axes of a matrix whose rows are not dense but whose columns are.
bool turned(Tensor& t) {
  const int last = t.rank - 1;
  const bool dense = t.shape[last] <= 1 || t.stride[last] == 1;
  if (dense || t.stride[last - 1] != 1) return false;
  std::swap(t.shape[last], t.shape[last - 1]);
  std::swap(t.stride[last], t.stride[last - 1]);
  return true;
}

/// The operands of the operator: a, b, c, then bias and residual where given.
struct GemmProduct : Product {
  bool trans_a = false, trans_b = false;

  explicit GemmProduct(const rm_problem& raw) {
    const Operands p(raw);
    Tensor a = p.input(0), b = p.input(1);
    const Tensor c = p.output(0);
    if (a.rank < 2 || b.rank < 2 || c.rank < 2) throw NotForModule("an operand is no matrix");
    trans_a = turned(a);
    trans_b = (p.attr_int("trans_b", 1) != 0) != turned(b);
    tensors = {{a, 0, false}, {b, 1, false}, {c, 0, true}};
    place_epilogue(p, {1}, 2, 3);
    epilogue.scale = static_cast<float>(p.attr_float("alpha", 1.0));
  }
};

struct GemmOp : GemmProduct {
  using Problem = cuda_ops::Gemm;
  static constexpr const char* kOp = "gemm";
  static constexpr rm_edge kEdges[] = {{'M', 0, 128}, {'N', 0, 256}, {'K', 0, 128}};
  static auto rows() { return cuda_ops::gemm_rows(); }
  using GemmProduct::GemmProduct;

  Problem problem(const Tensor* t) const {
    Problem p;
    p.a = t[0], p.b = t[1], p.c = t[2];
    p.trans_a = trans_a, p.trans_b = trans_b;
    p.epilogue = with_addresses(t);
    p.library = &gemm_library();
    return p;
  }
  // The table counts multiplications alone: few rows are bounded by reading b.
  static double least_us(const Problem& p) {
    const int64_t elements = cuda_ops::numel(p.a) + cuda_ops::numel(p.b) + cuda_ops::numel(p.c);
    return cuda_ops::move_us(static_cast<double>(elements) * cuda_ops::size_of(p.c.dtype));
  }
  static std::size_t workspace(const Problem& p) { return cuda_ops::gemm_workspace(p); }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace space,
                              cudaStream_t stream) {
    return cuda_ops::gemm(p, kernel, space, stream);
  }
};

/// Few rows of x times a weight matrix [N, K]: leading axes become rows.
struct GemvOp : GemmProduct {
  using Problem = cuda_ops::Gemv;
  static constexpr const char* kOp = "gemm";
  static constexpr rm_edge kEdges[] = {{'M', 0, 8}, {'N', 0, 128}, {'K', 0, 512}};
  static auto rows() { return cuda_ops::gemv_rows(); }

  explicit GemvOp(const rm_problem& raw) : GemmProduct(raw) {
    if (trans_a || !trans_b || tensors[1].tensor.rank != 2) {
      throw NotForModule("the weight is no matrix [N, K]");
    }
    fold_few_rows();
  }

  Problem problem(const Tensor* t) const {
    Problem p;
    p.x = t[0], p.w = t[1], p.y = t[2];
    p.epilogue = with_addresses(t);
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::gemv(p, kernel, stream);
  }
};

/// One row of x times a weight [K, N].
struct TurnedGemvOp : GemmProduct {
  using Problem = cuda_ops::GemvGroup;
  static constexpr const char* kOp = "gemm";
  static constexpr rm_edge kEdges[] = {{'M', 0, 1}, {'N', 0, 32}, {'K', 0, 768}};
  static auto rows() { return cuda_ops::gemv_group_rows().subspan(3, 1); }

  explicit TurnedGemvOp(const rm_problem& raw) : GemmProduct(raw) {
    if (trans_a || trans_b || tensors[1].tensor.rank != 2 || epilogue.scale != 1.0f) {
      throw NotForModule("the weight is no matrix [K, N], or alpha is not 1");
    }
    fold_few_rows();
  }

  Problem problem(const Tensor* t) const {
    Problem p;
    p.x = t[0], p.w[0] = t[1], p.y[0] = t[2], p.turned = true;
    if (bias >= 0) p.bias[0] = &t[bias];
    if (residual >= 0) p.residual = &t[residual];
    p.activation = epilogue.activation;
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::gemv_group(p, kernel, stream);
  }
};

}  // namespace

cuda_ops::GemmLibrary& gemm_library() {
  static cuda_ops::GemmLibrary& found = *new cuda_ops::GemmLibrary({});
  return found;
}

void add_gemm_rows(std::vector<rm_kernel>& out) {
  Row<GemvOp>::add(out);
  Row<TurnedGemvOp>::add(out);
  Row<GemmOp>::add(out);
}

}  // namespace rm::cuda
