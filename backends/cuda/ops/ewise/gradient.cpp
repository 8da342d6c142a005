// Reverse-mode differentiation of an ewise program into ewise programs, one an operand. The forward
// instructions are repeated and what the gradient does not read is dropped.
#include "ewise/api.hpp"
#include "ewise/opcodes.hpp"

namespace rm::cuda_ops {
namespace {

/// Appends instructions; operands are registers 0 .. n-1, dy is register n.
class Emitter {
 public:
  Emitter(int inputs, EwiseProgram* out) : inputs_(inputs), out_(out) {}
  void set_class(int cls) { cls_ = cls; }
  int emit(int opcode, int a, int b = -1, int c = -1) {
    out_->code.push_back({opcode, cls_, a, b, c});
    return inputs_ + static_cast<int>(out_->code.size()) - 1;
  }
  int constant(double v) {
    out_->imm.push_back(v);
    return emit(kConst, static_cast<int>(out_->imm.size()) - 1);
  }
  int mul(int a, int b) { return emit(kMul, a, b); }
  int scaled(int a, double v) { return mul(a, constant(v)); }
  int plus(int a, double v) { return emit(kAdd, a, constant(v)); }
  int one_minus(int a) { return emit(kSub, constant(1.0), a); }
  int masked(int condition, int g) { return emit(kWhere, condition, g, constant(0.0)); }

