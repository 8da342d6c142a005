// Sums of values that lie beside each other within zeros, as gradients of slices of one value do.
#include <algorithm>

#include "passes/rules/rules.hpp"

namespace rm::passes {
namespace {

using ir::Dim;
using ir::Node;
using ir::ValueId;

struct Segment {
  int64_t start = 0, size = 0;
  ValueId value = ir::kNoValue;
};

// What of a concat along `axis` is not zeros; false where that is not known.
bool add_segments(const Rewriter& rw, const Node& concat, size_t axis, std::vector<Segment>& out) {
  int64_t at = 0;
  for (ValueId v : concat.operands) {
    const Dim& size = rw.dims(v)[axis];
    if (!size.is_static()) return false;
    if (!rw.is_splat(v, 0)) out.push_back({at, size.value(), v});
    at += size.value();
  }
  return true;
}

}  // namespace

// concat(a, 0) + concat(0, b) -> concat(a, b)
bool sum_of_frames_is_concat(Rewriter& rw, const Node& node) {
  if (node.op != "add" || node.operands[0] == node.operands[1]) return false;
  const Node *a = rw.def(node.operands[0], "concat"), *b = rw.def(node.operands[1], "concat");
  const ir::TensorType type = rw.type(node.result());
  if (a == nullptr || b == nullptr || a->i("axis") != b->i("axis") ||
      rw.type(a->result()) != type || rw.type(b->result()) != type) {
    return false;
  }
  const int64_t axis = a->i("axis");
  const auto at = static_cast<size_t>(axis);
  std::vector<Segment> found;
  if (!type.dims[at].is_static() || !add_segments(rw, *a, at, found) ||
      !add_segments(rw, *b, at, found)) {
    return false;
  }
  std::sort(found.begin(), found.end(),
            [](const Segment& x, const Segment& y) { return x.start < y.start; });
  std::vector<ValueId> parts;
  int64_t end = 0;
  const auto zeros_up_to = [&](int64_t start) {
    if (start == end) return;
    ir::TensorType gap = type;
    gap.dims[at] = Dim(start - end);
    ir::Attr zero = 0.0;
    if (!ir::is_floating(type.dtype)) zero = int64_t{0};
    parts.push_back(rw.emit("full", {}, {{"value", zero}}, std::move(gap)));
  };
  for (const Segment& s : found) {
    if (s.start < end) return false;  // both say something there
    end = s.start + s.size;
  }
  end = 0;
  for (const Segment& s : found) {
    zeros_up_to(s.start);
    parts.push_back(s.value);
    end = s.start + s.size;
  }
  zeros_up_to(type.dims[at].value());
  if (parts.size() == 1) return rw.replace(node.result(), parts[0]);
  return rw.replace(node.result(), rw.emit("concat", std::move(parts), {{"axis", axis}}, type));
}

}  // namespace rm::passes
