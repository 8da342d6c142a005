// Steps over few elements that follow each other, as losses and bookkeeping are, become one step, which
// one block of threads goes through: each alone costs a launch and moves next to nothing.
#include <algorithm>
#include <map>
#include <optional>

#include "ir/type.hpp"
#include "plan/fusion.hpp"
#include "plan/small_program.hpp"

namespace rm::plan {
namespace {

using small::Limits;

bool is_few(const ir::Layout& layout) {
  return !layout.is_empty() && layout.num_elements() <= Limits::kElements &&
         layout.dims.size() <= Limits::kRank && layout.num_bytes() <= Limits::kMemory;
}

bool is_reduction(const Step& step) {
  const ir::DType t = step.inputs[0].layout.dtype;
  return small::kind_of(attr_text(step, "kind")) >= 0 && (t == ir::DType::kF32 || t == ir::DType::kF64) &&
         step.outputs[0].layout.dtype == t;
}

/// A step that such a step can take.
bool is_small(const Step& step) {
  if (step.updates || step.outputs.size() != 1 || step.inputs.size() > Limits::kOperands) return false;
  const auto fits = [](const Ref& r) { return r.present() && is_few(r.layout); };
  if (!fits(step.outputs[0]) || !std::all_of(step.inputs.begin(), step.inputs.end(), fits)) return false;
  if (step.op == "reduce") return is_reduction(step);
  if (step.op == "softmax") return step.inputs[0].layout.dtype == ir::DType::kF32;
  if (step.op != "gather") return step.op == "ewise";
  return step.inputs[0].layout.dims[static_cast<size_t>(attr_int(step, "axis", 0))] > 1;
}

/// Whether step `from` may run at once behind step `to` instead.
bool moves_up(const StepList& list, size_t from, size_t to) {
  const Step& step = list.steps[from];
  for (size_t s = to + 1; s < from; ++s) {
    const Step& other = list.steps[s];
    for (const Ref& r : step.outputs) {
      if (touches(other.inputs, r.buffer) || touches(other.outputs, r.buffer)) return false;
    }
    for (const Ref& r : step.inputs) {
      if (touches(other.outputs, r.buffer)) return false;
    }
  }
  return true;
}

/// Members of one step, in order, and what becomes of the buffers they touch.
class Writer {
 public:
  Writer(const StepList& list, std::vector<size_t> members) : list_(list), members_(std::move(members)) {}

  std::optional<Step> run() {
    for (size_t m : members_) ++writes_[list_.steps[m].outputs[0].buffer];
    for (const auto& [buffer, count] : writes_) {
      if (count != 1) return {};
      (leaves(buffer) ? outputs_ : inner_).push_back(buffer);
    }
    for (size_t m : members_) {
      for (const Ref& r : list_.steps[m].inputs) {
        if (writes_.count(r.buffer) == 0) input_of(r);
      }
    }
    Step out;
    out.op = "small_steps";
    out.inputs = inputs_;
    int64_t memory = 0;
    program_.push_back(static_cast<int64_t>(inner_.size()));
    for (int32_t buffer : inner_) {
      const ir::Layout& made = written(buffer).layout;
      const int64_t bytes = list_.buffers[static_cast<size_t>(buffer)].bytes;
      program_.push_back(small::code_of(made.dtype));
      program_.push_back(bytes / static_cast<int64_t>(ir::size_bytes(made.dtype)));
      memory += (bytes + 15) / 16 * 16;
    }
    for (int32_t buffer : outputs_) out.outputs.push_back(written(buffer));
    for (size_t m : members_) write(list_.steps[m]);
    const bool fits = memory <= Limits::kMemory && inputs_.size() + outputs_.size() + inner_.size() <= Limits::kSlots &&
                      code_.size() <= small::kFields * Limits::kInstructions && imm_.size() <= Limits::kInstructions;
    if (!fits) return {};
    out.attrs = {{"program", program_}, {"code", code_}, {"imm", imm_}};
    return out;
  }

 private:
  const Ref& written(int32_t buffer) const {
    for (size_t m : members_) {
      if (list_.steps[m].outputs[0].buffer == buffer) return list_.steps[m].outputs[0];
    }
    return list_.steps[members_[0]].outputs[0];
  }

  /// Whether somebody else reads what the members make in the buffer.
  bool leaves(int32_t buffer) const {
    if (list_.buffers[static_cast<size_t>(buffer)].kind != BufferKind::kTemp) return true;
    if (touches(list_.outputs, buffer)) return true;
    for (size_t s = 0; s < list_.steps.size(); ++s) {
      const bool mine = std::find(members_.begin(), members_.end(), s) != members_.end();
      if (!mine && touches(list_.steps[s].inputs, buffer)) return true;
    }
    return false;
  }

  size_t input_of(const Ref& r) {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (same(inputs_[i], r)) return i;
    }
    inputs_.push_back(r);
    return inputs_.size() - 1;
  }