 private:
  int inputs_, cls_ = 0;
  EwiseProgram* out_;
};

/// d result / d a times g, or -1 when it is zero. r is the result.
int unary_gradient(Emitter& e, int opcode, int a, int r, int g) {
  switch (opcode) {
    case kCopy:
      return g;
    case kNeg:
      return e.emit(kNeg, g);
    case kAbs:
      return e.mul(g, e.emit(kSign, a));
    case kExp:
      return e.mul(g, r);
    case kLog:
      return e.emit(kDiv, g, a);
    case kSqrt:
      return e.emit(kDiv, e.scaled(g, 0.5), r);
    case kRsqrt:
      return e.mul(e.scaled(g, -0.5), e.mul(r, e.mul(r, r)));
    case kSin:
      return e.mul(g, e.emit(kCos, a));
    case kCos:
      return e.mul(g, e.emit(kNeg, e.emit(kSin, a)));
    case kTanh:
      return e.mul(g, e.one_minus(e.mul(r, r)));
    case kErf:
      return e.mul(e.scaled(g, 1.12837916709551257390), e.emit(kExp, e.emit(kNeg, e.mul(a, a))));
    case kSigmoid:
      return e.mul(g, e.mul(r, e.one_minus(r)));
    case kRelu:
      return e.masked(e.emit(kGt, a, e.constant(0.0)), g);
    case kGelu: {
      const int cdf = e.scaled(e.plus(e.emit(kErf, e.scaled(a, 0.70710678118654752440)), 1.0), 0.5);
      const int pdf = e.scaled(e.emit(kExp, e.scaled(e.mul(a, a), -0.5)), 0.39894228040143267794);
      return e.mul(g, e.emit(kFma, a, pdf, cdf));
    }
    case kGeluTanh: {
      const int square = e.mul(a, a);
      const int t = e.emit(kTanh, e.mul(e.scaled(a, 0.79788456080286535588),
                                        e.plus(e.scaled(square, 0.044715), 1.0)));
      const int slope =
          e.scaled(e.plus(e.scaled(square, 3 * 0.044715), 1.0), 0.79788456080286535588);
      const int right = e.mul(e.mul(e.scaled(a, 0.5), e.one_minus(e.mul(t, t))), slope);
      return e.mul(g, e.emit(kAdd, e.scaled(e.plus(t, 1.0), 0.5), right));
    }
    case kSilu: {
      const int s = e.emit(kSigmoid, a);
      return e.mul(g, e.mul(s, e.plus(e.mul(a, e.one_minus(s)), 1.0)));
    }
    case kReciprocal:
      return e.emit(kNeg, e.mul(g, e.mul(r, r)));
    case kSoftplus:
      return e.mul(g, e.emit(kSigmoid, a));
    case kLog1p:
      return e.emit(kDiv, g, e.plus(a, 1.0));
    case kExpm1:
      return e.mul(g, e.plus(r, 1.0));
    default:
      return -1;  // floor, ceil, round, sign, trunc, logical_not, isnan
  }
}

/// Ties of minimum and maximum share the gradient, as in torch.
int extremum_gradient(Emitter& e, int better, int a, int b, int g) {
  const int tie = e.masked(e.emit(kEq, a, b), e.scaled(g, 0.5));
  return e.emit(kWhere, e.emit(better, a, b), g, tie);
}

int operand_gradient(Emitter& e, const EwiseInstruction& in, int which, int r, int g) {
  const int a = in.a, b = in.b;
  switch (in.opcode) {
    case kAdd:
      return g;
    case kSub:
      return which == 0 ? g : e.emit(kNeg, g);
    case kMul:
      return e.mul(g, which == 0 ? b : a);
    case kDiv: {
      const int q = e.emit(kDiv, g, b);
      return which == 0 ? q : e.emit(kNeg, e.mul(q, r));
    }
    case kPow:
      if (which == 0) return e.mul(g, e.mul(b, e.emit(kPow, a, e.plus(b, -1.0))));
      return e.mul(g, e.mul(r, e.emit(kLog, a)));
    case kMinimum:
      return extremum_gradient(e, kLt, which == 0 ? a : b, which == 0 ? b : a, g);
    case kMaximum:
      return extremum_gradient(e, kGt, which == 0 ? a : b, which == 0 ? b : a, g);
    case kRemainder:
      return which == 0 ? g : e.emit(kNeg, e.mul(g, e.emit(kFloorDiv, a, b)));
    case kWhere:
      if (which == 0) return -1;
      return which == 1 ? e.masked(a, g) : e.emit(kWhere, a, e.constant(0.0), g);
    case kFma:
      return which == 2 ? g : e.mul(g, which == 0 ? b : a);
    default:
      return arity_of(in.opcode) == 1 ? unary_gradient(e, in.opcode, a, r, g) : -1;
  }
}

/// Keeps what the last register needs.
EwiseProgram without_dead_code(const EwiseProgram& p, int inputs, int result) {
  std::vector<bool> live(p.code.size(), false);
  const auto mark = [&](int r) {
    if (r >= inputs) live[r - inputs] = true;
  };
  mark(result);
  for (int i = static_cast<int>(p.code.size()) - 1; i >= 0; --i) {
    if (!live[i] || p.code[i].opcode == kConst) continue;
    for (const int r : {p.code[i].a, p.code[i].b, p.code[i].c}) mark(r);
  }
  EwiseProgram out;
  std::vector<int> moved(p.code.size(), -1);
  const auto at = [&](int r) { return r < inputs ? r : moved[r - inputs]; };
  for (std::size_t i = 0; i < p.code.size(); ++i) {
    if (!live[i]) continue;
    EwiseInstruction in = p.code[i];
    if (in.opcode == kConst) {
      out.imm.push_back(p.imm[in.a]);
      in.a = static_cast<int>(out.imm.size()) - 1;
    } else {
      in.a = at(in.a), in.b = at(in.b), in.c = at(in.c);
    }
    moved[i] = inputs + static_cast<int>(out.code.size());
    out.code.push_back(in);
  }
  return out;
}

}  // namespace

Status ewise_gradient(const EwiseProgram& program, int n, int operand, EwiseProgram* out) {
  EwiseProgram all;
  all.imm = program.imm;
  const auto shifted = [n](int r) { return r < n ? r : r + 1; };
  for (EwiseInstruction in : program.code) {
    if (in.cls == 2 && !gives_bool(in.opcode) && !(in.opcode >= kAnd && in.opcode <= kXor)) {
      return unsupported(
          "[ewise] expected float instructions in a program to differentiate, got class "
          "i64; try detaching the integer part");
    }
    if (in.opcode != kConst) in.a = shifted(in.a), in.b = shifted(in.b), in.c = shifted(in.c);
    all.code.push_back(in);
  }
  Emitter e(n + 1, &all);
  const int steps = static_cast<int>(program.code.size());
  std::vector<int> gradient(n + 1 + steps, -1);  // register that holds dL/d register
  gradient[n + steps] = n;                       // the last result's is dy
  for (int i = steps - 1; i >= 0; --i) {
    const int g = gradient[n + 1 + i];
    const EwiseInstruction in = all.code[i];
    if (g < 0 || arity_of(in.opcode) < 1) continue;
    e.set_class(in.cls);
    const int regs[] = {in.a, in.b, in.c};
    for (int k = 0; k < arity_of(in.opcode); ++k) {
      const int d = operand_gradient(e, in, k, n + 1 + i, g);
      if (d < 0) continue;
      int& into = gradient[regs[k]];
      into = into < 0 ? d : e.emit(kAdd, into, d);
    }
  }
  *out = {};
  const int result = gradient[operand];
  if (result < 0) return {};
  if (result <= n) {  // an operand itself: a program has at least one instruction
    out->code.push_back({kCopy, program.code.back().cls, result, -1, -1});
    return {};
  }
  *out = without_dead_code(all, n + 1, result);
  return {};
}

}  // namespace rm::cuda_ops
