// Rotary embedding and attention: written out -> rope and sdpa; repeated heads and range masks of
// sdpa -> its own attributes.
#include <algorithm>

#include "ops/ewise_opcodes.hpp"
#include "passes/iota_form.hpp"
#include "passes/rules/rules.hpp"

namespace rm::passes {
namespace {

using ir::Dim;
using ir::Dims;
using ir::DType;
using ir::Node;
using ir::ValueId;

bool is_slice(const Rewriter& rw, const Node* slice, int64_t axis, const Dim& start,
              const Dim& stop) {
  return slice != nullptr && slice->i("axis") == axis && slice->i_or("step", 1) == 1 &&
         slice->dims("start")[0] == start && slice->dims("stop")[0] == stop;
}

// concat(-x[..., d/2:], x[..., :d/2]) -> x
ValueId rotated_half(const Rewriter& rw, ValueId v) {
  const Node* concat = rw.def(v, "concat");
  if (concat == nullptr || concat->operands.size() != 2 || rw.type(v).rank() != 4 ||
      concat->i("axis") != 3 || !rw.dims(v)[3].is_static()) {
    return ir::kNoValue;
  }
  const Node* negative = rw.def(concat->operands[0], "neg");
  if (negative == nullptr) return ir::kNoValue;
  const Node* high = rw.def(negative->operands[0], "slice");
  const Node* low = rw.def(concat->operands[1], "slice");
  int64_t d = rw.dims(v)[3].value();
  if (d % 2 != 0 || !is_slice(rw, high, 3, d / 2, d) || !is_slice(rw, low, 3, 0, d / 2) ||
      high->operands[0] != low->operands[0]) {
    return ir::kNoValue;
  }
  ValueId x = high->operands[0];
  return rw.type(x) == rw.type(v) ? x : ir::kNoValue;
}

// The other factor of a product of `x`, kNoValue when `v` is none.
ValueId factor_of(const Rewriter& rw, ValueId v, ValueId x) {
  const Node* product = rw.def(v, "mul");
  if (product == nullptr) return ir::kNoValue;
  for (int order : kBothOrders) {
    auto [a, b] = ordered(*product, order);
    if (a == x) return b;
  }
  return ir::kNoValue;
}

// reshape(expand(reshape(k: [B,G,T,D]), [B,G,r,T,D]), [B,G*r,T,D]) -> k
ValueId repeated_heads(const Rewriter& rw, ValueId v) {
  const Node* merge = rw.def(v, "reshape");
  const Node* expand = merge == nullptr ? nullptr : rw.def(merge->operands[0], "expand");
  const Node* split = expand == nullptr ? nullptr : rw.def(expand->operands[0], "reshape");
  if (split == nullptr) return ir::kNoValue;
  ValueId k = split->operands[0];
  const Dims &from = rw.dims(k), &wide = rw.dims(expand->result()), &to = rw.dims(v);
  if (from.size() != 4 || wide.size() != 5 || to.size() != 4) return ir::kNoValue;
  Dims inserted{from[0], from[1], 1, from[2], from[3]};
  Dims repeated{from[0], from[1], wide[2], from[2], from[3]};
  Dims merged{from[0], from[1] * wide[2], from[2], from[3]};
  bool ok = rw.dims(split->result()) == inserted && wide == repeated && to == merged;
  return ok ? k : ir::kNoValue;
}

// x behind a cast of half precision to f32 (attention scores are often normalised in f32).
ValueId without_widening(const Rewriter& rw, ValueId v) {
  const Node* cast = rw.def(v, "cast");
  return cast != nullptr && rw.dtype(v) == DType::kF32 &&
                 rw.dtype(cast->operands[0]) != DType::kF64 &&
                 ir::is_floating(rw.dtype(cast->operands[0]))
             ? cast->operands[0]
             : v;
}

struct Scores {
  ValueId q = ir::kNoValue, transposed_k = ir::kNoValue, mask = ir::kNoValue;
  double scale = 1;
};

// q: [B,H,S,D] @ k^T: [B,H,D,T]
bool match_product(const Rewriter& rw, ValueId v, Scores* out) {
  const Node* product = rw.def(v, "matmul");
  if (product == nullptr || rw.type(v).rank() != 4) return false;
  out->q = product->operands[0];
  out->transposed_k = product->operands[1];
  const Dims &q = rw.dims(out->q), &k = rw.dims(out->transposed_k);
  return q.size() == 4 && k.size() == 4 && q[0] == k[0] && q[1] == k[1];
}

// `v` with its last two axes exchanged; a view of what `v` is a view of.
ValueId exchange_last_axes(Rewriter& rw, ValueId v) {
  std::vector<int64_t> axes{0, 1, 3, 2};
  ir::TensorType type = rw.type(v);
  std::swap(type.dims[2], type.dims[3]);
  if (const Node* permute = rw.def(v, "permute")) {
    axes = permute->ints("axes");
    std::swap(axes[2], axes[3]);
    v = permute->operands[0];
  }
  if (axes == std::vector<int64_t>{0, 1, 2, 3}) return v;
  return rw.emit("permute", {v}, {{"axes", axes}}, std::move(type));
}

bool match_scaled(const Rewriter& rw, ValueId v, Scores* out) {
  for (const char* op : {"mul", "div"}) {
    const Node* node = rw.def(v, op);
    if (node == nullptr) continue;
    std::optional<double> c = rw.splat(node->operands[1]);
    if (!c || rw.type(node->operands[0]) != rw.type(v)) continue;
    out->scale = op[0] == 'm' ? *c : 1.0 / *c;
    return match_product(rw, node->operands[0], out);
  }
  return match_product(rw, v, out);
}

bool match_scores(const Rewriter& rw, ValueId v, Scores* out) {
  const Node* add = rw.def(v, "add");
  if (add == nullptr) return match_scaled(rw, v, out);
  for (int order : kBothOrders) {
    auto [scores, mask] = ordered(*add, order);
    if (rw.type(scores) != rw.type(v) || !match_scaled(rw, scores, out)) continue;
    out->mask = mask;
    return rw.type(mask).rank() <= 4;
  }
  return false;
}

// sdpa_backward has sdpa's operands in their places.
bool reads_mask(const Node& node) {
  return (node.op == "sdpa" || node.op == "sdpa_backward") && operand(node, 3) != ir::kNoValue;
}

}  // namespace

bool rope_of_parts(Rewriter& rw, const Node& node) {
  if (node.op != "add") return false;
  for (int order : kBothOrders) {
    auto [straight, turned] = ordered(node, order);
    const Node* product = rw.def(turned, "mul");
    if (product == nullptr) continue;
    for (int inner : kBothOrders) {
      auto [half, sin] = ordered(*product, inner);
      ValueId x = rotated_half(rw, half);
      ValueId cos = x == ir::kNoValue ? x : factor_of(rw, straight, x);
      if (cos == ir::kNoValue || rw.type(x) != rw.type(node.result())) continue;
      return rw.replace(node.result(),
                        rw.emit("rope", {x, cos, sin}, {{"interleaved", int64_t{0}}}, rw.type(x)));
    }
  }
  return false;
}

// softmax(q k^T * scale + mask) v -> sdpa
bool sdpa_of_parts(Rewriter& rw, const Node& node) {
  if (node.op != "matmul" || rw.type(node.result()).rank() != 4) return false;
  ValueId weights = node.operands[0];
  if (const Node* narrow = rw.def(weights, "cast")) {
    if (rw.def(narrow->operands[0], "softmax") != nullptr) weights = narrow->operands[0];
  }
  const Node* softmax = rw.def(weights, "softmax");
  if (softmax == nullptr || softmax->i_or("log", 0) != 0 || softmax->i_or("axis", 3) != 3)
    return false;
  Scores scores;
  if (!match_scores(rw, without_widening(rw, softmax->operands[0]), &scores) &&
      !match_scores(rw, softmax->operands[0], &scores)) {
    return false;
  }
  ValueId v = node.operands[1];
  DType dtype = rw.dtype(v);
  bool typed = rw.dtype(scores.q) == dtype && rw.dtype(scores.transposed_k) == dtype &&
               (scores.mask == ir::kNoValue || rw.dtype(scores.mask) == dtype);
  const Dims &k = rw.dims(scores.transposed_k), &values = rw.dims(v);
  if (!typed || values.size() != 4 || values[0] != k[0] || values[1] != k[1] || values[2] != k[3]) {
    return false;
  }
  ValueId key = exchange_last_axes(rw, scores.transposed_k);
  return rw.replace(node.result(), rw.emit("sdpa", {scores.q, key, v, scores.mask},
                                           {{"is_causal", int64_t{0}}, {"scale", scores.scale}},
                                           rw.type(node.result())));
}

bool sdpa_groups_queries(Rewriter& rw, const Node& node) {
  if (node.op != "sdpa") return false;
  ValueId k = repeated_heads(rw, node.operands[1]), v = repeated_heads(rw, node.operands[2]);
  if (k == ir::kNoValue || v == ir::kNoValue || rw.dims(k)[1] != rw.dims(v)[1]) return false;
  return rw.replace_all(node, node, {node.operands[0], k, v, operand(node, 3)});
}

// A mask that lets everything through: all true, or all zeros when added.
bool sdpa_drops_open_mask(Rewriter& rw, const Node& node) {
  if (!reads_mask(node)) return false;
  ValueId mask = node.operands[3];
  if (!rw.is_splat(mask, rw.dtype(mask) == DType::kBool ? 1.0 : 0.0)) return false;
  std::vector<ValueId> operands = node.operands;
  operands[3] = ir::kNoValue;
  return rw.replace_all(node, node, std::move(operands));
}

// A mask that is "key position <= query position", both counted from 0, is is_causal.
bool sdpa_range_mask_is_causal(Rewriter& rw, const Node& node) {
  if (!reads_mask(node)) return false;
  const Node* compare = rw.def(node.operands[3]);
  if (compare == nullptr || (compare->op != "le" && compare->op != "ge")) return false;
  auto [low, high] = ordered(*compare, compare->op == "le" ? 0 : 1);
  auto position = [&](ValueId v, int axis_from_end, const Dim& size) {
    std::optional<IotaForm> form = iota_form(rw, v);
    auto rank = static_cast<int>(rw.type(v).rank());
    return form && form->step == 1 && form->start == Dim(0) && form->axis == rank - axis_from_end &&
           rw.dims(v)[static_cast<size_t>(form->axis)] == size;
  };
  if (!position(low, 1, rw.dims(node.operands[1])[2]) ||
      !position(high, 2, rw.dims(node.operands[0])[2])) {
    return false;
  }
  Node causal = node;
  causal.attrs["is_causal"] = int64_t{1};
  causal.operands[3] = ir::kNoValue;
  return rw.replace_all(node, causal, causal.operands);
}

namespace {

// The one position up to which `compare` (le, ge, or such an instruction over these operands) lets
// keys through; kNoValue where it says something else.
ValueId last_key_of(const Rewriter& rw, ValueId low, ValueId high, const Dim& keys) {
  const std::optional<IotaForm> form = iota_form(rw, low);
  const Dims& dims = rw.dims(low);
  const Dims& one = rw.dims(high);
  const bool counts = form && form->step == 1 && form->start == Dim(0) &&
                      form->axis + 1 == static_cast<int>(dims.size()) && dims.back() == keys;
  const bool single = std::all_of(one.begin(), one.end(), [](const Dim& d) { return d == Dim(1); });
  return counts && single && rw.dtype(high) == DType::kI64 ? high : ir::kNoValue;
}

struct LastKey {
  ValueId position = ir::kNoValue;
  bool alone = false;  // the mask says nothing else
};

LastKey last_key_in(const Rewriter& rw, ValueId mask, const Dim& keys) {
  const Node* node = rw.def(mask);
  if (node == nullptr || rw.dtype(mask) != DType::kBool) return {};
  if (node->op == "le" || node->op == "ge") {
    auto [low, high] = ordered(*node, node->op == "le" ? 0 : 1);
    return {last_key_of(rw, low, high, keys), true};
  }
  if (node->op == "and") {
    for (ValueId part : node->operands) {
      if (LastKey found = last_key_in(rw, part, keys); found.position != ir::kNoValue) {
        return {found.position, false};
      }
    }
    return {};
  }
  if (node->op != "ewise") return {};
  // Of a program: a comparison of two operands that `and`s alone lead to the result.
  const std::vector<int64_t>& code = node->ints("code");
  const auto operands = static_cast<int64_t>(node->operands.size());
  const auto count = static_cast<int64_t>(code.size()) / 5;
  std::vector<int64_t> open{operands + count - 1};
  while (!open.empty()) {
    const int64_t instruction = open.back() - operands;
    open.pop_back();
    if (instruction < 0) continue;
    const int64_t* at = code.data() + 5 * instruction;
    const std::string_view name = ops::find_opcode(at[0])->name;
    if (name == "and") {
      open.push_back(at[2]);
      open.push_back(at[3]);
    } else if ((name == "le" || name == "ge") && at[2] < operands && at[3] < operands) {
      const bool le = name == "le";
      const ValueId low = node->operands[static_cast<size_t>(at[le ? 2 : 3])];
      const ValueId high = node->operands[static_cast<size_t>(at[le ? 3 : 2])];
      const ValueId found = last_key_of(rw, low, high, keys);
      if (found != ir::kNoValue) return {found, count == 1};
    }
  }
  return {};
}

}  // namespace

// A mask that lets no key behind one position through says so in `last`: a kernel need not read them.
bool sdpa_range_mask_is_last_key(Rewriter& rw, const Node& node) {
  if (!reads_mask(node) || operand(node, 4) != ir::kNoValue) return false;
  const LastKey last = last_key_in(rw, node.operands[3], rw.dims(node.operands[1])[2]);
  if (last.position == ir::kNoValue) return false;
  std::vector<ValueId> operands = node.operands;
  if (operands.size() < 5) operands.resize(5, ir::kNoValue);
  if (last.alone) operands[3] = ir::kNoValue;
  operands[4] = rw.reshape(last.position, {Dim(1)});
  return rw.replace_all(node, node, std::move(operands));
}

}  // namespace rm::passes