  void add_operand(const Ref& r) {
    const auto place = [&](const std::vector<int32_t>& of) { return std::find(of.begin(), of.end(), r.buffer) - of.begin(); };
    const auto inputs = static_cast<int64_t>(inputs_.size()), outputs = static_cast<int64_t>(outputs_.size());
    if (writes_.count(r.buffer) == 0) {
      program_.push_back(static_cast<int64_t>(input_of(r)));
      return;  // it lies as the operand does
    }
    int64_t offset = r.layout.offset;
    if (place(outputs_) < outputs) {
      program_.push_back(inputs + place(outputs_));
      offset -= written(r.buffer).layout.offset;
    } else {
      program_.push_back(inputs + outputs + place(inner_));
    }
    program_.push_back(offset);
    program_.insert(program_.end(), r.layout.strides.begin(), r.layout.strides.end());
  }

  void add_code(const Step& step) {
    const auto& code = std::get<ir::Ints>(step.attrs.at("code"));
    const auto& imm = std::get<std::vector<double>>(step.attrs.at("imm"));
    for (size_t i = 0; i < code.size(); i += small::kFields) {
      code_.insert(code_.end(), code.begin() + static_cast<std::ptrdiff_t>(i),
                   code.begin() + static_cast<std::ptrdiff_t>(i + small::kFields));
      if (code[i] == 0) code_[code_.size() - 3] += static_cast<int64_t>(imm_.size());
    }
    imm_.insert(imm_.end(), imm.begin(), imm.end());
  }

  void write(const Step& step) {
    const ir::Layout &in = step.inputs[0].layout, &out = step.outputs[0].layout;
    int64_t a = 0, b = 0;
    small::Op op = small::Op::ewise;
    if (step.op == "ewise") {
      a = static_cast<int64_t>(code_.size() / small::kFields);
      add_code(step);
      b = static_cast<int64_t>(code_.size() / small::kFields) - a;
    } else if (step.op == "reduce") {
      op = small::Op::reduce, a = small::kind_of(attr_text(step, "kind"));
      for (int64_t axis : std::get<ir::Ints>(step.attrs.at("axes"))) b |= int64_t{1} << axis;
    } else if (step.op == "softmax") {
      op = small::Op::softmax, a = attr_int(step, "log", 0);
    } else {
      op = small::Op::gather, a = attr_int(step, "axis", 0), b = in.dims[static_cast<size_t>(a)];
    }
    const ir::Ints& dims = op == small::Op::reduce ? in.dims : out.dims;
    program_.insert(program_.end(), {static_cast<int64_t>(op), a, b, static_cast<int64_t>(dims.size())});
    program_.insert(program_.end(), dims.begin(), dims.end());
    program_.push_back(static_cast<int64_t>(step.inputs.size()));
    add_operand(step.outputs[0]);
    for (const Ref& r : step.inputs) add_operand(r);
  }

  const StepList& list_;
  std::vector<size_t> members_;
  std::map<int32_t, int> writes_;  // of members, by buffer
  std::vector<Ref> inputs_;
  std::vector<int32_t> outputs_, inner_;  // buffers
  ir::Ints program_, code_;
  std::vector<double> imm_;
};

/// Small steps that follow each other from `s` on, and later ones that may run behind them.
std::vector<size_t> run_from(const StepList& list, size_t s) {
  std::vector<size_t> out;
  size_t last = s;
  for (; last < list.steps.size() && is_small(list.steps[last]) && out.size() < Limits::kSteps; ++last) {
    out.push_back(last);
  }
  for (size_t t = last; t < list.steps.size() && out.size() >= 2 && out.size() < Limits::kSteps; ++t) {
    if (is_small(list.steps[t]) && moves_up(list, t, last - 1)) out.push_back(t);
  }
  return out;
}

}  // namespace

void fuse_small(StepList& list, const Served& served) {
  constexpr size_t kFewest = 3;  // two launches are not worth a program
  std::vector<char> gone(list.steps.size(), 0);
  for (size_t s = 0; s < list.steps.size(); ++s) {
    if (gone[s] != 0 || !is_small(list.steps[s])) continue;
    std::vector<size_t> members = run_from(list, s);
    members.erase(std::remove_if(members.begin(), members.end(), [&](size_t m) { return gone[m] != 0; }),
                  members.end());
    const size_t behind = members.empty() ? s : members.back();
    for (; members.size() >= kFewest; members.pop_back()) {
      std::optional<Step> step = Writer(list, members).run();
      if (!step || !served(list.buffers, *step)) continue;
      // At the first: later members were found to move up, and the others follow each other.
      for (size_t m : members) gone[m] = 1;
      list.steps[members.front()] = std::move(*step);
      gone[members.front()] = 0;
      break;
    }
    if (members.size() < kFewest) {
      while (s < behind && s + 1 < list.steps.size() && is_small(list.steps[s + 1])) ++s;
    }
  }
  std::vector<Step> kept;
  for (size_t s = 0; s < list.steps.size(); ++s) {
    if (gone[s] == 0) kept.push_back(std::move(list.steps[s]));
  }
  list.steps = std::move(kept);
}

}  // namespace rm::plan
