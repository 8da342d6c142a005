// Trees of elementwise nodes -> one `ewise` program. A producer is taken when this node is its only
// reader and it has the result's shape, so nothing is computed twice but conversions to f32.
#include <algorithm>
#include <cmath>

#include "ops/ewise_opcodes.hpp"
#include "ops/infer.hpp"
#include "passes/rules/rules.hpp"

namespace rm::passes {
namespace {

using ir::DType;
using ir::Node;
using ir::ValueId;

constexpr size_t kMaxOperands = 8, kMaxInstructions = 32;
constexpr int64_t kFirstInstruction = 1 << 16;  // registers of instructions while building

// While building, register r < kFirstInstruction is operand r, the others are instructions.
struct Program {
  std::vector<ValueId> operands;
  std::vector<int64_t> code;
  std::vector<double> imm;

  size_t size() const { return code.size() / ops::kEwiseFields; }

  int64_t operand(ValueId v) {
    auto it = std::find(operands.begin(), operands.end(), v);
    if (it == operands.end()) it = operands.insert(it, v);
    return it - operands.begin();
  }
  int64_t instruction(int64_t opcode, ops::EwiseClass cls, int64_t a, int64_t b = -1,
                      int64_t c = -1) {
    code.insert(code.end(), {opcode, static_cast<int64_t>(cls), a, b, c});
    return kFirstInstruction + static_cast<int64_t>(size()) - 1;
  }
  int64_t constant(double value, ops::EwiseClass cls) {
    auto it = std::find(imm.begin(), imm.end(), value);
    if (it == imm.end()) it = imm.insert(it, value);
    int64_t index = it - imm.begin();
    for (size_t i = 0; i < code.size(); i += ops::kEwiseFields) {
      if (code[i] == ewise::kConst && code[i + 1] == static_cast<int64_t>(cls) &&
          code[i + 2] == index) {
        return kFirstInstruction + static_cast<int64_t>(i / ops::kEwiseFields);
      }
    }
    return instruction(ewise::kConst, cls, index);
  }
};

bool is_elementwise(const Node& node) {
  if (node.op == "cast" || node.op == "ewise") return true;
  const ops::EwiseOpcode* row = ops::find_opcode(node.op);
  return row != nullptr && row->arity > 0 && row->opcode != ewise::kCopy;
}

// Narrow integers wrap when stored, which a 64-bit register would not do.
bool fits_a_register(DType dtype) {
  return ir::is_floating(dtype) || dtype == DType::kI64 || dtype == DType::kBool;
}

bool is_half(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16; }

constexpr int kMaxChain = 16;  // nodes looked back at

// Whether `v` comes from values of half precision, through element-wise nodes.
bool comes_from_half(const Rewriter& rw, ValueId v, int depth = 0) {
  const Node* node = rw.def(v);
  if (node == nullptr || !is_elementwise(*node) || depth == kMaxChain) return is_half(rw.dtype(v));
  return std::any_of(node->operands.begin(), node->operands.end(),
                     [&](ValueId x) { return comes_from_half(rw, x, depth + 1); });
}

class Builder {
 public:
  Builder(const Rewriter& rw, const Node& root) : rw_(rw), root_(root) {}

  bool build() {
    int64_t last = append(root_);
    if (last != kFirstInstruction + static_cast<int64_t>(state_.program.size()) - 1) return false;
    return state_.taken > 0 && fits() && shape_is_kept();
  }

  ValueId emit(Rewriter& rw) {
    Program& program = state_.program;
    auto shift = static_cast<int64_t>(program.operands.size()) - kFirstInstruction;
    for (size_t i = 0; i < program.code.size(); i += ops::kEwiseFields) {
      if (program.code[i] == ewise::kConst) continue;
      for (size_t k = 2; k < ops::kEwiseFields; ++k) {
        if (program.code[i + k] >= kFirstInstruction) program.code[i + k] += shift;
      }
    }
    return rw.emit("ewise", program.operands, {{"code", program.code}, {"imm", program.imm}},
                   rw.type(root_.result()));
  }

