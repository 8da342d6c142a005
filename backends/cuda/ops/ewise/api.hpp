// Elementwise programs of docs/operators.md on CUDA: one launch for a whole fused chain, and the
// programs of its gradients. Operands broadcast to y's shape by stride 0.
#pragma once

#include <vector>

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

inline constexpr int kMaxOperands = 12;
inline constexpr int kMaxInstructions = 40;

/// One instruction: registers 0 .. n-1 are the operands, n + i is the result of instruction i.
struct EwiseInstruction {
  int opcode, cls;  // cls: 0 f32, 1 f64, 2 i64
  int a, b, c;      // registers, -1 unused; opcode const: a is an index into imm
};

struct EwiseProgram {
  std::vector<EwiseInstruction> code;
  std::vector<double> imm;
};

struct Ewise {
  EwiseProgram program;
  std::vector<Tensor> operands;  // each of y's shape
  Tensor y;
};

std::span<const KernelRow<Ewise>> ewise_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const Ewise& p);
Status ewise(const Ewise& p, const char* kernel, Stream stream);

/// The program of dL/d operand, over the operands and then dy; empty code: the gradient is zero.
/// Every instruction must be of class f32 or f64 (comparisons stop the gradient).
Status ewise_gradient(const EwiseProgram& program, int num_operands, int operand,
                      EwiseProgram* out);

}  // namespace rm::cuda_ops
