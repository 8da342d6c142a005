// Small elementwise steps become part of the elementwise steps that read them, whose elements compute
// theirs again: where a launch costs more than that. Results keep their bits: what is taken in was
// stored in the type in which it is computed.
#include <algorithm>
#include <array>
#include <optional>

#include "ops/ewise_opcodes.hpp"
#include "plan/fusion.hpp"

namespace rm::plan {
namespace {

constexpr int64_t kMostElements = 4096;  // of a step that takes another in
constexpr size_t kMostTaken = 8, kMostInstructions = 32, kMostOperands = 8;

using Code = ir::Ints;
constexpr size_t kFields = ops::kEwiseFields;

const Code& code_of(const Step& step) { return std::get<ir::Ints>(step.attrs.at("code")); }
const std::vector<double>& imm_of(const Step& step) {
  return std::get<std::vector<double>>(step.attrs.at("imm"));
}

/// The last instruction gives what the result's type holds, no more.
bool is_stored_whole(const Step& step) {
  const Code& code = code_of(step);
  const int64_t opcode = code[code.size() - kFields], cls = code[code.size() - kFields + 1];
  const bool logical = ops::find_opcode(opcode)->is_logical;
  switch (step.outputs[0].layout.dtype) {
    case ir::DType::kF32:
      return !logical && cls == static_cast<int64_t>(ops::EwiseClass::kF32);
    case ir::DType::kF64:
      return !logical && cls == static_cast<int64_t>(ops::EwiseClass::kF64);
    case ir::DType::kI64:
      return !logical && cls == static_cast<int64_t>(ops::EwiseClass::kInt);
    case ir::DType::kBool:
      return logical;
    default:
      return false;
  }
}

/// `operand`, which a step reads to make `made`, as who reads `made` by `view` has to read it.
std::optional<Ref> seen_through(const Ref& operand, const ir::Layout& made, const ir::Layout& view) {
  if (view.offset != 0) return {};
  ir::Layout out = view;
  out.dtype = operand.layout.dtype, out.offset = operand.layout.offset;
  for (size_t d = 0; d < view.dims.size(); ++d) {
    out.strides[d] = 0;
    if (view.dims[d] == 1 || view.strides[d] == 0) continue;
    bool found = false;
    for (size_t m = 0; m < made.dims.size() && !found; ++m) {
      if (made.dims[m] == 1 || made.dims[m] != view.dims[d] || made.strides[m] != view.strides[d]) continue;
      out.strides[d] = operand.layout.strides[m], found = true;
    }
    if (!found) return {};
  }
  return operand.with(out);
}

/// `step` with `taken`, whose result is its operand `at`, computed in it.
std::optional<Step> with_taken(const Step& step, const Step& taken, size_t at) {
  Step out = step;
  out.inputs.clear();
  const auto place = [&](const Ref& r) {
    const auto it = std::find_if(out.inputs.begin(), out.inputs.end(), [&](const Ref& o) { return same(o, r); });
    if (it != out.inputs.end()) return it - out.inputs.begin();
    out.inputs.push_back(r);
    return static_cast<std::ptrdiff_t>(out.inputs.size()) - 1;
  };
  std::vector<int64_t> of_taken, of_step;  // registers in the new program; of operands at first
  for (const Ref& r : taken.inputs) {
    const auto seen = seen_through(r, taken.outputs[0].layout, step.inputs[at].layout);
    if (!seen) return {};
    of_taken.push_back(place(*seen));
  }
  for (size_t i = 0; i < step.inputs.size(); ++i) of_step.push_back(i == at ? -1 : place(step.inputs[i]));
  Code code;
  std::vector<double> imm;
  const auto append = [&](const Step& from, std::vector<int64_t>& registers) {
    const auto first = static_cast<int64_t>(imm.size());
    imm.insert(imm.end(), imm_of(from).begin(), imm_of(from).end());
    const Code& program = code_of(from);
    for (size_t i = 0; i < program.size(); i += kFields) {
      std::array<int64_t, kFields> in;
      std::copy_n(program.begin() + static_cast<std::ptrdiff_t>(i), kFields, in.begin());
      if (in[0] == ewise::kConst) {
        in[2] += first;
      } else {
        for (size_t k = 2; k < kFields; ++k) {
          if (in[k] >= 0) in[k] = registers[static_cast<size_t>(in[k])];
        }
      }
      registers.push_back(static_cast<int64_t>(out.inputs.size() + code.size() / kFields));
      code.insert(code.end(), in.begin(), in.end());
    }
  };
  append(taken, of_taken);
  of_step[at] = of_taken.back();
  append(step, of_step);
  if (code.size() / kFields > kMostInstructions || out.inputs.size() > kMostOperands) return {};
  out.attrs["code"] = std::move(code), out.attrs["imm"] = std::move(imm);
  return out;
}

class Inlining {
 public:
  Inlining(StepList& list, const Served& served) : list_(list), served_(served) {
    gone_.assign(list.steps.size(), 0);
    readers_.resize(list.buffers.size());
    writers_.resize(list.buffers.size());
    for (size_t s = 0; s < list.steps.size(); ++s) {
      for (const Ref& r : list.steps[s].inputs) {
        if (r.present()) readers_[index(r)].push_back(s);
      }
      for (const Ref& r : list.steps[s].outputs) {
        if (r.present()) writers_[index(r)].push_back(s);
      }
    }
    result_.assign(list.buffers.size(), 0);
    for (const Ref& r : list.outputs) {
      if (r.present()) result_[index(r)] = 1;
    }
  }