 private:
  struct State {
    Program program;
    size_t pending = 0;  // operands of started nodes that are not placed yet
    int taken = 0;       // producers computed in place
    std::vector<std::pair<ValueId, int64_t>> registers;  // of those producers
  };

  bool fits() const {
    return state_.program.size() <= kMaxInstructions &&
           state_.program.operands.size() + state_.pending <= kMaxOperands;
  }

  // Constants leave the operands, so the others must still broadcast to the result.
  bool shape_is_kept() const {
    ir::Dims dims;
    for (ValueId v : state_.program.operands) dims = ops::broadcast(root_, dims, rw_.dims(v));
    return dims == rw_.dims(root_.result());
  }

  // Reads of `v` by `node`: more than one for x * x.
  static int reads(const Node& node, ValueId v) {
    return static_cast<int>(std::count(node.operands.begin(), node.operands.end(), v));
  }

  // The producer of `v` when it can be computed in place for its reader.
  const Node* producer(const Node& reader, ValueId v) const {
    const Node* node = rw_.def(v);
    bool ok = node != nullptr && is_elementwise(*node) &&
              (rw_.uses(v) == reads(reader, v) || widens(*node)) &&
              rw_.dims(v) == rw_.dims(root_.result()) && fits_a_register(rw_.dtype(v)) &&
              !rounds_on_purpose(v) &&
              // Constant expressions are computed once, outside the plan.
              !rw_.is_constant_expression(v);
    return ok ? node : nullptr;
  }

  // Whoever computes in f32 reads half values as well as f32: a copy of them in f32 need not be kept.
  bool widens(const Node& node) const {
    return node.op == "cast" && is_half(rw_.dtype(node.operands[0])) &&
           rw_.dtype(node.result()) == DType::kF32;
  }

  // A model of f32 that goes through half precision wants that rounding (and its overflow); in a
  // model of half precision the rounding between two steps is storage (decision 0010).
  bool rounds_on_purpose(ValueId v) const {
    return is_half(rw_.dtype(v)) && !is_half(rw_.dtype(root_.result())) && !comes_from_half(rw_, v);
  }

  int64_t value(const Node& reader, ValueId v) {
    std::optional<double> constant = rw_.splat(v);
    // Integers beyond 2^53 stay operands: an immediate is a double.
    if (constant && (ir::is_floating(rw_.dtype(v)) || std::fabs(*constant) < 9e15)) {
      return state_.program.constant(*constant, ops::ewise_class(rw_.dtype(v)));
    }
    for (const auto& [taken, reg] : state_.registers) {
      if (taken == v) return reg;
    }
    if (const Node* node = producer(reader, v)) {
      State before = state_;
      int64_t reg = append(*node);
      if (fits()) {
        ++state_.taken;
        state_.registers.emplace_back(v, reg);
        return reg;
      }
      state_ = std::move(before);
    }
    return state_.program.operand(v);
  }

  int64_t append(const Node& node) {
    state_.pending += node.operands.size();
    return node.op == "ewise" ? append_program(node) : append_instruction(node);
  }

  int64_t append_instruction(const Node& node) {
    size_t typed = node.op == "where" ? 1 : 0;
    ops::EwiseClass cls = ops::ewise_class(rw_.dtype(node.operands[typed]));
    int64_t reg[3] = {-1, -1, -1};
    for (size_t i = 0; i < node.operands.size(); ++i) {
      --state_.pending;
      reg[i] = value(node, node.operands[i]);
    }
    if (node.op != "cast") {
      return state_.program.instruction(ops::find_opcode(node.op)->opcode, cls, reg[0], reg[1],
                                        reg[2]);
    }
    return append_cast(node, reg[0], cls);
  }

  int64_t append_cast(const Node& node, int64_t reg, ops::EwiseClass from) {
    DType to = rw_.dtype(node.result());
    ops::EwiseClass cls = ops::ewise_class(to);
    if (to == DType::kBool) {
      int64_t zero = state_.program.constant(0.0, from);
      return state_.program.instruction(ops::find_opcode("ne")->opcode, from, reg, zero);
    }
    if (cls == from && &node != &root_) return reg;  // half precision is computed in f32
    return state_.program.instruction(ewise::kCopy, cls, reg);
  }

