// What patterns over steps are written with: who reads and writes each buffer of a list, and what of it
// became part of another step.
#pragma once

#include <algorithm>
#include <optional>

#include "plan/fuse_steps.hpp"

namespace rm::plan {

inline bool same(const Ref& a, const Ref& b) {
  return a.buffer == b.buffer && a.version == b.version && a.layout == b.layout;
}

inline bool present(const Step& step, size_t i) { return i < step.inputs.size() && step.inputs[i].present(); }

inline int64_t attr_int(const Step& step, const char* name, int64_t otherwise) {
  const auto it = step.attrs.find(name);
  return it == step.attrs.end() ? otherwise : std::get<int64_t>(it->second);
}
inline double attr_float(const Step& step, const char* name, double otherwise) {
  const auto it = step.attrs.find(name);
  return it == step.attrs.end() ? otherwise : std::get<double>(it->second);
}
inline std::string attr_text(const Step& step, const char* name) {
  const auto it = step.attrs.find(name);
  return it == step.attrs.end() ? "none" : std::get<std::string>(it->second);
}

inline bool touches(const std::vector<Ref>& refs, int32_t buffer) {
  return std::any_of(refs.begin(), refs.end(), [&](const Ref& r) { return r.buffer == buffer; });
}

/// Whether step `from` may run at `to` instead.
inline bool moves(const StepList& list, size_t from, size_t to) {
  const Step& step = list.steps[from];
  for (size_t s = from + 1; s <= to; ++s) {
    for (const Ref& r : step.outputs) {
      if (touches(list.steps[s].inputs, r.buffer) || touches(list.steps[s].outputs, r.buffer)) return false;
    }
    for (const Ref& r : step.inputs) {
      if (r.present() && touches(list.steps[s].outputs, r.buffer)) return false;
    }
  }
  return true;
}

/// The list with who reads and writes what; steps that became part of another are gone in the end.
class Fusion {
 public:
  Fusion(StepList& list, const Served& served) : list_(list), served_(served) {
    gone_.assign(list.steps.size(), 0);
    uses_.resize(list.buffers.size());
    for (size_t s = 0; s < list.steps.size(); ++s) {
      for (const Ref& r : list.steps[s].inputs) {
        if (r.present()) uses_[index(r)].reads.push_back(s);
      }
      for (const Ref& r : list.steps[s].outputs) {
        if (r.present()) uses_[index(r)].writes.push_back(s);
      }
    }
    for (const Ref& r : list.outputs) {
      if (r.present()) uses_[index(r)].result = true;
    }
  }

  size_t size() const { return list_.steps.size(); }
  const Step& step(size_t s) const { return list_.steps[s]; }
  bool gone(size_t s) const { return gone_[s] != 0; }

  bool is_constant(const Ref& r) const { return list_.buffers[index(r)].kind == BufferKind::kConstant; }
  bool is_temporary(const Ref& r) const {
    return list_.buffers[index(r)].kind == BufferKind::kTemp && !uses_[index(r)].result;
  }
  /// How many operands of steps are in this buffer.
  size_t reads(const Ref& r) const { return uses_[index(r)].reads.size(); }
  /// The one step that writes a temporary; none where several do.
  std::optional<size_t> maker(const Ref& r) const {
    const std::vector<size_t>& writes = uses_[index(r)].writes;
    if (!is_temporary(r) || writes.size() != 1 || r.version != 0 || gone(writes[0])) return {};
    return writes[0];
  }
  /// The last step in front of `s` that writes the buffer.
  std::optional<size_t> last_write(const Ref& r, size_t s) const {
    std::optional<size_t> last;
    for (size_t w : uses_[index(r)].writes) {
      if (w < s && !gone(w)) last = w;
    }
    return last;
  }
  /// Nothing between the steps writes it: what it holds behind `from` it holds in front of `to`.
  bool keeps(const Ref& r, size_t from, size_t to) const {
    const std::vector<size_t>& writes = uses_[index(r)].writes;
    return std::none_of(writes.begin(), writes.end(), [&](size_t w) { return w > from && w < to; });
  }
  /// Memory of the caller's that `step` alone writes: before it, it holds what it held before the plan.
  bool stable(const Ref& r, size_t step) const {
    const std::vector<size_t>& writes = uses_[index(r)].writes;
    return list_.buffers[index(r)].kind == BufferKind::kInput && writes.size() == 1 && writes[0] == step;
  }
  bool served(const Step& step) const { return served_(list_.buffers, step); }
  /// `step` in place of the one at `s`; the others are done by it.
  void replace(size_t s, Step step, const std::vector<size_t>& others) {
    list_.steps[s] = std::move(step);
    for (size_t other : others) gone_[other] = 1;
  }
  void finish() {
    std::vector<Step> kept;
    for (size_t s = 0; s < list_.steps.size(); ++s) {
      if (!gone(s)) kept.push_back(std::move(list_.steps[s]));
    }
    list_.steps = std::move(kept);
  }

 private:
  struct Uses {
    std::vector<size_t> reads, writes;
    bool result = false;
  };
  static size_t index(const Ref& r) { return static_cast<size_t>(r.buffer); }

  StepList& list_;
  const Served& served_;
  std::vector<char> gone_;
  std::vector<Uses> uses_;  // by buffer
};

}  // namespace rm::plan
