// Elementwise programs, and several small steps in one.
#include "ewise/api.hpp"
#include "rows/row.hpp"
#include "small_steps/api.hpp"

namespace rm::cuda {
namespace {

using cuda_ops::Tensor;

cuda_ops::EwiseProgram program_of(const Operands& p) {
  constexpr size_t kFields = 5;  // of an instruction
  cuda_ops::EwiseProgram out;
  const std::vector<int64_t> code = p.attr_ints("code");
  if (code.size() % kFields != 0) throw NotForModule("the program is not whole");
  for (size_t i = 0; i < code.size(); i += kFields) {
    const auto field = [&](size_t k) { return static_cast<int>(code[i + k]); };
    out.code.push_back({field(0), field(1), field(2), field(3), field(4)});
  }
  out.imm = p.attr_floats("imm");
  return out;
}

struct EwiseOp {
  using Problem = cuda_ops::Ewise;
  static constexpr const char* kOp = "ewise";
  static auto rows() { return cuda_ops::ewise_rows(); }

  std::vector<Placed> tensors;  // y first
  cuda_ops::EwiseProgram program;

  explicit EwiseOp(const rm_problem& raw) {
    const Operands p(raw);
    if (p.num_inputs() > static_cast<size_t>(cuda_ops::kMaxOperands)) {
      throw NotForModule("more than 12 operands");
    }
    tensors.push_back({p.output(0), 0, true});
    for (size_t i = 0; i < p.num_inputs(); ++i) tensors.push_back({p.input(i), i, false});
    program = program_of(p);
  }
  Problem problem(const Tensor* t) const {
    return {program, {t + 1, t + tensors.size()}, t[0]};
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::ewise(p, kernel, stream);
  }
};

struct SmallStepsOp {
  using Problem = cuda_ops::SmallSteps;
  static constexpr const char* kOp = "small_steps";
  static constexpr size_t kTensors = 40;
  static auto rows() { return cuda_ops::small_steps_rows(); }

  std::vector<Placed> tensors;  // inputs, outputs
  size_t inputs;
  Problem given;  // without tensors

  explicit SmallStepsOp(const rm_problem& raw) : inputs(raw.num_inputs) {
    const Operands p(raw);
    for (size_t i = 0; i < inputs; ++i) tensors.push_back({p.input(i), i, false});
    for (size_t i = 0; i < raw.num_outputs; ++i) tensors.push_back({p.output(i), i, true});
    given.program = p.attr_ints("program");
    given.code = program_of(p);
  }
  Problem problem(const Tensor* t) const {
    Problem p = given;
    p.inputs.assign(t, t + inputs), p.outputs.assign(t + inputs, t + tensors.size());
    return p;
  }
  static std::size_t workspace(const Problem&) { return 0; }
  static cuda_ops::Status run(const Problem& p, const char* kernel, cuda_ops::Workspace,
                              cudaStream_t stream) {
    return cuda_ops::small_steps(p, kernel, stream);
  }
};

}  // namespace

void add_ewise_rows(std::vector<rm_kernel>& out) {
  Row<EwiseOp>::add(out);
  Row<SmallStepsOp>::add(out);
}

}  // namespace rm::cuda
