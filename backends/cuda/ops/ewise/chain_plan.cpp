// The chain kernel's plan: where operands wait in shared memory, and which step finds its values
// where. The invariant: a step reads the accumulator as its first operand only; what is read as
// another one, or later, has a slot.
#include "ewise/opcodes.hpp"
#include "ewise/plan.hpp"

namespace rm::cuda_ops {
namespace {

bool is_boolean_result(int opcode) {
  return gives_bool(opcode) || (opcode >= kAnd && opcode <= kXor);
}

const char* chain_layout_why_not(const EwiseArgs& a) {
  const int inner = a.rank - 1;
  if (a.shape[inner] % 8 != 0) return "the inner axis is not a multiple of 8";
  std::int64_t dense = 1;
  for (int d = inner; d >= 0; --d) {
    if (a.y_stride[d] != dense) return "y is not dense";
    dense *= a.shape[d];
  }
  if (reinterpret_cast<std::uintptr_t>(a.y) % 16 != 0) return "y is not 16-byte aligned";
  if (!is_float(a.y_dtype) && a.y_dtype != DType::boolean) return "y is neither float nor bool";
  for (int o = 0; o < a.operands; ++o) {
    const EwiseOperand& x = a.operand[o];
    if (!is_float(x.dtype) && x.dtype != DType::boolean)
      return "an operand is neither float nor bool";
    const std::int64_t s = x.stride[inner];
    if (s != 0 && s != 1) return "an operand is strided along the inner axis";
    if (s == 0) continue;
    if (reinterpret_cast<std::uintptr_t>(x.data) % 16 != 0)
      return "an operand is not 16-byte aligned";
    for (int d = 0; d < inner; ++d) {
      if (x.stride[d] % 8 != 0) return "an operand's rows are not 16-byte aligned";
    }
  }
  return nullptr;
}

/// Class i64 is taken only where all values are 0 or 1, which fp32 holds exactly.
bool chain_class_ok(const Ewise& p, const EwiseInstruction& in) {
  if (in.cls == 0) return true;
  const bool logical = in.opcode == kLogicalNot || (in.opcode >= kAnd && in.opcode <= kXor);
  if (in.cls != 2 || !logical) return false;
  for (const int r : {in.a, in.opcode == kLogicalNot ? in.a : in.b}) {
    const int n = static_cast<int>(p.operands.size());
    const bool boolean = r < n ? p.operands[r].dtype == DType::boolean
                               : is_boolean_result(p.program.code[r - n].opcode);
    if (!boolean) return false;
  }
  return true;
}

EwiseFrom kind_of(DType t) {
  return t == DType::f32    ? kFromF32
         : t == DType::bf16 ? kFromBf16
         : t == DType::f16  ? kFromF16
                            : kFromBool;
}

/// Operands in a thread's column of shared memory; returns the places they take.
int place_operands(const EwiseArgs& all, int vector, EwiseChainArgs* a) {
  int place = 0;
  for (int o = 0; o < all.operands; ++o) {
    const EwiseOperand& x = all.operand[o];
    EwiseChainOperand& to = a->operand[o];
    std::int64_t dense = 1;
    bool is_dense = true, is_row = true;
    for (int d = all.rank - 1; d >= 0; --d) {
      to.stride[d] = x.stride[d];
      is_dense = is_dense && x.stride[d] == dense;
      is_row = is_row && (d == all.rank - 1 || x.stride[d] == 0);
      dense *= all.shape[d];
    }
    to.data = x.data, to.kind = kind_of(x.dtype);
    to.place = static_cast<std::uint8_t>(place);
    to.inner = static_cast<std::uint8_t>(x.stride[all.rank - 1]);
    to.mode = is_dense ? kChainDense : is_row ? kChainRow : kChainStrided;
    const int bytes = to.inner ? kChainValues * size_of(x.dtype) : 4 * (kChainValues / vector);
    place += static_cast<int>(ceil_div(bytes, 16));
  }
  return place;
}

/// The program's steps: constants become immediates, results that are read again later get slots.
struct ChainSteps {
  ChainSteps(const Ewise& problem, EwiseChainArgs& args, int first_slot)
      : p(problem), a(args), place(first_slot) {}
  const Ewise& p;
  EwiseChainArgs& a;
  int place;  // of the first slot
  int slots = 0;
  bool rare = false;
  int before = -1;
  int last_use[kMaxInstructions] = {}, slot_of[kMaxInstructions] = {};
  bool waits[kMaxInstructions] = {};  // read as b or c, when the accumulator is a already

