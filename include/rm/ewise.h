/* The instructions of elementwise programs (operator `ewise`), the one table of them.
 *
 * Numbers are part of the plugin ABI and of cached programs: rows may be appended, never renumbered.
 * Meanings that a name does not tell, and the form of a program: docs/operators.md.
 *
 * RM_EWISE_OPCODES(X) calls X(id, name, number, arity, operands, result, commutative, note):
 *   id           for enumerators: k<id>
 *   name         in the IR; of unary, binary and `where` operators too
 *   arity        operands read: 0 (const) to 3
 *   operands     ANY class, FLOAT or INTEGER (bool included) alone
 *   result       VALUE: of the instruction's class; LOGICAL: 0 or 1, whatever the operands are
 *   commutative  1 when the first two operands may be swapped
 *   note         for the documentation, or ""
 */
#ifndef RM_EWISE_H
#define RM_EWISE_H

#define RM_EWISE_OPCODES(X)                                                            \
  X(Const, "const", 0, 0, ANY, VALUE, 0, "imm[a]")                                     \
  RM_EWISE_UNARY(X)                                                                    \
  RM_EWISE_BINARY(X)                                                                   \
  RM_EWISE_TERNARY(X)

#define RM_EWISE_UNARY(X)                                                              \
  X(Copy, "copy", 1, 1, ANY, VALUE, 0, "")                                             \
  X(Neg, "neg", 2, 1, ANY, VALUE, 0, "")                                               \
  X(Abs, "abs", 3, 1, ANY, VALUE, 0, "")                                               \
  X(Exp, "exp", 4, 1, FLOAT, VALUE, 0, "")                                             \
  X(Log, "log", 5, 1, FLOAT, VALUE, 0, "")                                             \
  X(Sqrt, "sqrt", 6, 1, FLOAT, VALUE, 0, "")                                           \
  X(Rsqrt, "rsqrt", 7, 1, FLOAT, VALUE, 0, "")                                         \
  X(Sin, "sin", 8, 1, FLOAT, VALUE, 0, "")                                             \
  X(Cos, "cos", 9, 1, FLOAT, VALUE, 0, "")                                             \
  X(Tanh, "tanh", 10, 1, FLOAT, VALUE, 0, "")                                          \
  X(Erf, "erf", 11, 1, FLOAT, VALUE, 0, "")                                            \
  X(Sigmoid, "sigmoid", 12, 1, FLOAT, VALUE, 0, "")                                    \
  X(Relu, "relu", 13, 1, ANY, VALUE, 0, "NaN stays NaN")                               \
  X(Gelu, "gelu", 14, 1, FLOAT, VALUE, 0, "with erf")                                  \
  X(GeluTanh, "gelu_tanh", 15, 1, FLOAT, VALUE, 0, "")                                 \
  X(Silu, "silu", 16, 1, FLOAT, VALUE, 0, "")                                          \
  X(LogicalNot, "logical_not", 17, 1, ANY, LOGICAL, 0, "")                             \
  X(Reciprocal, "reciprocal", 18, 1, FLOAT, VALUE, 0, "")                              \
  X(Floor, "floor", 19, 1, ANY, VALUE, 0, "")                                          \
  X(Ceil, "ceil", 20, 1, ANY, VALUE, 0, "")                                            \
  X(Round, "round", 21, 1, ANY, VALUE, 0, "half to even")                              \
  X(Sign, "sign", 22, 1, ANY, VALUE, 0, "")                                            \
  X(Softplus, "softplus", 23, 1, FLOAT, VALUE, 0, "x above 20")                        \
  X(Log1p, "log1p", 24, 1, FLOAT, VALUE, 0, "")                                        \
  X(Expm1, "expm1", 25, 1, FLOAT, VALUE, 0, "")                                        \
  X(IsNan, "isnan", 26, 1, ANY, LOGICAL, 0, "")                                        \
  X(Trunc, "trunc", 27, 1, ANY, VALUE, 0, "")

