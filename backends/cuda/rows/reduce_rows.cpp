// Reductions over any axes, and sums along one.
#include <algorithm>

#include "counting/api.hpp"
#include "reduction/api.hpp"
#include "rows/row.hpp"

namespace rm::cuda {
namespace {

using cuda_ops::Tensor;

struct ReduceOp {
  using Problem = cuda_ops::Reduction;
  static constexpr const char* kOp = "reduce";
  static auto rows() { return cuda_ops::reduction_rows(); }

  std::vector<Placed> tensors;
  cuda_ops::Reduce kind;

  explicit ReduceOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {p.output(0), 0, true}};
    const std::string_view name = p.attr_string("kind", "");
    const auto* end = std::end(cuda_ops::kReduceNames);
    const auto* found = std::find(std::begin(cuda_ops::kReduceNames), end, name);
    if (found == end) throw NotForModule("the module has no such reduction");
    kind = static_cast<cuda_ops::Reduce>(found - std::begin(cuda_ops::kReduceNames));
  }
  Problem problem(const Tensor* t) const { return {t[0], t[1], kind}; }
  static std::size_t workspace(const Problem& p) { return cuda_ops::reduction_workspace(p); }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace space,
                              cudaStream_t stream) {
    return cuda_ops::reduction(p, kernel, space, stream);
  }
};

/// Of integers and bool; any and all of every type.
struct CountOp {
  using Problem = cuda_ops::Counting;
  static constexpr const char* kOp = "reduce";
  static auto rows() { return cuda_ops::counting_rows(); }

  std::vector<Placed> tensors;
  cuda_ops::Count kind;

  explicit CountOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {p.output(0), 0, true}};
    const std::string_view name = p.attr_string("kind", "");
    const auto* end = std::end(cuda_ops::kCountNames);
    const auto* found = std::find(std::begin(cuda_ops::kCountNames), end, name);
    if (found == end) throw NotForModule("the module has no such reduction");
    kind = static_cast<cuda_ops::Count>(found - std::begin(cuda_ops::kCountNames));
  }
  Problem problem(const Tensor* t) const { return {t[0], t[1], kind}; }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::counting(p, kernel, stream);
  }
};

struct CumsumOp {
  using Problem = cuda_ops::Cumsum;
  static constexpr const char* kOp = "cumsum";
  static auto rows() { return cuda_ops::cumsum_rows(); }

  std::vector<Placed> tensors;
  int axis;

  explicit CumsumOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {p.output(0), 0, true}};
    axis = static_cast<int>(p.attr_int("axis", 0));
  }
  Problem problem(const Tensor* t) const { return {t[0], t[1], axis}; }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::cumsum(p, kernel, stream);
  }
};

}  // namespace

void add_reduce_rows(std::vector<rm_kernel>& out) {
  Row<ReduceOp>::add(out);
  Row<CountOp>::add(out);
  Row<CumsumOp>::add(out);
}

}  // namespace rm::cuda
