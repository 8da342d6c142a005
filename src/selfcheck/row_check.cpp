// Prepares, packs, launches and compares, through include/rm/kernels.h only.
#include "selfcheck/row_check.hpp"

#include <algorithm>
#include <sstream>

#include "backend/status.hpp"
#include "base/error.hpp"
#include "ir/scalar.hpp"
#include "select/prepared_kernels.hpp"
#include "selfcheck/expected.hpp"

namespace rm::selfcheck {
namespace {

struct Prepared {
  Prepared(const select::Row& row, uint32_t config, const select::Problem& problem)
      : kernel(row.kernel), state(kernel, made(row, config, problem)) {}

  static rm_kernel_state* made(const select::Row& row, uint32_t config,
                               const select::Problem& problem) {
    rm_kernel_state* out = nullptr;
    backend::check(row.kernel->prepare(&problem.c(), row.device, config, &out),
                   std::string(row.name()));
    return out;
  }

  const rm_kernel* kernel;
  select::KernelState state;
};

/// The packed copy of a constant operand; null when the kernel reads it as it lies.
std::unique_ptr<GuardedMemory> packed(const Prepared& prepared, const rm_tensor& operand,
                                      size_t input, const Filled& filled) {
  const rm_kernel* kernel = prepared.kernel;
  if (kernel->packing == nullptr || kernel->prepack == nullptr) return nullptr;
  rm_packing packing{};
  packing.struct_size = sizeof packing;
  kernel->packing(prepared.state.get(), input, &packing);
  if (packing.bytes == 0) return nullptr;
  auto copy = std::make_unique<GuardedMemory>(packing.bytes);
  rm_tensor source = operand;
  source.data = const_cast<std::byte*>(filled.memory->data());
  backend::check(kernel->prepack(prepared.state.get(), input, &source, copy->data()), "prepack");
  return copy;
}

std::string launched(const Prepared& prepared, const select::Problem& problem,
                     const std::vector<Filled>& inputs, std::vector<Filled>& outputs) {
  std::vector<std::unique_ptr<GuardedMemory>> copies;
  std::vector<const void*> in;
  for (size_t i = 0; i < inputs.size(); ++i) {
    in.push_back(inputs[i].memory == nullptr ? nullptr : inputs[i].memory->data());
    const bool constant = i < 64 && (problem.c().constant_inputs >> i & 1) != 0;
    if (in.back() == nullptr || !constant) continue;
    auto copy = packed(prepared, problem.input(i), i, inputs[i]);
    if (copy == nullptr) continue;
    in.back() = copy->data();
    copies.push_back(std::move(copy));
  }
  std::vector<void*> out;
  for (Filled& f : outputs) out.push_back(f.memory == nullptr ? nullptr : f.memory->data());
  const rm_kernel* kernel = prepared.kernel;
  GuardedMemory workspace(kernel->workspace == nullptr
                              ? 0
                              : static_cast<size_t>(kernel->workspace(prepared.state.get())));
  rm_launch launch{};
  launch.struct_size = sizeof launch;
  launch.state = prepared.state.get();
  launch.inputs = in.data();
  launch.outputs = out.data();
  launch.workspace = workspace.data();
  backend::check(kernel->launch(&launch), "launch");
  const bool around = std::all_of(outputs.begin(), outputs.end(), [](const Filled& f) {
    return f.memory == nullptr || (f.memory->guards_intact() && gaps_intact(f));
  });
  if (!around) return "it wrote outside its result";
  if (!workspace.guards_intact()) return "it wrote outside its workspace";
  for (const auto& copy : copies) {
    if (!copy->guards_intact()) return "it packed outside its copy of a weight";
  }
  for (const Filled& f : inputs) {
    if (f.memory != nullptr && !f.memory->guards_intact()) return "it wrote around an operand";
  }
  for (Filled& f : outputs) {
    if (f.memory != nullptr) read_back(f);
  }
  return {};
}

struct Fault {
  size_t output;
  int64_t element;
  double got, want;
  bool operator==(const Fault& other) const {
    return output == other.output && element == other.element;
  }
};

std::vector<Fault> faults(const Prepared& prepared, const select::Problem& problem,
                          const Shape& shape, uint64_t seed, std::string* failure) {
  const std::vector<Filled> inputs = random_inputs(shape, seed);
  std::vector<Filled> outputs = blank_outputs(shape, seed);
  const std::vector<Part> parts = expected(shape, inputs, outputs);
  *failure = launched(prepared, problem, inputs, outputs);
  std::vector<Fault> out;
  if (!failure->empty()) return out;
  for (const Part& part : parts) {
    const ops::HostTensor& got = outputs[part.output].values;
    const std::vector<int64_t> wrong = differences(shape, part, got);
    size_t at = 0;
    for (int64_t element : wrong) {
      while (part.elements[at] != element) ++at;
      const auto dtype = got.type.dtype;
      out.push_back({part.output, element, ir::load_element(dtype, got.at(element)),
                     ir::load_element(dtype, part.values.at(static_cast<int64_t>(at)))});
    }
  }
  return out;
}

std::string text(const Fault& fault, size_t count, const Shape& shape) {
  const ir::Ints& dims = shape.outputs[fault.output].layout.dims;
  int64_t rest = fault.element;
  ir::Ints place(dims.size());
  for (size_t d = dims.size(); d-- > 0; rest /= std::max<int64_t>(dims[d], 1)) {
    place[d] = rest % std::max<int64_t>(dims[d], 1);
  }
  std::ostringstream out;
  out << count << " wrong elements, the first at [";
  for (size_t d = 0; d < place.size(); ++d) out << (d == 0 ? "" : ",") << place[d];
  out << "]: " << fault.got << " instead of " << fault.want;
  return out.str();
}

/// A value that two roundings put on different sides of a step is no fault of the kernel, and does
/// not come back with other operands. A wrong tile, tail or type does.
bool comes_back(const std::vector<Fault>& first, const std::vector<Fault>& again, size_t results) {
  if (first.size() * 50 > results && again.size() * 50 > results) return true;
  return std::any_of(first.begin(), first.end(), [&](const Fault& fault) {
    return std::find(again.begin(), again.end(), fault) != again.end();
  });
}

size_t results_of(const Shape& shape) {
  int64_t out = 0;
  for (const select::Operand& o : shape.outputs) out += o.present ? o.layout.num_elements() : 0;
  return static_cast<size_t>(out);
}

}  // namespace

std::string check_row(const select::Row& row, uint32_t config, const Shape& shape) {
  const select::Problem problem(shape.op, shape.inputs, shape.outputs, shape.attrs);
  const Prepared prepared(row, config, problem);
  try {
    std::string failure;
    const std::vector<Fault> first = faults(prepared, problem, shape, 1, &failure);
    if (!failure.empty()) return failure;
    if (first.empty()) return {};
    const std::vector<Fault> again = faults(prepared, problem, shape, 2, &failure);
    if (!failure.empty()) return failure;
    if (comes_back(first, again, results_of(shape))) return text(first[0], first.size(), shape);
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace rm::selfcheck
