// Internal to src/plan: the state of one lowering and the table of operator rules.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "plan/lower.hpp"

namespace rm::plan {

class Lowering {
 public:
  explicit Lowering(const LowerRequest& request);
  StepList run();

  const ir::Graph& graph() const { return *request_.graph; }
  ir::Ints dims(ir::ValueId v) const { return ir::static_dims(graph().type(v).dims); }
  ir::DType dtype(ir::ValueId v) const { return graph().type(v).dtype; }

  /// The view of an operand; absent operands give an absent Ref.
  Ref ref(ir::ValueId v);
  /// The operand, broadcast to `dims` by stride 0.
  Ref broadcast(ir::ValueId v, const ir::Ints& dims);
  /// A fresh contiguous temporary.
  Ref temporary(ir::DType dtype, const ir::Ints& dims);
  Ref temporary_for(ir::ValueId v) { return temporary(dtype(v), dims(v)); }
  /// A fresh temporary of a matrix whose rows begin at multiples of 16 bytes: tensor cores read
  /// others slowly.
  Ref aligned_rows(ir::DType dtype, const ir::Ints& dims);
  /// A fresh temporary for `v`, with such rows where a loss over classes reads them.
  Ref rows_for(ir::ValueId v);
  /// A fresh temporary of an image [N,C,*] whose channels lie last in memory.
  Ref images(ir::DType dtype, const ir::Ints& dims);
  /// A fresh temporary for `v`: channels last when an operand of its shape is.
  Ref like(ir::ValueId v, const std::vector<Ref>& inputs);
  /// The same elements, channels last: itself when it is, else through a copy step.
  Ref with_channels_last(const Ref& r);
  /// The same elements, row-major: itself when it is, else through a copy step.
  Ref make_contiguous(const Ref& r);
  /// The same elements with other dims; copies only when the strides force it.
  Ref reshaped(const Ref& r, const ir::Ints& dims);

  void define(ir::ValueId v, Ref r) { refs_[static_cast<size_t>(v)] = std::move(r); }
  void emit(std::string op, ir::Attrs attrs, std::vector<Ref> inputs, std::vector<Ref> outputs,
            bool updates = false);
  /// The result of a node that replaces a part of its operand `operand` and keeps the rest: the
  /// operand's own memory when nothing else reads it and the caller or this plan made it for that,
  /// else a copy. What the operand held cannot be read any more.
  Ref updated(const ir::Node& node, size_t operand);
  /// Makes the step that computes operand `operand` of `node` write the rows of `slot`, a part of
  /// another temporary: one whose kernels take rows of any pitch, and nothing else reads what it
  /// gives. False where that cannot be.
  bool compute_within(const ir::Node& node, size_t operand, const Ref& slot);
  /// `value` as the new content of `state`: the step that computes it writes the state's memory when
  /// nothing reads the old content from there on, else a copy does, behind all other steps.
  void assign(const ir::Node& node);
  /// A step that may refuse the call. What the caller gave away is written behind the last of them.
  void check(const ir::Node& node);

 private:
  bool read_elsewhere(int32_t buffer, const ir::Node& current, size_t operand) const;
  bool is_whole_input(const Ref& r) const;
  bool compute_into(const Ref& value, const Ref& state, const ir::Node& node);
  void assign_late();
  void claim_outputs();
  bool collapse_repeated(size_t result, ir::Layout& layout) const;

  const LowerRequest& request_;
  StepList list_;
  std::vector<Ref> refs_;                     // by value
  std::vector<const External*> external_of_;  // by buffer; null: a temporary
  struct Late {
    ir::ValueId result;
    Ref state, value;
  };
  std::vector<Late> late_;  // assignments left to copies behind all other steps
  size_t current_ = 0;                        // of request_.nodes: the node that is being lowered
  size_t nodes_checked_ = 0, steps_checked_ = 0;  // behind the last check
};

/// Dense, in the order N, spatial axes, C.
bool has_channels_last(const ir::Layout& layout);
// lower_vision.cpp
void lower_conv(Lowering& l, const ir::Node& n);
void lower_images(Lowering& l, const ir::Node& n);

using LowerRule = void (*)(Lowering&, const ir::Node&);
/// nullptr when no rule knows the operator.
LowerRule find_rule(std::string_view op);

}  // namespace rm::plan
