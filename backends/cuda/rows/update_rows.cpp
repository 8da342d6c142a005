// What training steps do to parameters and optimiser states: adam of one parameter, adams of several.
#include "adam/api.hpp"
#include "rows/row.hpp"

namespace rm::cuda {
namespace {

using cuda_ops::Tensor;

/// The attributes and the optional operand that all parameters of a step share.
cuda_ops::AdamUpdate settings_of(const Operands& p) {
  cuda_ops::AdamUpdate out;
  const std::string_view decay = p.attr_string("decay", "none");
  if (decay == "gradient") out.decay = cuda_ops::AdamDecay::gradient;
  if (decay == "parameter") out.decay = cuda_ops::AdamDecay::parameter;
  out.maximize = p.attr_int("maximize", 0) != 0;
  return out;
}

/// p, gradient, m, v, numbers, largest?, apply? -> p, m, v, largest?
struct AdamOp {
  using Problem = cuda_ops::AdamUpdate;
  static constexpr const char* kOp = "adam";
  static constexpr size_t kNumbers = 4, kLargest = 5, kApply = 6;
  static auto rows() { return cuda_ops::adam_update_rows(); }

  std::vector<Placed> tensors;  // the five operands, the results, largest, apply
  Problem settings;

  explicit AdamOp(const rm_problem& raw) {
    const Operands p(raw);
    settings = settings_of(p);
    settings.has_largest = p.has_input(kLargest), settings.has_apply = p.has_input(kApply);
    for (size_t i = 0; i <= kNumbers; ++i) tensors.push_back({p.input(i), i, false});
    for (size_t i = 0; i < 3; ++i) tensors.push_back({p.output(i), i, true});
    if (settings.has_largest) {
      tensors.push_back({p.input(kLargest), kLargest, false});
      tensors.push_back({p.output(3), 3, true});
    }
    if (settings.has_apply) tensors.push_back({p.input(kApply), kApply, false});
  }
  Problem problem(const Tensor* t) const {
    Problem p = settings;
    cuda_ops::AdamTensors one{t[0], t[1], t[2], t[3], {}, t[5], t[6], t[7], {}};
    if (p.has_largest) one.largest = t[8], one.new_largest = t[9];
    p.numbers = t[kNumbers];
    if (p.has_apply) p.apply = t[p.has_largest ? 10 : 8];
    p.tensors.push_back(one);
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::adam_update(p, kernel, stream);
  }
};

/// numbers, apply?, then p, gradient, m and v of each parameter -> p, m and v of each.
struct AdamsOp {
  using Problem = cuda_ops::AdamUpdate;
  static constexpr const char* kOp = "adams";
  static constexpr size_t kFirst = 2, kMostParameters = 12;  // src/plan/fuse_updates.cpp
  static constexpr size_t kTensors = kFirst + 7 * kMostParameters;
  static auto rows() { return cuda_ops::adam_update_rows(); }

  std::vector<Placed> tensors;  // numbers, seven of each parameter, apply
  Problem settings;
  size_t count;

  explicit AdamsOp(const rm_problem& raw) {
    const Operands p(raw);
    settings = settings_of(p);
    settings.has_apply = p.has_input(1);
    count = (p.num_inputs() - kFirst) / 4;
    if (count > kMostParameters) throw NotForModule("more than 12 parameters");
    tensors.push_back({p.input(0), 0, false});
    for (size_t k = 0; k < count; ++k) {
      const size_t in = kFirst + 4 * k, out = 3 * k;
      for (size_t i = in; i < in + 4; ++i) tensors.push_back({p.input(i), i, false});
      for (size_t i = out; i < out + 3; ++i) tensors.push_back({p.output(i), i, true});
    }
    if (settings.has_apply) tensors.push_back({p.input(1), 1, false});
  }
  Problem problem(const Tensor* t) const {
    Problem p = settings;
    p.numbers = t[0];
    const Tensor* of = t + 1;
    for (size_t k = 0; k < count; ++k, of += 7) {
      p.tensors.push_back({of[0], of[1], of[2], of[3], {}, of[4], of[5], of[6], {}});
    }
    if (p.has_apply) p.apply = *of;
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::adam_update(p, kernel, stream);
  }
};

}  // namespace

void add_update_rows(std::vector<rm_kernel>& out) {
  Row<AdamOp>::add(out);
  Row<AdamsOp>::add(out);
}

}  // namespace rm::cuda