  int count() const { return static_cast<int>(p.operands.size()); }
  const EwiseInstruction& at(int i) const { return p.program.code[static_cast<std::size_t>(i)]; }
  bool is_const(int r) const { return r >= count() && at(r - count()).opcode == kConst; }
  float const_of(int r) const {
    return static_cast<float>(p.program.imm[static_cast<std::size_t>(at(r - count()).a)]);
  }
  static bool commutes(int opcode) {
    return opcode == kAdd || opcode == kMul || (opcode >= kEq && opcode <= kNe) ||
           (opcode >= kAnd && opcode <= kXor);
  }
  /// Registers of instruction i, the step before first where the order is free.
  void registers(int i, int before_i, int (&r)[3]) const {
    r[0] = at(i).a, r[1] = at(i).b, r[2] = at(i).c;
    if (at(i).opcode == kWhere && r[0] - count() != before_i) {  // a condition is rarely the last
      const bool otherwise = r[2] - count() == before_i;
      const int condition = r[0];
      r[0] = otherwise ? r[2] : r[1], r[2] = otherwise ? r[1] : r[2], r[1] = condition;
    }
    const bool swap = commutes(at(i).opcode) && r[0] != r[1] &&
                      (r[1] - count() == before_i || (is_const(r[0]) && !is_const(r[1])));
    if (swap && r[0] - count() != before_i) std::swap(r[0], r[1]);
  }
  void find_uses() {
    const int steps = static_cast<int>(p.program.code.size());
    int last = -1;
    for (int i = 0; i < steps; ++i) {
      last_use[i] = i, slot_of[i] = -1;
      int r[3];
      registers(i, last, r);
      for (int k = 0; k < arity_of(at(i).opcode); ++k) {
        if (r[k] < count()) continue;
        last_use[r[k] - count()] = i;
        const bool square = at(i).opcode == kMul && r[0] == r[1];
        waits[r[k] - count()] |= k > 0 && !square;
      }
      if (at(i).opcode != kConst) last = i;
    }
  }
  void source(int r, bool first, EwiseFrom* from, std::uint8_t* where) const {
    const int n = count();
    if (r < n) {
      const EwiseChainOperand& o = a.operand[r];
      *from = o.inner ? o.kind : kFromSplat, *where = o.place;
    } else if (at(r - n).opcode == kConst) {
      *from = kFromImm, *where = static_cast<std::uint8_t>(at(r - n).a);
    } else if (r - n == before && first) {
      *from = kFromAcc;
    } else {
      *from = kFromF32;
      *where = static_cast<std::uint8_t>(place + slot_of[r - n] * (kChainValues / 4));
    }
  }
  /// A slot for the result of instruction i where a later one than `next` reads it.
  const char* keep(int i, int next, EwiseChainStep* s) {
    s->keep = kChainNotKept;
    if (last_use[i] <= next && !waits[i]) return nullptr;
    bool busy[kMaxChainSlots] = {};
    for (int j = 0; j < i; ++j) {
      if (slot_of[j] >= 0 && last_use[j] > i) busy[slot_of[j]] = true;
    }
    int slot = 0;
    while (slot < kMaxChainSlots && busy[slot]) ++slot;
    if (slot == kMaxChainSlots) return "more than 8 results live at once";
    slot_of[i] = slot, slots = std::max(slots, slot + 1);
    s->keep = static_cast<std::uint8_t>(place + slot * (kChainValues / 4));
    return nullptr;
  }
  void step(int i, EwiseChainStep* s) {
    const int opcode = at(i).opcode;
    int r[3];
    registers(i, before, r);
    s->op = static_cast<std::uint8_t>(chain_op_of(opcode));
    for (int k = 0; k < arity_of(opcode); ++k) source(r[k], k == 0, &s->from[k], &s->place[k]);
    if (opcode == kWhere && r[0] != at(i).a) {
      s->op = r[2] == at(i).c ? kChainWhereTrue : kChainWhereFalse;
    }
    if (arity_of(opcode) >= 2 && is_const(r[1])) {
      s->imm = const_of(r[1]);
      if (opcode == kSub) s->imm = -s->imm;
      if (opcode == kAdd || opcode == kSub) s->op = kChainAddImm;
      if (opcode == kMul) s->op = kChainMulImm;
    } else if (opcode == kMul && r[0] == r[1]) {
      s->op = kChainSquare;
    }
    if (s->op == kChainRareUnary || s->op == kChainRareBinary) {
      s->place[2] = static_cast<std::uint8_t>(opcode), rare = true;
    }
  }
  const char* follow() {
    find_uses();
    const int steps = static_cast<int>(p.program.code.size());
    for (int i = 0; i < steps; ++i) {
      const EwiseInstruction& in = at(i);
      if (in.opcode == kConst && i + 1 < steps) continue;
      EwiseChainStep& s = a.step[a.steps++];
      if (in.opcode == kConst) {
        s.op = kChain_kCopy, s.from[0] = kFromImm, s.place[0] = static_cast<std::uint8_t>(in.a);
      } else {
        if (!chain_class_ok(p, in)) return "an instruction is not of class f32";
        step(i, &s);
      }
      int next = i + 1;
      while (next < steps && at(next).opcode == kConst) ++next;
      if (const char* why = keep(i, next, &s)) return why;
      before = i;
    }
    return nullptr;
  }
};

}  // namespace

const char* chain_args(const Ewise& p, EwiseChainArgs* out, int* vector, int* bytes) {
  EwiseChainArgs& a = *out;
  a = {};
  const EwiseArgs all = interp_args(p);
  if (const char* why = chain_layout_why_not(all)) return why;
  bool wide = all.y_dtype == DType::f32;
  for (int o = 0; o < all.operands; ++o) wide = wide || all.operand[o].dtype == DType::f32;
  *vector = wide ? 4 : 8;
  if (all.total / *vector > 0x7fffffff) return "2^31 vectors or more";
  a.y = all.y, a.y_kind = kind_of(all.y_dtype), a.rank = all.rank, a.operands = all.operands;
  a.vectors = static_cast<std::uint32_t>(all.total / *vector);
  for (int d = 0; d < all.rank; ++d) a.shape[d] = static_cast<std::uint32_t>(all.shape[d]);
  a.row_vectors = static_cast<std::uint32_t>(all.shape[all.rank - 1] / *vector);
  if (a.row_vectors > 1) {
    division_by(a.row_vectors, &a.row_vectors, &a.row_magic, &a.row_shift);
  }
  for (std::size_t i = 0; i < p.program.imm.size() && i < kMaxInstructions; ++i) {
    a.imm[i] = static_cast<float>(p.program.imm[i]);
  }
  ChainSteps steps{p, a, place_operands(all, *vector, &a)};
  if (const char* why = steps.follow()) return why;
  a.scratch = steps.place + steps.slots * (kChainValues / 4);
  *bytes = (a.scratch + (steps.rare ? kChainValues / 2 : 0)) * 16 * kChainThreads;
  return nullptr;
}

}  // namespace rm::cuda_ops
