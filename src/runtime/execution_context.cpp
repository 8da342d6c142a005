// Pointers of constants are resolved once, those of the arena when it changes, those of user tensors
// at every call.
#include "runtime/execution_context.hpp"

#include <chrono>

#include "backend/status.hpp"

namespace rm::runtime {

using plan::BufferKind;
using plan::Ref;

BoundConstants bind_constants(const plan::Plan& plan, std::vector<ConstantPtr> constants,
                              ConstantStore& store, const RunCopy& run_copy) {
  BoundConstants out{std::move(constants), {}};
  out.packed.resize(plan.steps.size());
  for (size_t s = 0; s < plan.steps.size(); ++s) {
    const auto& planned = plan.steps[s];
    out.packed[s].resize(planned.step.inputs.size());
    for (size_t i = 0; i < planned.step.inputs.size(); ++i) {
      const Ref& r = planned.step.inputs[i];
      if (!r.present()) continue;
      const auto& buffer = plan.buffers[static_cast<size_t>(r.buffer)];
      if (buffer.kind != BufferKind::kConstant) continue;
      const Constant& c = *out.constants[static_cast<size_t>(buffer.index)];
      out.packed[s][i] = store.packed(*planned.kernel, i, c, r.layout, run_copy);
    }
  }
  return out;
}

ExecutionContext::ExecutionContext(std::shared_ptr<const plan::Plan> plan,
                                   std::shared_ptr<const BoundConstants> constants)
    : plan_(std::move(plan)), constants_(std::move(constants)) {
  size_t slots = 0;
  for (const auto& p : plan_->steps) slots += p.step.inputs.size() + p.step.outputs.size();
  pointers_.assign(slots, nullptr);
  launches_.reserve(plan_->steps.size());

  size_t slot = 0;
  auto resolve = [&](const Ref& r, const PackedCopy* packed) {
    if (!r.present()) {
      ++slot;
      return;
    }
    const auto& buffer = plan_->buffers[static_cast<size_t>(r.buffer)];
    auto index = static_cast<size_t>(buffer.index);
    ptrdiff_t shift = r.layout.offset * static_cast<ptrdiff_t>(ir::size_bytes(r.layout.dtype));
    auto patch = [&](std::vector<std::vector<Patch>>& table) {
      if (table.size() <= index) table.resize(index + 1);
      table[index].push_back({slot, shift});
    };
    switch (buffer.kind) {
      case BufferKind::kInput: patch(inputs_); break;
      case BufferKind::kOutput: patch(outputs_); break;
      case BufferKind::kTemp:
        temporaries_.push_back({slot, plan_->offsets[static_cast<size_t>(r.buffer)] + shift});
        break;
      case BufferKind::kConstant: {
        const auto* raw = static_cast<const std::byte*>(constants_->constants[index]->data);
        pointers_[slot] = packed != nullptr ? packed->memory.get() : raw + shift;
        break;
      }
    }
    ++slot;
  };
  for (size_t s = 0; s < plan_->steps.size(); ++s) {
    const auto& p = plan_->steps[s];
    rm_launch launch{};
    launch.struct_size = sizeof launch;
    launch.state = p.kernel->state->get();
    launch.inputs = pointers_.data() + slot;
    for (size_t i = 0; i < p.step.inputs.size(); ++i) {
      resolve(p.step.inputs[i], constants_->packed[s][i].get());
    }
    // Kernels write through this table; the const is only the shared slot type's.
    launch.outputs = const_cast<void**>(pointers_.data() + slot);
    for (const auto& r : p.step.outputs) resolve(r, nullptr);
    launches_.push_back(launch);
  }
}

void ExecutionContext::bind_arena(std::byte* base) {
  if (base == arena_) return;
  arena_ = base;
  for (const Patch& p : temporaries_) pointers_[p.slot] = base + p.byte_offset;
  for (size_t s = 0; s < launches_.size(); ++s) {
    const int64_t offset = plan_->steps[s].workspace_offset;
    launches_[s].workspace = offset >= 0 ? base + offset : nullptr;
  }
}

void ExecutionContext::bind(const std::vector<std::vector<Patch>>& table, size_t index,
                            const void* data) {
  if (index >= table.size()) return;  // no step reads it
  for (const Patch& p : table[index]) {
    pointers_[p.slot] = static_cast<const std::byte*>(data) + p.byte_offset;
  }
}

void ExecutionContext::launch(size_t step) {
  const rm_kernel* kernel = plan_->steps[step].kernel->state->kernel();
  if (rm_status* status = kernel->launch(&launches_[step]); status != nullptr) {
    backend::check(status, std::string(backend::view(kernel->name)));
  }
}

void ExecutionContext::bind_stream(rm_stream* stream) {
  if (stream == stream_) return;
  stream_ = stream;
  for (rm_launch& launch : launches_) launch.stream = stream;
}

void ExecutionContext::run(rm_stream* stream, size_t first, size_t behind) {
  bind_stream(stream);
  for (size_t s = first; s < behind; ++s) launch(s);
}

void ExecutionContext::run_timed(std::vector<int64_t>& step_ns, Device& device,
                                 rm_stream* stream) {
  bind_stream(stream);
  using Clock = std::chrono::steady_clock;
  step_ns.resize(launches_.size());
  for (size_t s = 0; s < launches_.size(); ++s) {
    Clock::time_point start = Clock::now();
    launch(s);
    device.synchronize(stream);
    step_ns[s] += std::chrono::nanoseconds(Clock::now() - start).count();
  }
}

}  // namespace rm::runtime