  ops::EwiseClass class_of(int64_t reg) const {
    if (reg < kFirstInstruction) {
      return ops::ewise_class(rw_.dtype(state_.program.operands[static_cast<size_t>(reg)]));
    }
    const int64_t* code =
        &state_.program.code[static_cast<size_t>(reg - kFirstInstruction) * ops::kEwiseFields];
    return ops::find_opcode(code[0])->is_logical ? ops::EwiseClass::kInt
                                                 : static_cast<ops::EwiseClass>(code[1]);
  }

  int64_t append_program(const Node& node) {
    const auto& code = node.ints("code");
    const auto& imm = node.floats("imm");
    std::vector<int64_t> regs;
    for (ValueId v : node.operands) {
      --state_.pending;
      regs.push_back(value(node, v));
    }
    for (size_t i = 0; i < code.size(); i += ops::kEwiseFields) {
      auto cls = static_cast<ops::EwiseClass>(code[i + 1]);
      if (code[i] == ewise::kConst) {
        regs.push_back(state_.program.constant(imm[static_cast<size_t>(code[i + 2])], cls));
        continue;
      }
      int64_t r[3];
      for (size_t k = 0; k < 3; ++k) {
        int64_t from = code[i + 2 + k];
        r[k] = from < 0 ? -1 : regs[static_cast<size_t>(from)];
      }
      // A rounding to half precision that is now inside the program.
      bool identity = code[i] == ewise::kCopy && class_of(r[0]) == cls;
      regs.push_back(identity ? r[0] : state_.program.instruction(code[i], cls, r[0], r[1], r[2]));
    }
    return regs.back();
  }

  const Rewriter& rw_;
  const Node& root_;
  State state_;
};

/// The operand of `node` that is no constant, if there is one.
ValueId only_operand(const Rewriter& rw, const Node& node) {
  ValueId found = ir::kNoValue;
  for (ValueId v : node.operands) {
    if (rw.splat(v) && rw.graph().type(v).rank() == 0) continue;
    if (found != ir::kNoValue) return ir::kNoValue;
    found = v;
  }
  return found;
}

/// `v` is elements of an expand, behind any number of steps on one value.
bool is_repeated(const Rewriter& rw, ValueId v) {
  for (int depth = 0; depth < kMaxChain; ++depth) {
    const Node* node = rw.def(v);
    if (node == nullptr) return false;
    if (node->op == "expand") return true;
    if (!is_elementwise(*node)) return false;
    v = only_operand(rw, *node);
    if (v == ir::kNoValue) return false;
  }
  return false;
}

}  // namespace

// f of a repeated value, in another shape: f first, so that programs read the value itself.
bool ewise_before_repeat(Rewriter& rw, const Node& node) {
  if (!is_elementwise(node)) return false;
  const ValueId x = only_operand(rw, node);
  if (x == ir::kNoValue || rw.dims(x) != rw.dims(node.result())) return false;
  const Node* view = rw.def(x, "reshape");
  if (view == nullptr || !is_repeated(rw, view->operands[0])) return false;
  const ValueId source = view->operands[0];
  std::vector<ValueId> operands = node.operands;
  std::replace(operands.begin(), operands.end(), x, source);
  const ir::Dims shape = rw.dims(node.result());  // a copy: emitting moves values
  const ValueId made = rw.emit(node.op, std::move(operands), node.attrs,
                               ir::TensorType{rw.dtype(node.result()), rw.dims(source)});
  return rw.replace(node.result(), rw.reshape(made, shape));
}

bool ewise_takes_operands(Rewriter& rw, const Node& node) {
  if (!is_elementwise(node)) return false;
  Builder builder(rw, node);
  if (!builder.build()) return false;
  return rw.replace(node.result(), builder.emit(rw));
}

}  // namespace rm::passes
