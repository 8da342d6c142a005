// The plan verifier. Deliberately naive: it recomputes everything from the steps and compares all
// pairs, sharing no code with the planner it checks.
#include <algorithm>

#include "base/error.hpp"
#include "plan/plan.hpp"

namespace rm::plan {
namespace {

// For sums of products of 64 bits, clamped far beyond any buffer.
__extension__ typedef __int128 Wide;

struct Span {
  Wide begin = 0, end = 0;
  size_t first = 0, last = 0;
  std::string what;
};

[[noreturn]] void broken(const std::string& rule, const std::string& what) {
  throw Error(RM_INTERNAL, "[verify_plan] expected " + rule + ", got " + what);
}

bool is_empty(const ir::Layout& layout) {
  return std::find(layout.dims.begin(), layout.dims.end(), 0) != layout.dims.end();
}

// Row-major without gaps: no two indices are one element.
bool is_dense(const ir::Layout& layout) {
  Wide stride = 1;
  for (size_t i = layout.dims.size(); i-- > 0; stride *= layout.dims[i]) {
    if (layout.dims[i] != 1 && Wide{layout.strides[i]} != stride) return false;
  }
  return true;
}

std::string at(const Plan& plan, size_t step) {
  return "step " + std::to_string(step) + " (" + plan.steps[step].step.op + ")";
}

// The first and last byte that a view touches lie in its buffer.
void view_stays_inside(const Plan& plan, const Ref& r, size_t step) {
  const Buffer& b = plan.buffers[static_cast<size_t>(r.buffer)];
  if (r.layout.dims.size() != r.layout.strides.size()) broken("a stride a dim", at(plan, step));
  if (is_empty(r.layout)) return;
  Wide low = r.layout.offset, high = r.layout.offset;
  for (size_t i = 0; i < r.layout.dims.size(); ++i) {
    const Wide reach = (Wide{r.layout.dims[i]} - 1) * r.layout.strides[i];
    (reach < 0 ? low : high) += std::clamp<Wide>(reach, -(Wide{1} << 80), Wide{1} << 80);
  }
  const auto size = static_cast<Wide>(ir::size_bytes(r.layout.dtype));
  if (low < 0 || (high + 1) * size > b.bytes) {
    broken("views inside their buffer",
           at(plan, step) + ", buffer of " + std::to_string(b.bytes) + " bytes");
  }
}

// What a buffer holds between two steps.
struct Content {
  int32_t version = 0;
  bool written = false, read = false;  // this version
};

class Verifier {
 public:
  explicit Verifier(const Plan& plan)
      : plan_(plan), contents_(plan.buffers.size()), spans_(plan.buffers.size()) {}

  void run() {
    for (size_t i = 0; i < plan_.buffers.size(); ++i) {
      const BufferKind kind = plan_.buffers[i].kind;
      contents_[i].written = kind == BufferKind::kInput || kind == BufferKind::kConstant;
    }
    for (size_t s = 0; s < plan_.steps.size(); ++s) {
      const Step& step = plan_.steps[s].step;
      for (const Ref& r : step.inputs) {
        if (r.present()) read(r, s);
      }
      for (size_t i = 0; i < step.outputs.size(); ++i) {
        // Of results that are written element by element some may be new.
        const bool fresh = i < step.fresh || (step.in_place && step.outputs[i].version == 0);
        if (step.outputs[i].present()) write(step.outputs[i], s, step.updates && !fresh);
      }
      workspace(s);
    }
    for (const Ref& r : plan_.outputs) {
      if (is_empty(r.layout)) continue;
      const Content& c = contents_[static_cast<size_t>(r.buffer)];
      if (!c.written) broken("every output written", "buffer " + std::to_string(r.buffer));
      if (c.version != r.version) broken("outputs of the last version", versions(r, c));
    }
    placement();
  }

 private:
  static std::string versions(const Ref& r, const Content& c) {
    return "version " + std::to_string(r.version) + " of buffer " + std::to_string(r.buffer) +
           ", which is at " + std::to_string(c.version);
  }

