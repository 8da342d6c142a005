// Compiles ewise code: one pass over the instructions, then a linear scan that shares slots.
#include "ops/ewise/program.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/row.hpp"
#include "ops/ewise/opcodes.hpp"
#include "ops/ewise/patterns.hpp"

namespace rm::cpu {
RM_CPU_TABLE(EwiseTable, ewise_table)
namespace {

[[noreturn]] void illegal(const std::string& what) {
  throw std::invalid_argument("[ewise] expected a program of docs/operators.md, got " + what);
}

bool yields_bool(int op) { return op == kLogicalNot || op == kIsNan || (op >= kEq && op <= kXor); }
int64_t class_bytes(Class c) { return c == Class::f32 ? 4 : 8; }
DType class_storage(Class c) {
  return c == Class::f32 ? DType::f32 : c == Class::f64 ? DType::f64 : DType::i64;
}
double op_ns(int op, Class cls) {
  switch (op) {
    case kPow:
    case kSoftplus:
      return cls == Class::f32 ? 2.0 : 15.0;
    case kRemainder:
    case kFloorDiv:
      return cls == Class::f32 ? 1.5 : 5.0;
    case kExp:
    case kLog:
    case kTanh:
    case kErf:
    case kSigmoid:
    case kGelu:
    case kGeluTanh:
    case kSilu:
    case kSin:
    case kCos:
    case kLog1p:
    case kExpm1:
      return cls == Class::f32 ? 0.8 : 10.0;
    default:
      return cls == Class::f32 ? 0.06 : 0.15;
  }
}

class Compiler {
 public:
  Compiler(const Problem& problem, Isa isa)
      : problem_(problem), table_(RM_CPU_PICK(isa, ewise_table)) {}

  EwiseProgram run() {
    const auto code = problem_.attr_ints("code");
    imm_ = problem_.attr_floats("imm");
    if (code.empty() || code.size() % 5) illegal("code of length " + std::to_string(code.size()));
    operands_ = problem_.num_inputs();
    values_.resize(operands_);
    const std::vector<int64_t> slopes = gelu_slopes(code, imm_, operands_);
    const bool some = std::any_of(slopes.begin(), slopes.end(), [](int64_t x) { return x >= 0; });
    const std::vector<char> read = some ? needed(code, slopes, operands_) : std::vector<char>();
    for (size_t i = 0; i < slopes.size(); ++i) {
      if (some && !read[i]) {
        values_.push_back({});  // within a chain that one kernel computes
      } else if (slopes[i] >= 0) {
        gelu_slope(slopes[i]);
      } else {
        instruction(&code[i * 5]);
      }
    }
    finish();
    share_slots();
    return std::move(program_);
  }

 private:
  // A register as blocks: which virtual slot holds it in each class, -1 when none does yet.
  struct Value {
    int slot[3] = {-1, -1, -1};
    Class home = Class::f32;
    bool constant = false;
    double imm = 0;
  };

  int new_slot(Class cls) {
    slot_class_.push_back(cls);
    if (class_bytes(cls) > program_.element_bytes) program_.element_bytes = class_bytes(cls);
    return static_cast<int>(slot_class_.size()) - 1;
  }

  int use(int64_t reg, Class cls) {
    if (reg < 0 || reg >= static_cast<int64_t>(values_.size())) {
      illegal("register " + std::to_string(reg));
    }
    Value& v = values_[reg];
    int& slot = v.slot[static_cast<int>(cls)];
    if (slot >= 0) return slot;
    slot = new_slot(cls);
    if (reg < static_cast<int64_t>(operands_)) {
      const DType type = problem_.input(reg).dtype;
      const EwiseLoad load = table_->load(type, cls);
      if (!load) illegal("an operand type no class holds");
      program_.loads.push_back({static_cast<int>(reg), slot, load, dtype_bytes(type),
                                class_bytes(cls), type == class_storage(cls)});
      program_.ns_per_element += type == class_storage(cls) ? 0.05 : 0.1;
    } else if (v.constant) {
      program_.constants.push_back({slot, cls, v.imm});
    } else {
      const int source = v.slot[static_cast<int>(v.home)];
      program_.ops.push_back({table_->convert(v.home, cls), slot, source, -1, -1});
      program_.ns_per_element += 0.2;
    }
    return slot;
  }

  int emit(int op, Class cls, Class result, int a, int b = -1, int c = -1) {
    const EwiseFn fn = table_->find(op, cls);
    if (!fn) illegal("opcode " + std::to_string(op));
    const int dst = new_slot(result);
    program_.ops.push_back({fn, dst, a, b, c});
    program_.ns_per_element += op_ns(op, cls);
    return dst;
  }

  void instruction(const int64_t* ins) {
    const int op = static_cast<int>(ins[0]);
    if (ins[1] < 0 || ins[1] > 2) illegal("class " + std::to_string(ins[1]));
    const Class cls = static_cast<Class>(ins[1]);
    // f32 comparisons stay in f32 blocks as 0.0 and 1.0.
    const Class result = yields_bool(op) && cls == Class::f64 ? Class::i64 : cls;
    Value v;
    v.home = result;
    if (op == kConst) {
      if (ins[2] < 0 || ins[2] >= static_cast<int64_t>(imm_.size())) illegal("an imm outside imm");
      v.constant = true;
      v.imm = imm_[ins[2]];
      v.home = cls;
    } else if (op == kCopy) {
      v.slot[static_cast<int>(cls)] = use(ins[2], cls);
    } else {
      v.slot[static_cast<int>(result)] = compute(op, cls, result, ins);
    }
    values_.push_back(v);
  }

