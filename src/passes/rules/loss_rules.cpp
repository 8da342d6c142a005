// Losses over classes.
#include "passes/rules/rules.hpp"

namespace rm::passes {

using ir::DType;
using ir::Node;
using ir::ValueId;

namespace {

// Fewer logits are steps of one small launch together with the rest of their loss (decision 0201).
constexpr int64_t kLeastLogits = 1 << 16;

bool is_half(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

// The half values that `v`, f32, is a cast of, where nothing else reads the cast. It may stand in
// front of a fold of the leading axes.
ValueId unwidened(Rewriter& rw, ValueId v) {
  const Node* folded = rw.single_use(v) ? rw.def(v, "reshape") : nullptr;
  const ValueId wide = folded != nullptr ? folded->operands[0] : v;
  const Node* cast = rw.single_use(wide) ? rw.def(wide, "cast") : nullptr;
  if (cast == nullptr || !is_half(rw.dtype(cast->operands[0]))) return v;
  const ValueId half = cast->operands[0];
  return folded != nullptr ? rw.reshape(half, rw.dims(v)) : half;
}

}  // namespace

// The logarithm of one class a row, softmax(x)[id], is the negative of a cross entropy. Its own
// logits may be of a half type: the operator computes in f32.
bool cross_entropy_of_parts(Rewriter& rw, const Node& node) {
  if (node.op != "gather" || node.i("axis") != 1) return false;
  const Node* softmax = rw.def(node.operands[0], "softmax");
  const ValueId id = node.operands[1];
  if (softmax == nullptr || softmax->i_or("log", 0) == 0 || softmax->i_or("axis", 1) != 1 ||
      !rw.single_use(softmax->result()) || rw.type(softmax->result()).rank() != 2 ||
      rw.dtype(softmax->result()) != DType::kF32 || rw.dtype(id) != DType::kI64 ||
      rw.dims(id)[1] != ir::Dim(1) || rw.dims(id)[0] != rw.dims(softmax->result())[0]) {
    return false;
  }
  const ir::TensorType& type = rw.type(softmax->result());
  if (!type.is_static() || type.num_elements() < kLeastLogits) return false;
  const ValueId logits = unwidened(rw, softmax->operands[0]);
  const ir::TensorType row{DType::kF32, {rw.dims(id)[0]}};
  const ValueId target = rw.reshape(id, row.dims);
  const ValueId loss = rw.emit("cross_entropy", {logits, target}, {}, std::vector{row, row})[0];
  return rw.replace(node.result(),
                    rw.reshape(rw.emit("neg", {loss}, {}, row), rw.dims(node.result())));
}

}  // namespace rm::passes