  void run() {
    for (size_t s = 0; s < list_.steps.size(); ++s) {
      if (may_go(s)) take(s);
    }
    std::vector<Step> kept;
    for (size_t s = 0; s < list_.steps.size(); ++s) {
      if (gone_[s] == 0) kept.push_back(std::move(list_.steps[s]));
    }
    list_.steps = std::move(kept);
  }

 private:
  static size_t index(const Ref& r) { return static_cast<size_t>(r.buffer); }
  static bool is_small(const Step& step) {
    return step.op == "ewise" && !step.updates && step.outputs.size() == 1 &&
           step.outputs[0].layout.num_elements() <= kMostElements;
  }

  /// A step whose result nobody but other small steps may need.
  bool may_go(size_t s) const {
    const Step& step = list_.steps[s];
    if (!is_small(step) || code_of(step).size() / kFields > kMostTaken || !is_stored_whole(step)) return false;
    const Ref& made = step.outputs[0];
    return list_.buffers[index(made)].kind == BufferKind::kTemp && result_[index(made)] == 0 &&
           made.version == 0 && made.layout.offset == 0 && made.layout.is_contiguous() &&
           writers_[index(made)].size() == 1 && !readers_[index(made)].empty();
  }

  /// What `step` reads is the same where `reader` stands.
  bool keeps(const Step& step, size_t from, size_t to) const {
    return std::all_of(step.inputs.begin(), step.inputs.end(), [&](const Ref& r) {
      const auto& writes = writers_[index(r)];
      return std::none_of(writes.begin(), writes.end(), [&](size_t w) { return w > from && w <= to; });
    });
  }

  void take(size_t s) {
    const Step& step = list_.steps[s];
    const size_t made = index(step.outputs[0]);
    std::vector<std::pair<size_t, Step>> changed;
    for (size_t reader : readers_[made]) {
      const Step& by = list_.steps[reader];
      if (!is_small(by) || !keeps(step, s, reader)) return;
      size_t at = by.inputs.size();
      for (size_t i = 0; i < by.inputs.size(); ++i) {
        if (index(by.inputs[i]) != made) continue;
        if (at != by.inputs.size()) return;  // read twice
        at = i;
      }
      std::optional<Step> merged = with_taken(by, step, at);
      if (!merged || !served_(list_.buffers, *merged)) return;
      changed.emplace_back(reader, std::move(*merged));
    }
    for (auto& [reader, merged] : changed) {
      for (const Ref& r : step.inputs) {
        std::vector<size_t>& readers = readers_[index(r)];
        if (std::find(readers.begin(), readers.end(), reader) == readers.end()) readers.push_back(reader);
      }
      list_.steps[reader] = std::move(merged);
    }
    for (const Ref& r : list_.steps[s].inputs) std::erase(readers_[index(r)], s);
    gone_[s] = 1;
  }

  StepList& list_;
  const Served& served_;
  std::vector<char> gone_, result_;
  std::vector<std::vector<size_t>> readers_, writers_;  // by buffer
};

}  // namespace

void fuse_small_ewise(StepList& list, const Served& served) { Inlining(list, served).run(); }

}  // namespace rm::plan
