// The plan verifier. Deliberately naive: it recomputes everything from the steps and compares all
// pairs, sharing no code with the planner it checks.
#include "base/error.hpp"
#include "plan/plan.hpp"

namespace rm::plan {
namespace {

struct Span {
  int64_t begin = 0, end = 0;
  size_t first = 0, last = 0;
  std::string what;
};

[[noreturn]] void broken(const std::string& rule, const std::string& what) {
  throw Error(RM_INTERNAL, "[verify_plan] expected " + rule + ", got " + what);
}

// The last byte a view touches must lie in the buffer.
void view_stays_inside(const Plan& plan, const Ref& r, size_t step) {
  const Buffer& b = plan.buffers[static_cast<size_t>(r.buffer)];
  if (r.layout.dims.size() != r.layout.strides.size()) broken("a stride a dim", "step " + std::to_string(step));
  int64_t low = r.layout.offset, high = r.layout.offset;
  for (size_t i = 0; i < r.layout.dims.size(); ++i) {
    if (r.layout.dims[i] == 0) return;
    int64_t reach = (r.layout.dims[i] - 1) * r.layout.strides[i];
    (reach < 0 ? low : high) += reach;
  }
  auto size = static_cast<int64_t>(ir::size_bytes(r.layout.dtype));
  if (low < 0 || (high + 1) * size > b.bytes) {
    broken("views inside their buffer",
           "step " + std::to_string(step) + " (" + plan.steps[step].step.op + "), buffer of " +
               std::to_string(b.bytes) + " bytes");
  }
}

}  // namespace

void verify_plan(const Plan& plan) {
  std::vector<Span> spans(plan.buffers.size());
  std::vector<char> written(plan.buffers.size(), 0);
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    BufferKind kind = plan.buffers[i].kind;
    written[i] = kind == BufferKind::kInput || kind == BufferKind::kConstant ? 1 : 0;
  }
  std::vector<Span> workspaces;
  for (size_t s = 0; s < plan.steps.size(); ++s) {
    const Step& step = plan.steps[s].step;
    auto touch = [&](const Ref& r) {
      view_stays_inside(plan, r, s);
      Span& span = spans[static_cast<size_t>(r.buffer)];
      if (span.what.empty()) {
        span.first = s;
        span.what = "buffer " + std::to_string(r.buffer);
      }
      span.last = s;
    };
    for (const auto& r : step.inputs) {
      if (!r.present()) continue;
      if (written[static_cast<size_t>(r.buffer)] == 0 && r.layout.num_elements() != 0) {
        broken("a write before the read", "step " + std::to_string(s) + " (" + step.op + ")");
      }
      touch(r);
    }
    for (const auto& r : step.outputs) {
      if (!r.present()) continue;
      const Buffer& target = plan.buffers[static_cast<size_t>(r.buffer)];
      if (target.kind == BufferKind::kConstant ||
          (target.kind == BufferKind::kInput && !target.donated)) {
        broken("inputs and constants never written", "step " + std::to_string(s));
      }
      if (step.updates && written[static_cast<size_t>(r.buffer)] == 0) {
        broken("memory to update that was written", "step " + std::to_string(s));
      }
      touch(r);
      written[static_cast<size_t>(r.buffer)] = 1;
    }
    const auto& planned = plan.steps[s];
    if (int64_t bytes = planned.kernel->workspace_bytes; bytes > 0) {
      if (planned.workspace_offset < 0) broken("a workspace", "step " + std::to_string(s));
      workspaces.push_back({planned.workspace_offset, planned.workspace_offset + bytes, s, s,
                            "workspace of step " + std::to_string(s)});
    }
  }
  std::vector<Span> live = std::move(workspaces);
  for (size_t i = 0; i < spans.size(); ++i) {
    if (plan.buffers[i].kind != BufferKind::kTemp || spans[i].what.empty()) continue;
    if (plan.offsets[i] < 0) broken("an offset for every temporary", spans[i].what);
    spans[i].begin = plan.offsets[i];
    spans[i].end = plan.offsets[i] + plan.buffers[i].bytes;
    live.push_back(spans[i]);
  }
  for (size_t a = 0; a < live.size(); ++a) {
    if (live[a].end > plan.arena_bytes) broken("buffers inside the arena", live[a].what);
    for (size_t b = a + 1; b < live.size(); ++b) {
      bool together = live[a].first <= live[b].last && live[b].first <= live[a].last;
      bool overlap = live[a].begin < live[b].end && live[b].begin < live[a].end;
      if (together && overlap) {
        broken("no overlap of live buffers", live[a].what + " and " + live[b].what);
      }
    }
  }
  for (const auto& r : plan.outputs) {
    if (r.layout.num_elements() != 0 && written[static_cast<size_t>(r.buffer)] == 0) {
      broken("every output written", "buffer " + std::to_string(r.buffer));
    }
  }
}

}  // namespace rm::plan
