// The region is every node that touches a value as large as the logits, and what lies between such nodes. Each of its values belongs to rows: the leading axes of a value [rows..., rest...], folded to
// one, or the last axis of a transposed [rest, rows].
#include "autograd/split_rows.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "autograd/builder.hpp"
#include "ops/registry.hpp"

namespace rm::autograd {
namespace {

using ir::Dim;
using ir::Dims;
using ir::Graph;
using ir::Node;

// A piece has as many rows as keep its products busy, and is no smaller than what it adds to: the
// partial sums of the weights' gradients are read and written once a piece.
constexpr int64_t kLeastRows = 128, kRowsMultiple = 32;

// How a value of the region belongs to its rows.
struct Layout {
  size_t lead = 0;          // so many leading axes are the rows
  bool transposed = false;  // [rest, rows] instead
};

struct Unsplittable {};  // thrown within this file: some node of the region cannot be split

class Splitter {
 public:
  Splitter(Graph& graph, const Node& softmax)
      : graph_(graph), b_(graph), vocabulary_(graph.type(softmax.operands[0]).dims.back().value()) {
    elements_ = graph.type(softmax.operands[0]).num_elements();
    rows_ = elements_ / vocabulary_;
    find_wide(softmax);
  }

  SplitRows run() {
    find_region();
    place_values();
    const int64_t rows = rows_of_a_piece();
    SplitRows out;
    if (rows == 0) return out;
    std::vector<Node> old = std::exchange(graph_.nodes, {});
    const size_t end = last_ + 1;
    for (size_t n = 0; n < end; ++n) {
      if (!region_[n] && !behind_[n]) graph_.nodes.push_back(old[n]);
    }
    for (int64_t start = 0; start < rows_; start += rows, ++out.pieces) {
      emit_piece(old, start, std::min(start + rows, rows_));
    }
    join();
    for (size_t n = 0; n < end; ++n) {
      if (behind_[n] && !region_[n]) graph_.nodes.push_back(old[n]);
    }
    graph_.nodes.insert(graph_.nodes.end(), old.begin() + static_cast<std::ptrdiff_t>(end),
                        old.end());
    for (const auto& [v, joined] : joined_) graph_.replace_all_uses(v, joined);
    graph_.compact();
    const int64_t element = wide_bytes_ / elements_;
    out.whole_bytes = wide_bytes_;
    out.piece_bytes = rows * vocabulary_ * element;
    return out;
  }

 private:
  // ---- which nodes -------------------------------------------------------------------------------

  bool is_wide(ValueId v) const { return v != ir::kNoValue && wide_[static_cast<size_t>(v)] != 0; }

  // Values of the logits' size that logits become or are made of. Not by their size alone, which a
  // weight may have as well, so not through a product.
  void find_wide(const Node& softmax) {
    wide_.assign(graph_.num_values(), 0);
    wide_[static_cast<size_t>(softmax.operands[0])] = 1;
    for (bool more = true; more;) {
      more = false;
      for (const Node& node : graph_.nodes) {
        if (ops::get(node.op).is(ops::kContraction)) continue;
        std::vector<ValueId> values = node.operands;
        values.insert(values.end(), node.results.begin(), node.results.end());
        const bool none = std::none_of(values.begin(), values.end(),
                                       [&](ValueId v) { return is_wide(v); });
        if (none) continue;
        for (ValueId v : values) {
          if (v == ir::kNoValue || is_wide(v) || !is_large(v)) continue;
          wide_[static_cast<size_t>(v)] = 1;
          more = true;
        }
      }
    }
  }

  bool is_large(ValueId v) const {
    const ir::TensorType& type = graph_.type(v);
    return type.rank() >= 2 && type.num_elements() == elements_ &&
           (type.dims.back().value() == vocabulary_ || type.dims.front().value() == vocabulary_);
  }

