// See plan.hpp. Pure functions of the problem: nothing here touches the device.
#include "ewise/plan.hpp"

#include "ewise/opcodes.hpp"

namespace rm::cuda_ops {
namespace {

bool legal_int(int opcode) {
  switch (opcode) {
    case kConst:
    case kCopy:
    case kNeg:
    case kAbs:
    case kRelu:
    case kLogicalNot:
    case kSign:
    case kIsNan:
    case kFloor:
    case kCeil:
    case kRound:
    case kTrunc:
    case kWhere:
    case kFma:
      return true;
    default:
      return opcode >= kAdd && opcode <= kXor;
  }
}

std::string at(std::size_t i) { return "[ewise] instruction " + std::to_string(i) + ": "; }

}  // namespace

Status check_ewise(const Ewise& p) {
  const auto& code = p.program.code;
  if (code.empty() || code.size() > kMaxInstructions || p.operands.size() > kMaxOperands) {
    return unsupported("[ewise] expected 1 to 40 instructions over at most 12 operands, got " +
                       std::to_string(code.size()) + " over " + std::to_string(p.operands.size()) +
                       "; try splitting the chain");
  }
  for (const Tensor& t : p.operands) {
    if (!same_shape(t, p.y))
      return invalid("[ewise] expected operands of y's shape, got another; try expand");
  }
  for (std::size_t i = 0; i < code.size(); ++i) {
    const auto& in = code[i];
    const int arity = arity_of(in.opcode), limit = static_cast<int>(p.operands.size() + i);
    if (arity < 0 || in.cls < 0 || in.cls > 2 || (in.cls == 2 && !legal_int(in.opcode))) {
      return invalid(at(i) +
                     "expected an opcode of docs/operators.md in a class that has it, got " +
                     std::to_string(in.opcode) + " in class " + std::to_string(in.cls));
    }
    const int regs[] = {in.a, in.b, in.c};
    for (int k = 0; k < arity; ++k) {
      if (regs[k] < 0 || regs[k] >= limit) {
        return invalid(at(i) + "expected a register below " + std::to_string(limit) + ", got " +
                       std::to_string(regs[k]));
      }
    }
    if (in.opcode == kConst &&
        (in.a < 0 || in.a >= static_cast<int>(p.program.imm.size()) || in.a >= kMaxInstructions)) {
      return invalid(at(i) + "expected an index into imm, got " + std::to_string(in.a));
    }
  }
  return {};
}

EwiseArgs interp_args(const Ewise& p) {
  EwiseArgs a{};
  a.y = p.y.data, a.y_dtype = p.y.dtype, a.total = numel(p.y);
  a.operands = static_cast<int>(p.operands.size());
  a.steps = static_cast<int>(p.program.code.size());
  int rank = 0;  // axes taken so far, outermost first
  for (int d = 0; d < p.y.rank; ++d) {
    if (p.y.shape[d] == 1) continue;
    bool merge = rank > 0 && a.y_stride[rank - 1] == p.y.stride[d] * p.y.shape[d];
    for (int o = 0; merge && o < a.operands; ++o) {
      merge = a.operand[o].stride[rank - 1] == p.operands[o].stride[d] * p.y.shape[d];
    }
    if (!merge) a.shape[rank++] = 1;
    a.shape[rank - 1] *= p.y.shape[d];
    a.y_stride[rank - 1] = p.y.stride[d];
    for (int o = 0; o < a.operands; ++o) a.operand[o].stride[rank - 1] = p.operands[o].stride[d];
  }
  if (rank == 0) {
    a.shape[0] = 1;
    a.y_stride[0] = 1;
    for (int o = 0; o < a.operands; ++o) a.operand[o].stride[0] = 1;
    rank = 1;
  }
  a.rank = rank;
  for (int o = 0; o < a.operands; ++o) {
    a.operand[o].data = p.operands[o].data;
    a.operand[o].dtype = p.operands[o].dtype;
  }
  for (int i = 0; i < a.steps; ++i) {
    const auto& in = p.program.code[i];
    a.step[i] = {static_cast<std::int16_t>(in.opcode), static_cast<std::int16_t>(in.cls),
                 static_cast<std::int16_t>(in.a), static_cast<std::int16_t>(in.b),
                 static_cast<std::int16_t>(in.c)};
  }
  for (std::size_t i = 0; i < p.program.imm.size() && i < kMaxInstructions; ++i) {
    a.imm[i] = p.program.imm[i];
  }
  return a;
}

void division_by(std::int64_t d, std::uint32_t* divisor, std::uint32_t* magic,
                 std::uint32_t* shift) {
  // q = floor(v m / 2^(31 + s)), m = floor(2^(31 + s) / d) + 1, d <= 2^s: exact for v < 2^31
  unsigned s = 1;
  while ((std::int64_t{1} << s) < d) ++s;
  *divisor = static_cast<std::uint32_t>(d);
  *magic = static_cast<std::uint32_t>(
      (std::uint64_t{1} << (31 + s)) / static_cast<std::uint64_t>(d) + 1);
  *shift = s - 1;
}

const char* direct_why_not(const Ewise& p) {
  if (p.program.code.size() != 1) return "more than one instruction";
  const auto& in = p.program.code[0];
  const int arity = arity_of(in.opcode);
  if (in.cls != 0 || arity < 1 || arity > 2)
    return "not a unary or binary instruction of class f32";
  const int regs[] = {in.a, in.b};
  for (int k = 0; k < arity; ++k) {
    const Tensor& t = p.operands[regs[k]];
    if (!is_float(p.y.dtype) || t.dtype != p.y.dtype) return "dtypes differ";
    if (!is_contiguous(t) || !is_contiguous(p.y)) return "a tensor is not dense";
    if (!is_aligned(t.data, 0, t.dtype, 16) || !is_aligned(p.y.data, 0, p.y.dtype, 16)) {
      return "a tensor is not 16-byte aligned";
    }
  }
  return nullptr;
}

}  // namespace rm::cuda_ops
