// Reductions of floats over any axes.
#include <algorithm>

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

}  // namespace

void add_reduce_rows(std::vector<rm_kernel>& out) { Row<ReduceOp>::add(out); }

}  // namespace rm::cuda