  void find_region() {
    const std::vector<Node>& nodes = graph_.nodes;
    std::vector<char> touches(nodes.size(), 0), from(graph_.num_values(), 0),
        into(graph_.num_values(), 0);
    behind_.assign(nodes.size(), 0), region_.assign(nodes.size(), 0);
    const auto any = [&](const std::vector<ValueId>& values, const std::vector<char>& marked) {
      return std::any_of(values.begin(), values.end(), [&](ValueId v) {
        return v != ir::kNoValue && marked[static_cast<size_t>(v)] != 0;
      });
    };
    const auto mark = [](const std::vector<ValueId>& values, std::vector<char>& marked) {
      for (ValueId v : values) {
        if (v != ir::kNoValue) marked[static_cast<size_t>(v)] = 1;
      }
    };
    for (size_t n = 0; n < nodes.size(); ++n) {
      const Node& node = nodes[n];
      touches[n] = std::any_of(node.operands.begin(), node.operands.end(),
                               [&](ValueId v) { return is_wide(v); }) ||
                   is_wide(node.result());
      behind_[n] = any(node.operands, from);
      if (touches[n] || behind_[n]) mark(node.results, from);
    }
    for (size_t n = nodes.size(); n-- > 0;) {
      const bool before = any(nodes[n].results, into);
      region_[n] = touches[n] || (behind_[n] && before);
      if (region_[n] || before) mark(nodes[n].operands, into);
      if (region_[n]) last_ = std::max(last_, n);
    }
  }

  // ---- how its values belong to rows ----------------------------------------------------------------

  std::optional<size_t> lead_of(const Dims& dims) const {
    int64_t count = 1;
    for (size_t k = 0; k < dims.size(); ++k) {
      count *= dims[k].value();
      if (count == rows_) return k + 1;
    }
    return std::nullopt;
  }

  // Values that leave the region are results of rows or sums over them; nothing wide leaves it.
  void place_values() {
    std::vector<char> outside(graph_.num_values(), 0);
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      for (ValueId v : graph_.nodes[n].operands) {
        if (v != ir::kNoValue && !region_[n]) outside[static_cast<size_t>(v)] = 1;
      }
    }
    for (ValueId v : graph_.outputs) outside[static_cast<size_t>(v)] = 1;
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      if (!region_[n]) continue;
      const Node& node = graph_.nodes[n];
      const bool loss = node.op == "cross_entropy";
      if ((node.results.size() != 1 && !loss) || !ops::is_pure(node)) throw Unsplittable();
      const std::optional<Layout> layout = layout_of(node);
      for (ValueId v : node.results) {
        const bool leaves = outside[static_cast<size_t>(v)] != 0;
        if (layout) {
          layouts_[v] = *layout;
          if (leaves && (is_wide(v) || layout->transposed)) throw Unsplittable();
        } else if (!leaves) {
          throw Unsplittable();
        } else {
          summed_bytes_ += graph_.type(v).num_bytes();
        }
        if (leaves) results_.push_back(v);
        if (is_wide(v)) wide_bytes_ = std::max(wide_bytes_, graph_.type(v).num_bytes());
      }
    }
  }

  bool in_region(ValueId v) const { return layouts_.count(v) != 0; }

  // Of the node's result; none for a sum over rows. Throws Unsplittable.
  std::optional<Layout> layout_of(const Node& node) const {
    const Dims& dims = graph_.type(node.result()).dims;
    const std::optional<size_t> lead = lead_of(dims);
    const auto need = [](bool holds) {
      if (!holds) throw Unsplittable();
    };
    for (ValueId v : node.operands) {
      if (v == ir::kNoValue || !in_region(v)) continue;
      need(!layouts_.at(v).transposed || node.op == "matmul");
    }
    const ops::OpDef& op = ops::get(node.op);
    if ((op.is(ops::kElementwise) && node.op != "ewise") || node.op == "expand") {
      need(lead.has_value());
      for (ValueId v : node.operands) need(joins(v, dims, *lead));
      return Layout{*lead};
    }
    if (node.op == "full") {
      need(lead.has_value());
      return Layout{*lead};
    }
    if (node.op == "softmax" || node.op == "gather" || node.op == "scatter") {
      need(lead.has_value() && node.i("axis") >= static_cast<int64_t>(*lead));
      for (ValueId v : node.operands) need(of_rows(v) && lead_of(graph_.type(v).dims) == lead);
      return Layout{*lead};
    }
    if (is_loss(node)) {
      need(lead == size_t{1});
      for (ValueId v : node.operands) need(of_rows(v) && lead_of(graph_.type(v).dims) == lead);
      return Layout{1};
    }
    if (node.op == "reshape") {
      need(lead.has_value() && of_rows(node.operands[0]));
      return Layout{*lead};
    }
    if (node.op == "permute") {
      const Dims& x = graph_.type(node.operands[0]).dims;
      need(of_rows(node.operands[0]) && x.size() == 2 && lead_of(x) == size_t{1} &&
           node.ints("axes") == Ints{1, 0});
      return Layout{0, true};
    }
    if (node.op == "reduce") return layout_of_reduce(node);
    if (node.op == "linear") {
      need(of_rows(node.operands[0]) && lead == graph_.type(node.operands[0]).rank() - 1);
      for (size_t i = 1; i < node.operands.size(); ++i) need(!in_region(node.operands[i]));
      return Layout{*lead};
    }
    need(node.op == "matmul");
    return layout_of_matmul(node);
  }

