// The table of small steps: checks a program and launches it.
#include "_shim/alias_shim.hpp"
#include "small_steps/api.hpp"
#include "small_steps/kernels/small_steps_any.cuh"
#include "small_steps/reader.hpp"

namespace rm::cuda_ops {
namespace {

Status launch_block(const SmallSteps& p, Workspace, Stream stream) {
  SmallStepsArgs args{};
  SmallReader reader(p, args);
  if (!reader.run()) return invalid("[small_steps] expected a program that was checked, got another");
  args.first = p.inputs.empty() ? p.outputs[0].data : p.inputs[0].data;
  return launch_overlapped("small_steps", small_steps_block, static_cast<unsigned>(reader.blocks()), kSmallThreads,
                           static_cast<std::size_t>(reader.memory()), stream, args);
}

constexpr KernelRow<SmallSteps> kRows[] = {
    {"small_steps_any", "few elements", [](const SmallSteps&) -> const char* { return nullptr; },
     [](const SmallSteps&) { return 5.0; }, launch_block},
};

}  // namespace

std::span<const KernelRow<SmallSteps>> small_steps_rows() { return kRows; }

Status legal(const SmallSteps& p) {
  SmallStepsArgs args{};
  if (p.outputs.empty() || !SmallReader(p, args).run()) {
    return invalid("[small_steps] expected a program over few elements that stays inside its values");
  }
  std::vector<Operand> results, operands;
  for (const Tensor& t : p.outputs) results.push_back({"a result", &t});
  for (const Tensor& t : p.inputs) operands.push_back({"an operand", &t});
  return check_memory("small_steps", results, operands);
}

Status small_steps(const SmallSteps& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  const KernelRow<SmallSteps>* row = nullptr;
  if (Status s = select_row<SmallSteps>("small_steps", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
