// Greedy: at the place where most is alive, the value that frees most bytes for the least work is
// given up between two of its readers and computed again for the second. What its producer reads and
// is not alive there any more is computed again as well. Follows the idea of rematerialisation in
// register allocation (Briggs, Cooper, Torczon 1992) with memory in the place of registers.
#include "passes/recompute.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "ops/registry.hpp"

namespace rm::passes {
namespace {

using ir::Graph;
using ir::Node;
using ir::ValueId;

// Only their ratio counts: one core's products, and memory that is read and written.
constexpr double kFlopsPerSecond = 6e10, kBytesPerSecond = 1e10;
// What is computed again takes no longer than the whole program: a training step's forward, a third
// of it, is all that there is to gain in one piece.
constexpr double kMostAgain = 1.0;

struct Buffer {
  int64_t bytes = 0;
  int32_t made = -1;           // index of the node; -1: an input or a constant
  std::vector<int32_t> users;  // indices of nodes that are no views, in order
  bool kept = false;           // a result of the program: alive to the end
};

// Who reads what, by buffer: a view is its operand.
class Lifetimes {
 public:
  explicit Lifetimes(const Graph& graph) : graph_(graph), constant_(ops::constant_values(graph)) {
    base_.resize(graph.num_values());
    for (size_t v = 0; v < base_.size(); ++v) base_[v] = static_cast<ValueId>(v);
    buffers_.resize(graph.num_values());
    for (size_t n = 0; n < graph.nodes.size(); ++n) add(static_cast<int32_t>(n));
    for (ValueId v : graph.outputs) buffer(v).kept = true;
    count();
  }

  ValueId base(ValueId v) const { return base_[static_cast<size_t>(v)]; }
  Buffer& buffer(ValueId v) { return buffers_[static_cast<size_t>(base(v))]; }
  const Buffer& buffer(ValueId v) const { return buffers_[static_cast<size_t>(base(v))]; }
  bool constant(ValueId v) const { return constant_[static_cast<size_t>(v)] != 0; }
  const std::vector<int64_t>& live() const { return live_; }

  /// Whether node `at` can read `v` where it lies, at no cost of memory.
  bool readable(ValueId v, int32_t at) const {
    const Buffer& b = buffer(v);
    if (b.made < 0 || b.bytes == 0 || b.kept) return b.made < at;
    return b.made < at && !b.users.empty() && b.users.back() >= at;
  }

 private:
  void add(int32_t n) {
    const Node& node = graph_.nodes[static_cast<size_t>(n)];
    const ops::OpDef& op = ops::get(node.op);
    if (op.is(ops::kView)) {
      base_[static_cast<size_t>(node.result())] = base(node.operands[0]);
      return;
    }
    for (ValueId v : node.operands) {
      if (v == ir::kNoValue) continue;
      Buffer& read = buffer(v);
      if (read.users.empty() || read.users.back() != n) read.users.push_back(n);
    }
    for (ValueId v : node.results) {
      Buffer& b = buffers_[static_cast<size_t>(v)];
      b.made = n;
      b.bytes = constant(v) ? 0 : graph_.type(v).num_bytes();
    }
    if (node.op == "assign") {  // the state's memory; what it is given is mostly made there
      buffer(node.result()).bytes = 0;
      if (buffer(node.operands[1]).users.size() == 1) buffer(node.operands[1]).bytes = 0;
    }
  }

  void count() {
    std::vector<int64_t> change(graph_.nodes.size() + 1, 0);
    for (const Buffer& b : buffers_) {
      if (b.made < 0 || b.bytes == 0 || b.kept) continue;
      change[static_cast<size_t>(b.made)] += b.bytes;
      change[static_cast<size_t>(b.users.empty() ? b.made : b.users.back()) + 1] -= b.bytes;
    }
    int64_t now = 0;
    for (size_t n = 0; n < graph_.nodes.size(); ++n) live_.push_back(now += change[n]);
  }

