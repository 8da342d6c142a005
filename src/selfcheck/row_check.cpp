// Prepares, packs, launches and compares, through include/rm/kernels.h only.
#include "selfcheck/row_check.hpp"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <stdexcept>

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

/// The device cannot run a check now; that says nothing about the row.
struct NoPlace : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The memory of a launch as the row sees it: on the host where it is; on a device in one block with
/// the same guards, copied there before the launch and back behind it.
class Stage {
 public:
  explicit Stage(Place* place) : place_(place) {}

  void add(GuardedMemory* memory) {
    if (memory == nullptr) return;
    blocks_.push_back({memory, bytes_});
    bytes_ += memory->block_bytes();
  }
  /// Of everything added; nothing is added any more.
  void enter() {
    if (place_ == nullptr) return;
    try {
      fill();
    } catch (const Error& error) {
      throw NoPlace(error.what());
    }
  }
  void leave() {
    if (place_ == nullptr) return;
    place_->copy_out(here_.data(), there_.get(), bytes_);
    for (const Block& b : blocks_) {
      std::memcpy(b.memory->block(), here_.data() + b.at, b.memory->block_bytes());
    }
  }
  void* address(GuardedMemory* memory) const {
    if (memory == nullptr || place_ == nullptr) return memory == nullptr ? nullptr : memory->data();
    const auto it = std::find_if(blocks_.begin(), blocks_.end(),
                                 [&](const Block& b) { return b.memory == memory; });
    return static_cast<std::byte*>(there_.get()) + it->at + GuardedMemory::kGuard;
  }
  rm_stream* stream() const { return place_ == nullptr ? nullptr : place_->stream(); }

 private:
  void fill() {
    there_ = place_->allocate(bytes_);
    here_.resize(bytes_);
    for (const Block& b : blocks_) {
      std::memcpy(here_.data() + b.at, b.memory->block(), b.memory->block_bytes());
    }
    place_->copy_in(there_.get(), here_.data(), bytes_);
  }

  struct Block {
    GuardedMemory* memory;
    size_t at;
  };
  Place* const place_;
  std::vector<Block> blocks_;
  size_t bytes_ = 0;
  std::vector<std::byte> here_;
  std::shared_ptr<void> there_;
};

/// For the packed copy of a constant operand; null when the kernel reads it as it lies.
std::unique_ptr<GuardedMemory> room_for_packed(const Prepared& prepared, size_t input) {
  const rm_kernel* kernel = prepared.kernel;
  if (kernel->packing == nullptr || kernel->prepack == nullptr) return nullptr;
  rm_packing packing{};
  packing.struct_size = sizeof packing;
  kernel->packing(prepared.state.get(), input, &packing);
  return packing.bytes == 0 ? nullptr : std::make_unique<GuardedMemory>(packing.bytes);
}

std::string launched(const Prepared& prepared, const select::Problem& problem, Place* place,
                     const std::vector<Filled>& inputs, std::vector<Filled>& outputs) {
  const rm_kernel* kernel = prepared.kernel;
  GuardedMemory workspace(kernel->workspace == nullptr
                              ? 0
                              : static_cast<size_t>(kernel->workspace(prepared.state.get())));
  std::vector<std::unique_ptr<GuardedMemory>> copies(inputs.size());
  Stage stage(place);
  for (size_t i = 0; i < inputs.size(); ++i) {
    stage.add(inputs[i].memory.get());
    const bool constant = i < 64 && (problem.c().constant_inputs >> i & 1) != 0;
    if (inputs[i].memory != nullptr && constant) copies[i] = room_for_packed(prepared, i);
    stage.add(copies[i].get());
  }
  for (Filled& f : outputs) stage.add(f.memory.get());
  stage.add(&workspace);
  stage.enter();

  std::vector<const void*> in;
  for (size_t i = 0; i < inputs.size(); ++i) {
    in.push_back(stage.address(inputs[i].memory.get()));
    if (copies[i] == nullptr) continue;
    rm_tensor source = problem.input(i);
    source.data = const_cast<void*>(in.back());
    void* packed = stage.address(copies[i].get());
    backend::check(kernel->prepack(prepared.state.get(), i, &source, packed), "prepack");
    in.back() = packed;
  }
  std::vector<void*> out;
  for (Filled& f : outputs) out.push_back(stage.address(f.memory.get()));
  rm_launch launch{};
  launch.struct_size = sizeof launch;
  launch.state = prepared.state.get();
  launch.inputs = in.data();
  launch.outputs = out.data();
  launch.workspace = stage.address(&workspace);
  launch.stream = stage.stream();
  backend::check(kernel->launch(&launch), "launch");
  stage.leave();

  const bool around = std::all_of(outputs.begin(), outputs.end(), [](const Filled& f) {
    return f.memory == nullptr || (f.memory->guards_intact() && gaps_intact(f));
  });
  if (!around) return "it wrote outside its result";
  if (!workspace.guards_intact()) return "it wrote outside its workspace";
  for (const auto& copy : copies) {
    if (copy != nullptr && !copy->guards_intact()) return "it packed outside its copy of a weight";
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
                          const Shape& shape, Place* place, uint64_t seed, std::string* failure) {
  const std::vector<Filled> inputs = random_inputs(shape, seed);
  std::vector<Filled> outputs = blank_outputs(shape, seed);
  const std::vector<Part> parts = expected(shape, inputs, outputs);
  *failure = launched(prepared, problem, place, inputs, outputs);
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

std::string check_row(const select::Row& row, uint32_t config, const Shape& shape, Place* place) {
  const select::Problem problem(shape.op, shape.inputs, shape.outputs, shape.attrs, row.place());
  const Prepared prepared(row, config, problem);
  try {
    std::string failure;
    const std::vector<Fault> first = faults(prepared, problem, shape, place, 1, &failure);
    if (!failure.empty()) return failure;
    if (first.empty()) return {};
    const std::vector<Fault> again = faults(prepared, problem, shape, place, 2, &failure);
    if (!failure.empty()) return failure;
    if (comes_back(first, again, results_of(shape))) return text(first[0], first.size(), shape);
    return {};
  } catch (const NoPlace& error) {
    throw Error(RM_UNAVAILABLE, error.what());
  } catch (const Error& error) {
    // No memory, or a graph that is being recorded: neither is the row's.
    if (error.code() == RM_RESOURCE_EXHAUSTED || error.code() == RM_FAILED_PRECONDITION) throw;
    return error.what();
  }
}

}  // namespace rm::selfcheck
