// sdpa and rope.
#include "rope/api.hpp"
#include "rows/row.hpp"
#include "sdpa/api.hpp"

namespace rm::cuda {
namespace {

using cuda_ops::Tensor;

struct SdpaOp {
  using Problem = cuda_ops::Sdpa;
  static constexpr const char* kOp = "sdpa";
  static auto rows() { return cuda_ops::sdpa_rows(); }

  std::vector<Placed> tensors;
  bool masked, causal;
  float scale;

  explicit SdpaOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {p.input(1), 1, false}, {p.input(2), 2, false},
               {p.output(0), 0, true}};
    masked = p.has_input(3);
    if (masked) tensors.push_back({p.input(3), 3, false});
    scale = static_cast<float>(p.attr_float("scale", 1.0));
    causal = p.attr_int("is_causal", 0) != 0;
  }
  Problem problem(const Tensor* t) const {
    Problem p;
    p.q = t[0], p.k = t[1], p.v = t[2], p.o = t[3];
    if (masked) p.mask = &t[4];
    p.scale = scale, p.causal = causal;
    return p;
  }
  static std::size_t workspace(const Problem& p) { return cuda_ops::sdpa_workspace(p); }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace space,
                              cudaStream_t stream) {
    return cuda_ops::sdpa(p, kernel, space, stream);
  }
};

struct RopeOp {
  using Problem = cuda_ops::Rope;
  static constexpr const char* kOp = "rope";
  static auto rows() { return cuda_ops::rope_rows(); }

  std::vector<Placed> tensors;
  bool interleaved;

  explicit RopeOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {p.input(1), 1, false}, {p.input(2), 2, false},
               {p.output(0), 0, true}};
    interleaved = p.attr_int("interleaved", 0) != 0;
  }
  Problem problem(const Tensor* t) const {
    Problem p;
    p.x = t[0], p.cos = t[1], p.sin = t[2], p.y = t[3];
    p.interleaved = interleaved;
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::rope(p, kernel, stream);
  }
};

}  // namespace

void add_attention_rows(std::vector<rm_kernel>& out) {
  Row<SdpaOp>::add(out);
  Row<RopeOp>::add(out);
}

}  // namespace rm::cuda