  const Graph& graph_;
  std::vector<char> constant_;
  std::vector<ValueId> base_;
  std::vector<Buffer> buffers_;
  std::vector<int64_t> live_;
};

double seconds_of(const Graph& graph, const Node& node) {
  if (ops::get(node.op).is(ops::kView)) return 0;
  const ops::Cost cost = ops::cost(graph, node);
  return cost.flops / kFlopsPerSecond + cost.bytes / kBytesPerSecond;
}

bool repeatable(const Node& node) {
  const ops::OpDef& op = ops::get(node.op);
  return ops::is_pure(node) && !op.is(ops::kOpaque) && node.op != "assign";
}

// What giving up one buffer between two readers takes.
struct Choice {
  ValueId value = ir::kNoValue;  // the buffer
  int32_t next = -1;             // the reader it is computed again for
  std::vector<int32_t> again;    // nodes that are no views, in order
  int64_t bytes = 0;
  double seconds = 0;

  double worth() const { return static_cast<double>(bytes) / (seconds + 1e-9); }
};

class Search {
 public:
  Search(Graph& graph, int64_t budget) : graph_(graph), budget_(budget) {}

  RecomputeResult run() {
    RecomputeResult out;
    for (const Node& node : graph_.nodes) out.seconds += seconds_of(graph_, node);
    bool first = true;
    while (true) {
      const Lifetimes lifetimes(graph_);
      const auto peak = std::max_element(lifetimes.live().begin(), lifetimes.live().end());
      const int64_t bytes = peak == lifetimes.live().end() ? 0 : *peak;
      if (std::exchange(first, false)) out.before = bytes;
      out.after = bytes;
      if (bytes <= budget_) return out;
      const auto at = static_cast<int32_t>(peak - lifetimes.live().begin());
      if (!improve(lifetimes, at, out)) return out;
    }
  }

 private:
  // What has to become less with every choice, so that the search ends: the peak, then how often it
  // is reached.
  static std::pair<int64_t, int64_t> height(const std::vector<int64_t>& live) {
    const int64_t most = *std::max_element(live.begin(), live.end());
    return {most, std::count(live.begin(), live.end(), most)};
  }

  // Applies the best choice at the peak that lowers it.
  bool improve(const Lifetimes& lifetimes, int32_t peak, RecomputeResult& out) {
    std::vector<Choice> choices = choices_at(lifetimes, peak);
    std::stable_sort(choices.begin(), choices.end(),
                     [](const Choice& a, const Choice& b) { return a.worth() > b.worth(); });
    for (const Choice& choice : choices) {
      if (again_ + choice.seconds > kMostAgain * out.seconds) continue;
      Graph tried = graph_;
      const size_t nodes = apply(tried, lifetimes, choice);
      if (!(height(Lifetimes(tried).live()) < height(lifetimes.live()))) continue;
      const Node& maker = graph_.nodes[static_cast<size_t>(lifetimes.buffer(choice.value).made)];
      out.values.push_back({maker.op, graph_.type(choice.value).str(), choice.bytes, nodes,
                            choice.seconds});
      again_ += choice.seconds;
      graph_ = std::move(tried);
      return true;
    }
    return false;
  }

  std::vector<Choice> choices_at(const Lifetimes& lifetimes, int32_t peak) const {
    std::vector<Choice> out;
    for (const Node& node : graph_.nodes) {
      for (ValueId v : node.results) {
        if (lifetimes.base(v) != v) continue;
        const Buffer& b = lifetimes.buffer(v);
        if (b.made < 0 || b.made >= peak || b.bytes == 0 || b.kept) continue;
        const auto next = std::upper_bound(b.users.begin(), b.users.end(), peak);
        if (next == b.users.end() || (next != b.users.begin() && *(next - 1) == peak)) continue;
        Choice choice{v, *next, {}, b.bytes, 0};
        std::set<int32_t> again;
        if (!collect(lifetimes, v, v, *next, again)) continue;
        choice.again.assign(again.begin(), again.end());
        for (int32_t n : choice.again) {
          choice.seconds += seconds_of(graph_, graph_.nodes[static_cast<size_t>(n)]);
        }
        out.push_back(std::move(choice));
      }
    }
    return out;
  }