  std::optional<Layout> layout_of_reduce(const Node& node) const {
    const ValueId x = node.operands[0];
    const std::optional<size_t> lead = lead_of(graph_.type(x).dims);
    if (!of_rows(x) || !lead) throw Unsplittable();
    const auto first = static_cast<int64_t>(*lead);
    const Ints& axes = node.ints("axes");
    const auto of_leading =
        std::count_if(axes.begin(), axes.end(), [&](int64_t a) { return a < first; });
    if (of_leading == 0) return Layout{*lead};
    if (of_leading != first || node.s("kind") != "sum") throw Unsplittable();
    return std::nullopt;
  }

  std::optional<Layout> layout_of_matmul(const Node& node) const {
    const ValueId x = node.operands[0], y = node.operands[1];
    const bool flat = graph_.type(x).rank() == 2 && graph_.type(y).rank() == 2;
    if (flat && (is_transposed(x) || is_transposed_outside(x, y)) && of_rows(y)) return std::nullopt;
    const std::optional<size_t> lead = lead_of(graph_.type(x).dims);
    const bool plain = of_rows(x) && lead == graph_.type(x).rank() - 1 && !in_region(y) &&
                       graph_.type(y).rank() == 2;
    if (!plain) throw Unsplittable();
    return Layout{*lead};
  }

  bool is_transposed(ValueId v) const { return in_region(v) && layouts_.at(v).transposed; }
  // [rest, rows] times rows of the region.
  bool is_transposed_outside(ValueId x, ValueId y) const {
    return !in_region(x) && in_region(y) && graph_.type(x).dims[1].value() == rows_;
  }
  // A value whose leading axes are the rows, of the region or not.
  bool of_rows(ValueId v) const {
    if (v == ir::kNoValue) return false;
    if (in_region(v)) return !layouts_.at(v).transposed;
    return lead_of(graph_.type(v).dims).has_value();
  }
  // Whether an operand of an element-wise node is either one of rows or the same for all of them.
  bool joins(ValueId v, const Dims& dims, size_t lead) const {
    const Dims& own = graph_.type(v).dims;
    if (has_rows(own, dims, lead)) return of_rows(v);
    return !in_region(v) && is_common(own, dims, lead);
  }
  // Whether an operand has the leading axes of the result.
  static bool has_rows(const Dims& own, const Dims& dims, size_t lead) {
    return own.size() == dims.size() &&
           std::equal(own.begin(), own.begin() + static_cast<std::ptrdiff_t>(lead), dims.begin());
  }
  static bool is_common(const Dims& own, const Dims& dims, size_t lead) {
    if (own.size() <= dims.size() - lead) return true;
    if (own.size() > dims.size()) return false;
    const size_t more = own.size() - (dims.size() - lead);  // axes that meet rows: all 1
    return std::all_of(own.begin(), own.begin() + static_cast<std::ptrdiff_t>(more),
                       [](const Dim& d) { return d.value() == 1; });
  }

  // ---- pieces ---------------------------------------------------------------------------------------

  static bool is_loss(const Node& node) {
    return node.op == "cross_entropy" || node.op == "cross_entropy_backward";
  }