  void touch(const Ref& r, size_t s) {
    view_stays_inside(plan_, r, s);
    Span& span = spans_[static_cast<size_t>(r.buffer)];
    if (span.what.empty()) {
      span.first = s;
      span.what = "buffer " + std::to_string(r.buffer);
    }
    span.last = s;
  }

  void read(const Ref& r, size_t s) {
    touch(r, s);
    if (is_empty(r.layout)) return;
    Content& c = contents_[static_cast<size_t>(r.buffer)];
    if (!c.written) broken("a write before the read", at(plan_, s));
    if (c.version != r.version) {
      broken("no read of content that was overwritten", at(plan_, s) + " reading " + versions(r, c));
    }
    c.read = true;
  }

  void write(const Ref& r, size_t s, bool updates) {
    touch(r, s);
    const Buffer& b = plan_.buffers[static_cast<size_t>(r.buffer)];
    Content& c = contents_[static_cast<size_t>(r.buffer)];
    if (b.kind == BufferKind::kConstant ||
        (b.kind == BufferKind::kInput && !(b.donated && updates))) {
      broken("inputs and constants never written", at(plan_, s));
    }
    if (updates) {
      update(r, c, s);
      return;
    }
    if (c.version != r.version) broken("a write of the version at hand", versions(r, c));
    if (c.read) broken("a buffer complete before it is read", at(plan_, s));
    c.written = true;
  }

  void update(const Ref& r, Content& c, size_t s) {
    if (!c.written) broken("memory to update that was written", at(plan_, s));
    if (r.version != c.version + 1) broken("an update to the next version", versions(r, c));
    for (const Ref& in : plan_.steps[s].step.inputs) {
      const bool same = plan_.steps[s].step.in_place && in.layout == r.layout && is_dense(in.layout);
      if (in.buffer == r.buffer && !same && !is_empty(in.layout)) {
        broken("an update that does not read what it overwrites", at(plan_, s));
      }
    }
    c = {r.version, true, false};
  }

  void workspace(size_t s) {
    const PlannedStep& planned = plan_.steps[s];
    const int64_t bytes = planned.kernel->workspace_bytes;
    if (bytes <= 0) return;
    if (planned.workspace_offset < 0) broken("a workspace", "step " + std::to_string(s));
    workspaces_.push_back({planned.workspace_offset, Wide{planned.workspace_offset} + bytes, s, s,
                           "workspace of step " + std::to_string(s)});
  }

  // Memory that is alive at the same time does not overlap.
  void placement() {
    std::vector<Span> live = std::move(workspaces_);
    for (size_t i = 0; i < spans_.size(); ++i) {
      if (plan_.buffers[i].kind != BufferKind::kTemp || spans_[i].what.empty()) continue;
      if (plan_.offsets[i] < 0) broken("an offset for every temporary", spans_[i].what);
      spans_[i].begin = plan_.offsets[i];
      spans_[i].end = Wide{plan_.offsets[i]} + plan_.buffers[i].bytes;
      live.push_back(spans_[i]);
    }
    for (size_t a = 0; a < live.size(); ++a) {
      if (live[a].end > plan_.arena_bytes) broken("buffers inside the arena", live[a].what);
      for (size_t b = a + 1; b < live.size(); ++b) {
        bool together = live[a].first <= live[b].last && live[b].first <= live[a].last;
        bool overlap = live[a].begin < live[b].end && live[b].begin < live[a].end;
        if (together && overlap) {
          broken("no overlap of live buffers", live[a].what + " and " + live[b].what);
        }
      }
    }
  }

  const Plan& plan_;
  std::vector<Content> contents_;  // by buffer
  std::vector<Span> spans_;        // by buffer
  std::vector<Span> workspaces_;
};

}  // namespace

void verify_plan(const Plan& plan) { Verifier(plan).run(); }

}  // namespace rm::plan
