// The plan and launches of the fused kernel: which programs are one chain, and in what order their
// operands are used.
#include "ewise/kernels/ewise_fused_sm80.cuh"
#include "ewise/plan.hpp"

namespace rm::cuda_ops {
namespace {

bool fused_unary(int opcode) {
  switch (opcode) {
#define RM_CASE(name) case name:
    RM_EWISE_FUSED_UNARY(RM_CASE)
#undef RM_CASE
    return true;
    default:
      return opcode == kCopy;
  }
}

bool fused_binary(int opcode) {
  switch (opcode) {
#define RM_CASE(name) case name:
    RM_EWISE_FUSED_BINARY(RM_CASE)
#undef RM_CASE
    return true;
    default:
      return false;
  }
}

/// Follows a program: `last` is the register that holds the result so far.
struct FusedChain {
  const Ewise& p;
  EwiseFusedArgs& a;
  int last = -1;
  int order[kMaxFusedOperands] = {};  // which operand is read first, second, third

  int count() const { return static_cast<int>(p.operands.size()); }
  bool is_const(int r) const {
    return r >= count() && p.program.code[r - count()].opcode == kConst;
  }
  float const_of(int r) const {
    return static_cast<float>(p.program.imm[p.program.code[r - count()].a]);
  }
  const char* read(int r) {
    if (r >= count()) return "a result is read again later";
    if (a.operands == kMaxFusedOperands) return "more than three operands";
    order[a.operands++] = r;
    return nullptr;
  }
  const char* step(int what, float imm = 0.0f) {
    if (a.steps == kMaxFusedSteps) return "more than 12 steps";
    a.step[a.steps] = what, a.imm[a.steps++] = imm;
    return nullptr;
  }
  const char* unary(const EwiseInstruction& in) {
    if (!fused_unary(in.opcode)) return "an instruction that only the chain kernel has";
    if (last < 0) {
      if (const char* why = read(in.a)) return why;
    } else if (in.a != last) {
      return "a result is read again later";
    }
    return in.opcode == kCopy ? nullptr : step(in.opcode);
  }
  const char* binary(const EwiseInstruction& in) {
    if (!fused_binary(in.opcode)) return "an instruction that only the chain kernel has";
    int left = in.a, right = in.b;
    const bool first = last < 0, swap = first ? is_const(left) : left != last;
    if (swap) std::swap(left, right);
    if (first) {
      if (const char* why = read(left)) return why;
    } else if (left != last || right == last) {
      return "a result is read again later";
    }
    int op = in.opcode;
    if (swap && op == kSub) {  // b - a is -a + b
      if (const char* why = step(kNeg)) return why;
      op = kAdd;
    }
    if (!is_const(right)) {
      if (const char* why = read(right)) return why;
      return step(op);
    }
    const float c = const_of(right);
    return op == kSub ? step(kFusedImm + kAdd, -c) : step(kFusedImm + op, c);
  }
  const char* follow() {
    for (std::size_t i = 0; i < p.program.code.size(); ++i) {
      const EwiseInstruction& in = p.program.code[i];
      if (in.opcode == kConst) continue;
      if (in.cls != 0) return "an instruction is not of class f32";
      const int arity = arity_of(in.opcode);
      if (arity == 3) return "an instruction that only the chain kernel has";
      if (const char* why = arity == 1 ? unary(in) : binary(in)) return why;
      last = count() + static_cast<int>(i);
    }
    const int end = count() + static_cast<int>(p.program.code.size()) - 1;
    return last == end ? nullptr : "the result is a constant";
  }
};

/// How operand o lies against y, or null for a layout that the kernel cannot read.
const char* fused_layout(const EwiseArgs& all, int o, int vector, int* mode) {
  const EwiseOperand& x = all.operand[o];
  const int inner = all.rank - 1;
  std::int64_t dense = 1;
  bool is_dense = true, outer_broadcast = true;
  for (int d = inner; d >= 0; --d) {
    is_dense = is_dense && x.stride[d] == dense;
    if (d != inner) outer_broadcast = outer_broadcast && x.stride[d] == 0;
    dense *= all.shape[d];
  }
  if (is_dense) {
    *mode = kFusedDense;
  } else if (outer_broadcast && x.stride[inner] == 0) {
    *mode = kFusedScalar;
    return nullptr;
  } else if (outer_broadcast && x.stride[inner] == 1 && all.shape[inner] % vector == 0 &&
             all.shape[inner] > vector) {
    *mode = kFusedRow;
  } else {
    return "an operand is neither dense nor a row nor one value";
  }
  return reinterpret_cast<std::uintptr_t>(x.data) % 16 ? "an operand is not 16-byte aligned"
                                                       : nullptr;
}

const char* fused_args(const Ewise& p, EwiseFusedArgs* out) {
  EwiseFusedArgs& a = *out;
  a = {};
  if (!is_float(p.y.dtype) || !is_contiguous(p.y)) return "y is not dense float";
  if (!is_aligned(p.y.data, 0, p.y.dtype, 16)) return "y is not 16-byte aligned";
  FusedChain chain{p, a};
  if (const char* why = chain.follow()) return why;
  const EwiseArgs all = interp_args(p);
  const int vector = 16 / size_of(p.y.dtype);
  if (all.total % vector != 0 || all.total / vector > 0x7fffffff) return "not whole vectors";
  a.y = p.y.data, a.vectors = all.total / vector;
  for (int i = 0; i < a.operands; ++i) {
    const EwiseOperand& x = all.operand[chain.order[i]];
    if (x.dtype != p.y.dtype) return "dtypes differ";
    if (const char* why = fused_layout(all, chain.order[i], vector, &a.mode[i])) return why;
    a.x[i] = x.data;
  }
  const std::int64_t row = all.shape[all.rank - 1] / vector;
  if (row > 1) division_by(row, &a.row_vectors, &a.row_magic, &a.row_shift);
  return nullptr;
}

template <class T, int kOperands>
Status launch_operands(const EwiseFusedArgs& a, Stream stream) {
  constexpr int kUnroll = 2, kBlocks = kOperands == 1 ? 6 : 5;
  const auto blocks = static_cast<unsigned>(ceil_div(a.vectors, kFusedThreads * kUnroll));
  return launch_overlapped("ewise", ewise_fused<T, kOperands, kUnroll, kBlocks>, blocks,
                           kFusedThreads, 0, stream, a);
}

}  // namespace

const char* fused_why_not(const Ewise& p) {
  EwiseFusedArgs args;
  return fused_args(p, &args);
}

Status launch_fused(const Ewise& p, Workspace, Stream stream) {
  EwiseFusedArgs args;
  if (const char* why = fused_args(p, &args)) return unsupported(std::string("[ewise] ") + why);
  return dispatch_float(p.y.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return args.operands == 1   ? launch_operands<T, 1>(args, stream)
           : args.operands == 2 ? launch_operands<T, 2>(args, stream)
                                : launch_operands<T, 3>(args, stream);
  });
}

}  // namespace rm::cuda_ops