  // 0: splitting would save nothing.
  int64_t rows_of_a_piece() const {
    const int64_t row_bytes = wide_bytes_ / rows_;
    int64_t rows = std::max(kLeastRows, summed_bytes_ / row_bytes);
    rows = (rows + kRowsMultiple - 1) / kRowsMultiple * kRowsMultiple;
    // A second partial sum is alive beside the first; without pieces, logits and their gradient may share.
    return rows * row_bytes + summed_bytes_ < wide_bytes_ ? rows : 0;
  }

  Dims piece_dims(const Dims& dims, size_t lead, int64_t rows) const {
    Dims out{Dim(rows)};
    out.insert(out.end(), dims.begin() + static_cast<std::ptrdiff_t>(lead), dims.end());
    return out;
  }

  // The rows [start, stop) of an operand, folded; of values outside of the region a slice.
  ValueId piece(ValueId v, int64_t start, int64_t stop) {
    if (const auto found = pieces_.find(v); found != pieces_.end()) return found->second;
    const Dims dims = b_.dims(v);
    ValueId folded = b_.reshape(v, piece_dims(dims, *lead_of(dims), rows_));
    return pieces_[v] = b_.slice(folded, 0, start, stop);
  }

  ValueId transposed_piece(ValueId v, int64_t start, int64_t stop) {
    if (const auto found = pieces_.find(v); found != pieces_.end()) return found->second;
    return pieces_[v] = b_.slice(v, 1, start, stop);
  }

  void emit_piece(const std::vector<Node>& old, int64_t start, int64_t stop) {
    pieces_.clear();
    for (size_t n = 0; n <= last_; ++n) {
      if (!region_[n]) continue;
      if (is_loss(old[n])) {
        std::vector<ValueId> operands;
        for (ValueId v : old[n].operands) operands.push_back(piece(v, start, stop));
        const std::vector<ValueId> made = b_.ops(old[n].op, std::move(operands), old[n].attrs);
        for (size_t i = 0; i < made.size(); ++i) keep(old[n].results[i], made[i]);
      } else {
        const ValueId made = emit(old[n], start, stop);
        keep(old[n].result(), made);
      }
    }
  }

  // What a piece gives for `v`.
  void keep(ValueId v, ValueId made) {
    pieces_[v] = made;
    if (std::find(results_.begin(), results_.end(), v) == results_.end()) return;
    std::vector<ValueId>& parts = parts_[v];
    if (in_region(v) || parts.empty()) {
      parts.push_back(made);
    } else {
      parts[0] = b_.add(parts[0], made);
    }
  }

  ValueId emit(const Node& node, int64_t start, int64_t stop) {
    const Dims dims = graph_.type(node.result()).dims;
    Node made{node.op, {}, {}, node.attrs};
    const ops::OpDef& op = ops::get(node.op);
    ir::TensorType type = graph_.type(node.result());
    if (node.op == "matmul" && !in_region(node.result())) {
      made.operands = {transposed_piece(node.operands[0], start, stop),
                       piece(node.operands[1], start, stop)};
      return append(std::move(made), type);
    }
    if (node.op == "permute") {
      made.operands = {piece(node.operands[0], start, stop)};
      type.dims = {type.dims[0], Dim(stop - start)};
      return append(std::move(made), type);
    }
    const size_t folded =  // so many leading axes fewer than there were
        (node.op == "reduce" ? *lead_of(graph_.type(node.operands[0]).dims)
                             : layouts_.at(node.result()).lead) - 1;
    for (size_t i = 0; i < node.operands.size(); ++i) {
      const ValueId v = node.operands[i];
      if (v == ir::kNoValue || (op.is(ops::kContraction) && i > 0)) {
        made.operands.push_back(v);
      } else if ((op.is(ops::kElementwise) || node.op == "expand") &&
                 !in_region(v) && !has_rows(b_.dims(v), dims, folded + 1)) {
        made.operands.push_back(common_operand(v, folded));
      } else {
        made.operands.push_back(piece(v, start, stop));
      }
    }
    if (node.op == "softmax" || node.op == "gather" || node.op == "scatter") {
      made.attrs["axis"] = node.i("axis") - static_cast<int64_t>(folded);
    }
    if (node.op == "reduce") {
      return emit_reduce(node, made.operands[0], folded, stop - start);
    }
    type.dims = piece_dims(dims, folded + 1, stop - start);
    if (node.op == "reshape" || node.op == "expand") made.attrs["shape"] = type.dims;
    return append(std::move(made), type);
  }