  // The nodes that give `v` at node `at` without the buffer `given_up`. False: it cannot be.
  bool collect(const Lifetimes& lifetimes, ValueId v, ValueId given_up, int32_t at,
               std::set<int32_t>& again) const {
    if (lifetimes.base(v) != given_up && lifetimes.readable(v, at)) return true;
    const int32_t n = lifetimes.buffer(v).made;
    if (n < 0) return true;
    if (!again.insert(n).second) return true;
    const Node& node = graph_.nodes[static_cast<size_t>(n)];
    if (!repeatable(node)) return false;
    return std::all_of(node.operands.begin(), node.operands.end(), [&](ValueId operand) {
      return operand == ir::kNoValue || collect(lifetimes, operand, given_up, at, again);
    });
  }

  // Copies the nodes in front of the reader; it and all later readers read the copies. Returns how
  // many nodes are no views.
  size_t apply(Graph& graph, const Lifetimes& lifetimes, const Choice& choice) const {
    std::map<ValueId, ValueId> copies;
    std::vector<Node> made;
    const auto repeated = [&](ValueId v) {  // its buffer is computed again
      const int32_t n = lifetimes.buffer(v).made;
      return n >= 0 && std::binary_search(choice.again.begin(), choice.again.end(), n);
    };
    const std::vector<int32_t> definitions = graph_.definitions();
    const auto copy = [&](auto&& self, ValueId v) -> ValueId {
      if (v == ir::kNoValue || !repeated(v)) return v;
      if (const auto found = copies.find(v); found != copies.end()) return found->second;
      Node node = graph_.nodes[static_cast<size_t>(definitions[static_cast<size_t>(v)])];
      for (ValueId& operand : node.operands) operand = self(self, operand);
      for (ValueId& result : node.results) {
        const ValueId fresh = graph.add_result(graph.type(result));
        copies[result] = fresh;
        result = fresh;
      }
      made.push_back(std::move(node));
      return copies[v];
    };
    const auto at = static_cast<size_t>(choice.next);
    for (size_t n = at; n < graph.nodes.size(); ++n) {
      const bool view = ops::get(graph.nodes[n].op).is(ops::kView);
      for (ValueId& operand : graph.nodes[n].operands) {
        if (operand == ir::kNoValue || lifetimes.base(operand) != choice.value) continue;
        if (view) continue;  // copied where somebody reads it
        operand = copy(copy, operand);
      }
    }
    const auto nodes = static_cast<size_t>(std::count_if(
        made.begin(), made.end(), [](const Node& n) { return !ops::get(n.op).is(ops::kView); }));
    drop_unread_sums(graph, made);
    graph.nodes.insert(graph.nodes.begin() + static_cast<std::ptrdiff_t>(at), made.begin(),
                       made.end());
    return nodes;
  }

  // A norm whose second result, the sum, nobody reads computes one.
  static void drop_unread_sums(const Graph& graph, std::vector<Node>& made) {
    std::set<ValueId> read;
    for (const auto* nodes : {&graph.nodes, &std::as_const(made)}) {
      for (const Node& node : *nodes) read.insert(node.operands.begin(), node.operands.end());
    }
    for (Node& node : made) {
      const bool norm = node.op == "layer_norm" || node.op == "rms_norm";
      if (norm && node.results.size() == 2 && read.count(node.results[1]) == 0) {
        node.results.pop_back();
      }
    }
  }

  Graph& graph_;
  int64_t budget_;
  double again_ = 0;  // estimated seconds of what is computed again
};

}  // namespace

RecomputeResult recompute(ir::Graph& graph, int64_t budget_bytes) {
  RecomputeResult out = Search(graph, budget_bytes).run();
  graph.compact();
  return out;
}

}  // namespace rm::passes
