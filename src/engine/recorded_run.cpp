#include "engine/recorded_run.hpp"

#include <algorithm>

namespace rm::engine {
namespace {

int64_t aligned(int64_t bytes) {
  return (bytes + plan::kArenaAlignment - 1) / plan::kArenaAlignment * plan::kArenaAlignment;
}

// Inputs that a step updates are the caller's own memory.
std::vector<char> updated_inputs(const Instance& instance) {
  std::vector<char> out(instance.inputs.size(), 0);
  for (const auto& buffer : instance.plan->buffers) {
    if (buffer.kind == plan::BufferKind::kInput && buffer.donated) {
      out[static_cast<size_t>(buffer.index)] = 1;
    }
  }
  return out;
}

bool recordable(const plan::PlannedStep& p) {
  return (p.kernel->row->kernel->traits & RM_KERNEL_CAPTURABLE) != 0;
}

}  // namespace

bool RecordedRun::whole(const Instance& instance) {
  return std::all_of(instance.plan->steps.begin(), instance.plan->steps.end(), recordable);
}

bool RecordedRun::possible(const Instance& instance) {
  const auto& steps = instance.plan->steps;
  const auto count = std::count_if(steps.begin(), steps.end(), recordable);
  return static_cast<size_t>(count) * 4 >= steps.size() * 3;
}

int64_t RecordedRun::bytes(const Instance& instance) {
  const std::vector<char> updated = updated_inputs(instance);
  int64_t total = aligned(instance.plan->arena_bytes);
  for (size_t i = 0; i < instance.inputs.size(); ++i) {
    if (updated[i] == 0) total += aligned(extent_bytes(instance.inputs[i]));
  }
  for (size_t i = 0; i < instance.outputs.size(); ++i) {
    if (instance.output_input[i] < 0) total += aligned(extent_bytes(instance.outputs[i]));
  }
  return total;
}

RecordedRun::RecordedRun(const Instance& instance, const std::vector<TensorView>& inputs,
                         const std::vector<void*>* outputs, runtime::Device& device,
                         std::shared_ptr<void> ticket)
    : device_(device), ticket_(std::move(ticket)), in_place_(outputs != nullptr) {
  const int64_t arena = aligned(instance.plan->arena_bytes);
  memory_ = device.allocate(static_cast<size_t>(in_place_ ? arena : bytes(instance)));
  context_ = std::make_unique<runtime::ExecutionContext>(instance.plan, instance.constants);
  const std::vector<char> updated = updated_inputs(instance);
  auto* at = static_cast<std::byte*>(memory_.get());
  context_->bind_arena(at);
  at += arena;
  const auto staged = [&](const ir::Layout& layout) {
    const int64_t size = extent_bytes(layout);
    Staged out{at, nullptr, static_cast<size_t>(size)};
    at += aligned(size);
    return out;
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    inputs_.push_back(in_place_ || updated[i] != 0 ? Staged{nullptr, inputs[i].data, 0}
                                                   : staged(instance.inputs[i]));
    const Staged& s = inputs_.back();
    context_->bind_input(i, s.memory != nullptr ? s.memory : s.given);
  }
  for (size_t i = 0; i < instance.outputs.size(); ++i) {
    if (instance.output_input[i] >= 0) {
      outputs_.push_back({nullptr, nullptr, 0});
      continue;
    }
    outputs_.push_back(in_place_ ? Staged{nullptr, (*outputs)[i], 0} : staged(instance.outputs[i]));
    context_->bind_output(i, in_place_ ? (*outputs)[i] : outputs_.back().memory);
  }
  const auto& steps = instance.plan->steps;
  for (size_t first = 0, behind = 0; first < steps.size(); first = behind) {
    const bool recorded = recordable(steps[first]);
    while (behind < steps.size() && recordable(steps[behind]) == recorded) ++behind;
    parts_.push_back({nullptr, first, behind});
    if (!recorded) continue;
    parts_.back().recording =
        device.record([&](rm_stream* stream) { context_->run(stream, first, behind); });
  }
}

std::vector<const void*> RecordedRun::updated(const Instance& instance,
                                              const std::vector<TensorView>& inputs) {
  const std::vector<char> updated = updated_inputs(instance);
  std::vector<const void*> out;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (updated[i] != 0) out.push_back(inputs[i].data);
  }
  return out;
}

bool RecordedRun::takes(const std::vector<TensorView>& inputs, const std::vector<void*>& outputs) const {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (inputs_[i].memory == nullptr && inputs_[i].given != inputs[i].data) return false;
  }
  for (size_t i = 0; i < outputs_.size(); ++i) {
    if (outputs_[i].given != nullptr && outputs_[i].given != outputs[i]) return false;
  }
  return true;
}

void RecordedRun::run(const std::vector<TensorView>& inputs, const std::vector<void*>& outputs,
                      rm_stream* stream) {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (inputs_[i].memory == nullptr) continue;
    device_.copy(inputs_[i].memory, inputs[i].data, inputs_[i].bytes, stream);
  }
  for (const Part& part : parts_) {
    if (part.recording != nullptr) {
      part.recording->launch(stream);
    } else {
      context_->run(stream, part.first, part.behind);
    }
  }
  for (size_t i = 0; i < outputs_.size(); ++i) {
    if (outputs_[i].memory == nullptr) continue;
    device_.copy(outputs[i], outputs_[i].memory, outputs_[i].bytes, stream);
  }
}

}  // namespace rm::engine