#define RM_EWISE_BINARY(X)                                                             \
  X(Add, "add", 40, 2, ANY, VALUE, 1, "")                                              \
  X(Sub, "sub", 41, 2, ANY, VALUE, 0, "")                                              \
  X(Mul, "mul", 42, 2, ANY, VALUE, 1, "")                                              \
  X(Div, "div", 43, 2, FLOAT, VALUE, 0, "")                                            \
  X(Pow, "pow", 44, 2, ANY, VALUE, 0, "")                                              \
  X(Minimum, "minimum", 45, 2, ANY, VALUE, 1, "NaN wins")                              \
  X(Maximum, "maximum", 46, 2, ANY, VALUE, 1, "NaN wins")                              \
  X(FloorDiv, "floor_div", 47, 2, ANY, VALUE, 0, "")                                   \
  X(Remainder, "remainder", 48, 2, ANY, VALUE, 0, "sign of divisor")                   \
  X(Eq, "eq", 49, 2, ANY, LOGICAL, 1, "")                                              \
  X(Ne, "ne", 50, 2, ANY, LOGICAL, 1, "")                                              \
  X(Lt, "lt", 51, 2, ANY, LOGICAL, 0, "")                                              \
  X(Le, "le", 52, 2, ANY, LOGICAL, 0, "")                                              \
  X(Gt, "gt", 53, 2, ANY, LOGICAL, 0, "")                                              \
  X(Ge, "ge", 54, 2, ANY, LOGICAL, 0, "")                                              \
  X(And, "and", 55, 2, INTEGER, VALUE, 1, "bitwise; 0/1 for bool")                     \
  X(Or, "or", 56, 2, INTEGER, VALUE, 1, "bitwise; 0/1 for bool")                       \
  X(Xor, "xor", 57, 2, INTEGER, VALUE, 1, "bitwise; 0/1 for bool")

#define RM_EWISE_TERNARY(X)                                                            \
  X(Where, "where", 70, 3, ANY, VALUE, 0, "a ? b : c")                                 \
  X(Fma, "fma", 71, 3, ANY, VALUE, 0, "a times b plus c")

/* Fields of one instruction in the attribute `code`: opcode, class, a, b, c. */
#define RM_EWISE_FIELDS 5

#ifdef __cplusplus
namespace rm::ewise {

enum Opcode : int {
#define RM_EWISE_ENUMERATOR(id, name, number, arity, operands, result, commutative, note) k##id = number,
  RM_EWISE_OPCODES(RM_EWISE_ENUMERATOR)
#undef RM_EWISE_ENUMERATOR
};

// Static: a file that is compiled for a higher instruction set must not share them with others.

/// Operands that an opcode reads; -1 for a number that is no opcode.
static constexpr int arity_of(long long opcode) {
  switch (opcode) {
#define RM_EWISE_CASE(id, name, number, arity, operands, result, commutative, note) \
  case number:                                                                      \
    return arity;
    RM_EWISE_OPCODES(RM_EWISE_CASE)
#undef RM_EWISE_CASE
    default:
      return -1;
  }
}

/// Whether the result is 0 or 1 of the integer class, whatever the operands are.
static constexpr bool is_logical(long long opcode) {
  enum Result { VALUE, LOGICAL };
  switch (opcode) {
#define RM_EWISE_CASE(id, name, number, arity, operands, result, commutative, note) \
  case number:                                                                      \
    return result == LOGICAL;
    RM_EWISE_OPCODES(RM_EWISE_CASE)
#undef RM_EWISE_CASE
    default:
      return false;
  }
}

enum class Operands { kAny, kFloat, kInteger };

/// The operands that an opcode has a meaning for.
static constexpr Operands operands_of(long long opcode) {
  constexpr Operands ANY = Operands::kAny, FLOAT = Operands::kFloat, INTEGER = Operands::kInteger;
  switch (opcode) {
#define RM_EWISE_CASE(id, name, number, arity, operands, result, commutative, note) \
  case number:                                                                      \
    return operands;
    RM_EWISE_OPCODES(RM_EWISE_CASE)
#undef RM_EWISE_CASE
    default:
      return ANY;
  }
}

}  // namespace rm::ewise
#endif

#endif /* RM_EWISE_H */