  void gelu_slope(int64_t x) {
    const int a = use(x, Class::f32), dst = new_slot(Class::f32);
    program_.ops.push_back({table_->gelu_slope(), dst, a, -1, -1});
    program_.ns_per_element += op_ns(kGelu, Class::f32);
    Value v;
    v.slot[static_cast<int>(Class::f32)] = dst;
    values_.push_back(v);
  }

  int compute(int op, Class cls, Class result, const int64_t* ins) {
    const int a = use(ins[2], cls);
    const int n = arity_of(op);
    if (op == kPow && cls != Class::i64 && constant_at(ins[3])) {
      const int made = small_power(cls, a, values_[ins[3]].imm);
      if (made >= 0) return made;
    }
    const int b = n > 1 ? use(ins[3], cls) : -1;
    int c = n > 2 ? use(ins[4], cls) : -1;
    if (cls == Class::i64 && (op == kDiv || op == kFloorDiv || op == kRemainder)) c = kFlagSlot;
    return emit(op, cls, result, a, b, c);
  }

  bool constant_at(int64_t reg) const {
    return reg >= 0 && reg < static_cast<int64_t>(values_.size()) && values_[reg].constant;
  }

  // The powers models use, without libm. torch computes these the same way.
  int small_power(Class cls, int a, double exponent) {
    if (exponent == 2.0) return emit(kMul, cls, cls, a, a);
    if (exponent == 3.0) return emit(kMul, cls, cls, emit(kMul, cls, cls, a, a), a);
    if (exponent == 0.5) return emit(kSqrt, cls, cls, a);
    if (exponent == -0.5) return emit(kRsqrt, cls, cls, a);
    if (exponent == -1.0) return emit(kReciprocal, cls, cls, a);
    if (exponent == -2.0) return emit(kReciprocal, cls, cls, emit(kMul, cls, cls, a, a));
    return -1;
  }

  void finish() {
    const DType y = problem_.output(0).dtype;
    const int64_t last = static_cast<int64_t>(values_.size()) - 1;
    const Class home = values_[last].home;
    program_.result = use(last, home);
    program_.store = table_->store(home, y);
    program_.result_bytes = class_bytes(home);
    if (!program_.store) illegal("a result type no class holds");
    program_.result_direct = y == class_storage(home) && !program_.ops.empty() &&
                             program_.ops.back().dst == program_.result;
    program_.ns_per_element += 0.1;
  }

  // Slots are reused as soon as their last reader has run; constants and operands keep theirs.
  void share_slots() {
    const int virtuals = static_cast<int>(slot_class_.size());
    std::vector<int> last(virtuals, -1), actual(virtuals, -1);
    const int end = static_cast<int>(program_.ops.size());
    for (int i = 0; i < end; ++i) {
      for (int s : {program_.ops[i].a, program_.ops[i].b, program_.ops[i].c}) {
        if (s >= 0) last[s] = i;
      }
    }
    last[program_.result] = end;
    std::vector<bool> pinned(virtuals, false);
    for (const auto& l : program_.loads) pinned[l.slot] = true;
    for (const auto& c : program_.constants) pinned[c.slot] = true;
    int count = 0;
    for (int s = 0; s < virtuals; ++s) {
      if (pinned[s]) actual[s] = count++;
    }
    std::vector<int> free;
    for (int i = 0; i < end; ++i) {
      MicroOp& op = program_.ops[i];
      // The result takes its slot before the sources give theirs back: widths may differ.
      int mine = -1;
      if (free.empty()) {
        mine = count++;
      } else {
        mine = free.back();
        free.pop_back();
      }
      actual[op.dst] = mine;
      const int sources[3] = {op.a, op.b, op.c};
      for (int k = 0; k < 3; ++k) {
        const int s = sources[k];
        bool seen = false;
        for (int j = 0; j < k; ++j) seen |= sources[j] == s;
        if (s >= 0 && !seen && !pinned[s] && last[s] == i) free.push_back(actual[s]);
      }
      if (last[op.dst] < 0) free.push_back(mine);
    }
    auto map = [&](int s) { return s >= 0 ? actual[s] : s; };
    for (auto& op : program_.ops) op = {op.fn, map(op.dst), map(op.a), map(op.b), map(op.c)};
    for (auto& l : program_.loads) l.slot = map(l.slot);
    for (auto& c : program_.constants) c.slot = map(c.slot);
    program_.result = map(program_.result);
    program_.slots = count;
  }

  const Problem& problem_;
  const EwiseTable* table_;
  size_t operands_ = 0;
  std::vector<double> imm_;
  std::vector<Value> values_;
  std::vector<Class> slot_class_;
  EwiseProgram program_;
};

}  // namespace

EwiseProgram compile_ewise(const Problem& problem, Isa isa) { return Compiler(problem, isa).run(); }

}  // namespace rm::cpu
