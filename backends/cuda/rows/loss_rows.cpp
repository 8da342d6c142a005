// cross_entropy and its gradient.
#include <cstdint>
#include <limits>

#include "cross_entropy/api.hpp"
#include "rows/row.hpp"

namespace rm::cuda {
namespace {

using cuda_ops::Tensor;

// Programs choose a class that is there for rows that do not count: no id is special.
constexpr std::int64_t kNoId = std::numeric_limits<std::int64_t>::min();

struct CrossEntropyOp {
  using Problem = cuda_ops::CrossEntropyForward;
  static constexpr const char* kOp = "cross_entropy";
  static auto rows() { return cuda_ops::cross_entropy_forward_rows(); }

  std::vector<Placed> tensors;

  explicit CrossEntropyOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {p.input(1), 1, false}, {p.output(0), 0, true},
               {p.output(1), 1, true}};
  }
  Problem problem(const Tensor* t) const { return {t[0], t[1], t[2], t[3], kNoId}; }
  static std::size_t workspace(const Problem& p) { return cuda_ops::cross_entropy_workspace(p); }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace space,
                              cudaStream_t stream) {
    return cuda_ops::cross_entropy_forward(p, kernel, space, stream);
  }
};

struct CrossEntropyBackwardOp {
  using Problem = cuda_ops::CrossEntropyBackward;
  static constexpr const char* kOp = "cross_entropy_backward";
  static auto rows() { return cuda_ops::cross_entropy_backward_rows(); }

  std::vector<Placed> tensors;

  explicit CrossEntropyBackwardOp(const rm_problem& raw) {
    const Operands p(raw);
    for (size_t i = 0; i < 4; ++i) tensors.push_back({p.input(i), i, false});
    tensors.push_back({p.output(0), 0, true});
  }
  Problem problem(const Tensor* t) const { return {t[0], t[1], t[2], t[3], t[4], kNoId}; }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::cross_entropy_backward(p, kernel, stream);
  }
};

}  // namespace

void add_loss_rows(std::vector<rm_kernel>& out) {
  Row<CrossEntropyOp>::add(out);
  Row<CrossEntropyBackwardOp>::add(out);
}

}  // namespace rm::cuda