  // The leading axes of the operand are one now; so they are in a result that keeps them.
  ValueId emit_reduce(const Node& node, ValueId x, size_t folded, int64_t rows) {
    const auto less = static_cast<int64_t>(folded);
    Ints axes;
    for (int64_t a : node.ints("axes")) {
      if (a > less) axes.push_back(a - less);
    }
    Node made{"reduce", {x}, {}, node.attrs};
    ir::TensorType type = graph_.type(node.result());
    if (in_region(node.result())) {
      type.dims = piece_dims(type.dims, folded + 1, rows);
      made.attrs["axes"] = axes;
      return append(std::move(made), type);
    }
    axes.insert(axes.begin(), 0);
    made.attrs["axes"] = axes;
    ir::TensorType partial = type;
    if (node.i("keepdim") != 0) {
      partial.dims.erase(partial.dims.begin(),
                         partial.dims.begin() + static_cast<std::ptrdiff_t>(folded));
    }
    return b_.reshape(append(std::move(made), partial), type.dims);
  }

  // Leading axes of size 1 that met folded ones go.
  ValueId common_operand(ValueId v, size_t folded) {
    if (v == ir::kNoValue || folded == 0) return v;
    const Dims own = b_.dims(v);
    size_t ones = 0;
    while (ones < own.size() && ones < folded && own[ones].value() == 1) ++ones;
    return b_.reshape(v, Dims(own.begin() + static_cast<std::ptrdiff_t>(ones), own.end()));
  }

  ValueId append(Node node, ir::TensorType type) {
    return graph_.append(std::move(node.op), std::move(node.operands), std::move(node.attrs),
                         std::move(type));
  }

  void join() {
    for (ValueId v : results_) {
      const std::vector<ValueId>& parts = parts_.at(v);
      const Dims dims = b_.dims(v);
      joined_[v] = !in_region(v) ? parts[0]
                   : parts.size() == 1
                       ? b_.reshape(parts[0], dims)
                       : b_.reshape(b_.op("concat", parts, {{"axis", int64_t{0}}}), dims);
    }
  }

  Graph& graph_;
  Builder b_;
  int64_t vocabulary_ = 0, rows_ = 0, elements_ = 0;
  int64_t wide_bytes_ = 0, summed_bytes_ = 0;
  std::vector<char> wide_;  // by value
  std::vector<char> region_, behind_;  // by node; behind: it reads what the region makes
  size_t last_ = 0;                    // node of the region
  std::map<ValueId, Layout> layouts_;  // of values of the region that belong to rows
  std::vector<ValueId> results_;       // of the region, read elsewhere
  std::map<ValueId, ValueId> pieces_, joined_;
  std::map<ValueId, std::vector<ValueId>> parts_;
};

}  // namespace

SplitRows split_rows(Graph& graph, int64_t least_bytes) {
  std::vector<Node> found;  // the largest first: attention has softmaxes of its own
  for (const Node& node : graph.nodes) {
    if (node.op != "softmax" && node.op != "cross_entropy") continue;
    const ir::TensorType& type = graph.type(node.operands[0]);
    const bool last = node.op == "cross_entropy" || node.i("axis") + 1 == static_cast<int64_t>(type.rank());
    if (last && type.num_bytes() >= std::max<int64_t>(least_bytes, 1)) found.push_back(node);
  }
  const auto bytes = [&](const Node& n) { return graph.type(n.operands[0]).num_bytes(); };
  std::stable_sort(found.begin(), found.end(),
                   [&](const Node& a, const Node& b) { return bytes(a) > bytes(b); });
  for (const Node& softmax : found) {
    Graph split = graph;
    try {
      const SplitRows out = Splitter(split, softmax).run();
      if (out.pieces == 0) continue;
      graph = std::move(split);
      return out;
    } catch (const Unsplittable&) {
      continue;
    }
  }
  return {};
}

}  // namespace rm::autograd
