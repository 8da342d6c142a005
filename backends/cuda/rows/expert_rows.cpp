// sort, and the products of rows that are sorted by their expert: grouped_gemm.
#include "grouped_gemm/api.hpp"
#include "rows/row.hpp"
#include "sort/api.hpp"

namespace rm::cuda {
namespace {

using cuda_ops::Tensor;

/// A value without axes is a line of one.
Tensor with_an_axis(Tensor t) {
  if (t.rank == 0) t.rank = 1, t.shape[0] = t.stride[0] = 1;
  return t;
}

struct SortOp {
  using Problem = cuda_ops::Sort;
  static constexpr const char* kOp = "sort";
  static auto rows() { return cuda_ops::sort_rows(); }
  // a lane's items, what a warp holds, what a block holds
  static constexpr rm_edge kEdges[] = {{0, 0, 32}, {0, 0, 256}, {0, 0, 2048}, {0, 0, 4096}};

  std::vector<Placed> tensors;  // x, values, indices
  int axis;
  bool descending;

  explicit SortOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{with_an_axis(p.input(0)), 0, false},
               {with_an_axis(p.output(0)), 0, true},
               {with_an_axis(p.output(1)), 1, true}};
    const int rank = tensors[0].tensor.rank;
    axis = static_cast<int>(p.attr_int("axis", -1));
    if (axis < 0) axis += rank;
    descending = p.attr_int("descending", 0) != 0;
    const std::int64_t k = p.attr_int("k", -1);
    if (k >= 0 && axis >= 0 && axis < rank && tensors[1].tensor.shape[axis] != k) {
      throw NotForModule("the results do not have k elements along the axis");
    }
  }
  Problem problem(const Tensor* t) const { return {t[0], t[1], t[2], axis, descending}; }
  static std::size_t workspace(const Problem& p) { return cuda_ops::sort_workspace(p); }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace space,
                              cudaStream_t stream) {
    return cuda_ops::sort(p, kernel, space, stream);
  }
};

struct GroupedGemmOp {
  using Problem = cuda_ops::GroupedGemm;
  static constexpr const char* kOp = "grouped_gemm";
  static auto rows() { return cuda_ops::grouped_gemm_rows(); }
  // rows and columns of tiles, vectors and steps along the depth
  static constexpr rm_edge kEdges[] = {{'M', 0, 4},   {'M', 0, 64}, {'N', 0, 16}, {'N', 0, 64},
                                       {'N', 0, 128}, {'K', 0, 16}, {'K', 0, 64}, {'K', 0, 256}};

  std::vector<Placed> tensors;  // x, w, offsets, y

  explicit GroupedGemmOp(const rm_problem& raw) {
    const Operands p(raw);
    for (size_t i = 0; i < 3; ++i) tensors.push_back({p.input(i), i, false});
    tensors.push_back({p.output(0), 0, true});
    // GPT-OSS, whose generation ended in a fault that is not found yet (decision 0264).
    const Tensor& w = tensors[1].tensor;
    if (w.rank == 3 && w.shape[1] > 1 && w.stride[1] != 1) {
      throw NotForModule("the depth of the matrices is not their dense axis");
    }
  }
  Problem problem(const Tensor* t) const { return {t[0], t[1], t[2], t[3]}; }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::grouped_gemm(p, kernel, stream);
  }
};

}  // namespace

void add_expert_rows(std::vector<rm_kernel>& out) {
  Row<SortOp>::add(out);
  Row<GroupedGemmOp>::add(out);
}

}  // namespace rm::cuda
