// sdpa and its gradient, rope, and a step of decoding.
#include "rope/api.hpp"
#include "rows/row.hpp"
#include "sdpa/api.hpp"

namespace rm::cuda {
namespace {

using cuda_ops::Tensor;

struct SdpaOp {
  using Problem = cuda_ops::Sdpa;
  static constexpr const char* kOp = "sdpa";
  static constexpr rm_edge kEdges[] = {{'S', 0, 128}, {'T', 0, 128}, {'D', 0, 256}, {'E', 0, 256}};
  static auto rows() { return cuda_ops::sdpa_rows(); }

  std::vector<Placed> tensors;
  bool masked, causal;
  int last = -1, lse = -1;  // in `tensors`: the last key that is seen, the rows' log-sum-exp
  float scale;

  explicit SdpaOp(const rm_problem& raw) {
    const Operands p(raw);
    tensors = {{p.input(0), 0, false}, {p.input(1), 1, false}, {p.input(2), 2, false},
               {p.output(0), 0, true}};
    masked = p.has_input(3);
    if (masked) tensors.push_back({p.input(3), 3, false});
    if (p.has_input(4)) {
      last = static_cast<int>(tensors.size());
      tensors.push_back({p.input(4), 4, false});
    }
    if (p.has_output(1)) {
      lse = static_cast<int>(tensors.size());
      tensors.push_back({p.output(1), 1, true});
    }
    scale = static_cast<float>(p.attr_float("scale", 1.0));
    causal = p.attr_int("is_causal", 0) != 0;
  }
  Problem problem(const Tensor* t) const {
    Problem p;
    p.q = t[0], p.k = t[1], p.v = t[2], p.o = t[3];
    if (masked) p.mask = &t[4];
    if (last >= 0) p.lengths = &t[last], p.lengths_are_last = true;
    if (lse >= 0) p.lse = &t[lse];
    p.scale = scale, p.causal = causal;
    return p;
  }
  static std::size_t workspace(const Problem& p) { return cuda_ops::sdpa_workspace(p); }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace space,
                              cudaStream_t stream) {
    return cuda_ops::sdpa(p, kernel, space, stream);
  }
};

struct SdpaBackwardOp {
  using Problem = cuda_ops::SdpaBackward;
  static constexpr const char* kOp = "sdpa_backward";
  static constexpr rm_edge kEdges[] = {{'S', 0, 128}, {'T', 0, 128}, {'D', 0, 256}};
  static auto rows() { return cuda_ops::sdpa_backward_rows(); }

  std::vector<Placed> tensors;
  bool causal;
  int mask = -1, last = -1;  // in `tensors`
  float scale;

  explicit SdpaBackwardOp(const rm_problem& raw) {
    const Operands p(raw);
    for (size_t i : {0, 1, 2, 5, 6, 7}) tensors.push_back({p.input(i), i, false});
    for (size_t i = 0; i < 3; ++i) tensors.push_back({p.output(i), i, true});
    const auto optional = [&](size_t i) {
      if (!p.has_input(i)) return -1;
      tensors.push_back({p.input(i), i, false});
      return static_cast<int>(tensors.size()) - 1;
    };
    mask = optional(3), last = optional(4);
    scale = static_cast<float>(p.attr_float("scale", 1.0));
    causal = p.attr_int("is_causal", 0) != 0;
  }
  Problem problem(const Tensor* t) const {
    Problem p;
    p.f.q = t[0], p.f.k = t[1], p.f.v = t[2], p.f.o = t[3], p.f.lse = &t[4], p.d_o = t[5];
    p.dq = t[6], p.dk = t[7], p.dv = t[8];
    if (mask >= 0) p.f.mask = &t[mask];
    if (last >= 0) p.f.lengths = &t[last], p.f.lengths_are_last = true;
    p.f.scale = scale, p.f.causal = causal;
    return p;
  }
  static std::size_t workspace(const Problem& p) { return cuda_ops::sdpa_backward_workspace(p); }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace space,
                              cudaStream_t stream) {
    return cuda_ops::sdpa_backward(p, kernel, space, stream);
  }
};

struct SdpaStepOp {
  using Problem = cuda_ops::SdpaStep;
  static constexpr const char* kOp = "append_sdpa";
  static constexpr rm_edge kEdges[] = {{'T', 0, 128}};
  static constexpr bool kUpdates = true;
  static auto rows() { return cuda_ops::sdpa_step_rows(); }

  std::vector<Placed> tensors;
  bool turns, masked;       // there are angles; there is a mask
  bool ends, keeps_caches;  // nothing else of the plan writes the caches
  float scale;

  explicit SdpaStepOp(const rm_problem& raw) {
    const Operands p(raw);
    for (size_t i : {0, 1, 2, 5}) tensors.push_back({p.input(i), i, false});
    for (size_t i = 0; i < 3; ++i) tensors.push_back({p.output(i), i, true});
    cuda_ops::Tensor& position = tensors[3].tensor;
    if (cuda_ops::numel(position) != 1) throw NotForModule("not one position");
    position.rank = 1, position.shape[0] = position.stride[0] = 1;
    masked = p.has_input(6), turns = p.has_input(3);
    if (masked) tensors.push_back({p.input(6), 6, false});
    if (turns) tensors.insert(tensors.end(), {{p.input(3), 3, false}, {p.input(4), 4, false}});
    ends = p.attr_int("ends", 0) != 0, keeps_caches = p.attr_int("stable", 0) != 0;
    scale = static_cast<float>(p.attr_float("scale", 1.0));
  }
  Problem problem(const Tensor* t) const {
    Problem p;
    p.s.q = t[0], p.k_new = t[1], p.v_new = t[2], p.position = t[3];
    p.s.o = t[4], p.s.k = t[5], p.s.v = t[6];
    if (masked) p.s.mask = &t[7];
    if (turns) p.cos = &t[masked ? 8 : 7], p.sin = p.cos + 1;
    p.s.scale = scale, p.ends = ends, p.stable_caches = keeps_caches;
    return p;
  }
  static std::size_t workspace(const Problem& p) { return cuda_ops::sdpa_step_workspace(p); }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace space,
                              cudaStream_t stream) {
    return cuda_ops::sdpa_step(p, kernel, space, stream);
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
  Row<SdpaBackwardOp>::add(out);
  Row<SdpaStepOp>::add(out);
  Row<RopeOp>::add(out);
}

}  // namespace rm::cuda
