// Weights become inputs, the backward graph and the updates follow the forward.
#include "autograd/training_step.hpp"

#include <algorithm>
#include <limits>
#include <map>

#include "autograd/differentiate.hpp"
#include "base/error.hpp"

namespace rm::autograd {
namespace {

using ir::Dim;

// torch.nn.utils.clip_grad_norm_ adds this to the norm.
constexpr double kClipEps = 1e-6;

struct Placed {
  ValueId parameter = ir::kNoValue;
  std::vector<ValueId> states;
};

// Whether all are numbers and no infinity.
ValueId all_finite(Builder& b, const std::vector<ValueId>& gradients) {
  ValueId largest = ir::kNoValue;
  for (ValueId g : gradients) {
    if (g == ir::kNoValue || b.graph().type(g).num_elements() == 0) continue;
    ValueId most = b.reduce("max", b.op("abs", {g}), all_axes(b.rank(g)), false);  // NaN stays NaN
    most = b.cast(most, ir::DType::kF64);
    largest = largest == ir::kNoValue ? most : b.op("maximum", {largest, most});
  }
  if (largest == ir::kNoValue) largest = b.scalar(ir::DType::kF64, 0);
  return b.op("lt", {largest, b.number(largest, std::numeric_limits<double>::infinity())});
}

[[noreturn]] void unknown_weight(const std::string& name) {
  throw_invalid("[training_step] expected weights of the forward, got '" + name + "'");
}

ValueId norm_of(Builder& b, const std::vector<ValueId>& gradients) {
  ValueId total = ir::kNoValue;
  for (ValueId g : gradients) {
    if (g == ir::kNoValue) continue;
    ValueId sum = b.reduce("sum", b.mul(g, g), all_axes(b.rank(g)), false);
    total = total == ir::kNoValue ? sum : b.add(total, sum);
  }
  return total == ir::kNoValue ? total : b.op("sqrt", {total});
}

class Maker {
 public:
  Maker(ir::Graph forward, const StepRequest& request) : request_(request) {
    step_.graph = std::move(forward);
  }

  TrainingStep run() {
    if (step_.graph.outputs.size() != 1 + request_.buffers.size()) {
      throw_invalid("[training_step] expected the loss and " +
                    std::to_string(request_.buffers.size()) + " buffers as results, got " +
                    std::to_string(step_.graph.outputs.size()));
    }
    place_inputs();
    const ValueId loss = step_.graph.outputs[0];
    const std::vector<ValueId> moved(step_.graph.outputs.begin() + 1, step_.graph.outputs.end());
    step_.graph.outputs.resize(1);
    std::vector<ValueId> wrt;
    for (const Placed& p : placed_) wrt.push_back(p.parameter);
    std::vector<ValueId> gradients = differentiate(step_.graph, scaled(loss), wrt, request_.served);
    check(gradients);
    add_earlier(gradients);
    if (request_.update) average(gradients);
    ValueId finite = ir::kNoValue;
    if (request_.scaled && request_.update) {
      finite = all_finite(b_, gradients);
      step_.graph.outputs.push_back(finite);
      ValueId factor = b_.div(b_.number(scale_, 1), scale_);
      for (ValueId& g : gradients) {
        if (g != ir::kNoValue) g = b_.mul(g, b_.cast(factor, b_.dtype(g)));
      }
    }
    for (ir::Node& node : step_.graph.nodes) node.attrs.erase("padding_idx");  // read by the rule
    if (request_.clip_norm) clip(gradients);
    if (request_.clip_value) clip_values(gradients);
    for (size_t i = 0; i < placed_.size(); ++i) {
      if (gradients[i] == ir::kNoValue) {
        step_.unused.push_back(request_.parameters[i].names[0]);
        continue;
      }
      if (!request_.update) {
        ValueId g = gradients[i];
        if (!sums_.empty()) g = b_.op("assign", {sums_[i], g});
        step_.graph.outputs.push_back(g);
        continue;
      }
      const size_t group = request_.parameters[i].group;
      Update what{placed_[i].parameter, gradients[i], placed_[i].states,
                  row(group, b_.dtype(placed_[i].parameter)), finite};
      for (ValueId v : update(b_, request_.groups[group], what)) step_.graph.outputs.push_back(v);
    }
    for (size_t i = 0; i < moved.size(); ++i) {
      step_.graph.outputs.push_back(b_.op("assign", {buffers_[i], moved[i]}));
    }
    if (request_.split_bytes > 0) step_.split = split_rows(step_.graph, request_.split_bytes);
    return std::move(step_);
  }

 private:
  void place_inputs() {
    ir::Graph& graph = step_.graph;
    std::map<std::string, ValueId> weights;
    for (ValueId v : graph.weights()) weights[graph.value(v).name] = v;
    if (request_.scaled) scale_ = graph.add_input("scale", {ir::DType::kF32, {}});
    if (request_.update) {
      step_.hyper_rows =
          request_.groups.size() + (request_.clip_norm || request_.clip_value ? 1 : 0);
      step_.hyper_columns = columns(request_.groups.at(0).algorithm).size();
      hyper_ = graph.add_input("hyper", {ir::DType::kF64,
                                         {Dim(static_cast<int64_t>(step_.hyper_rows)),
                                          Dim(static_cast<int64_t>(step_.hyper_columns))}});
    }
    if (request_.micro_batches > 1) {
      for (const Trained& trained : request_.parameters) {
        const std::string& name = trained.names.at(0);
        const auto found = weights.find(name);
        if (found == weights.end()) unknown_weight(name);
        sums_.push_back(graph.add_input(name + ".sum", graph.type(found->second), !request_.update));
      }
    }
    for (const Trained& trained : request_.parameters) placed_.push_back(place(trained, weights));
    for (const std::string& name : request_.buffers) {
      const auto found = weights.find(name);
      if (found == weights.end()) {
        throw_invalid("[training_step] expected buffers that the forward reads, got '" + name + "'");
      }
      buffers_.push_back(graph.add_input(name, graph.type(found->second), true));
      graph.replace_all_uses(found->second, buffers_.back());
      weights.erase(found);
    }
    for (const auto& [name, v] : weights) {
      graph.replace_all_uses(v, graph.add_input(name, graph.type(v)));
      step_.frozen.push_back(name);
    }
  }

  Placed place(const Trained& trained, std::map<std::string, ValueId>& weights) {
    ir::Graph& graph = step_.graph;
    const std::string& name = trained.names.at(0);
    Placed placed;
    ir::TensorType type;
    for (const std::string& alias : trained.names) {
      auto found = weights.find(alias);
      if (found == weights.end()) unknown_weight(alias);
      type = graph.type(found->second);
      if (placed.parameter == ir::kNoValue) {
        placed.parameter = graph.add_input(name, type, request_.update);
      }
      graph.replace_all_uses(found->second, placed.parameter);
      weights.erase(found);
    }
    if (type.dtype != ir::DType::kF32 && type.dtype != ir::DType::kF64) {
      throw Error(RM_UNIMPLEMENTED,
                  "[training_step] expected parameters of f32 or f64, got " + type.str() + " for '" +
                      name + "'",
                  "RM703");
    }
    if (!request_.update) return placed;
    for (const std::string& state : states(request_.groups.at(trained.group))) {
      placed.states.push_back(graph.add_input(name + "." + state, type, true));
    }
    return placed;
  }

  void check(const std::vector<ValueId>& gradients) const {
    if (std::all_of(gradients.begin(), gradients.end(),
                    [](ValueId g) { return g == ir::kNoValue; })) {
      throw Error(RM_INVALID_ARGUMENT,
                  "[training_step] expected a loss that depends on a trained parameter, got none",
                  "RM704");
    }
  }

  void clip(std::vector<ValueId>& gradients) {
    ValueId norm = norm_of(b_, gradients);
    step_.graph.outputs.push_back(norm);
    ValueId most = hyper(request_.groups.size(), 0, b_.dtype(norm));
    ValueId factor = b_.op("minimum", {b_.div(most, b_.plus(norm, kClipEps)), b_.number(norm, 1)});
    for (ValueId& g : gradients) {
      if (g != ir::kNoValue) g = b_.mul(g, b_.cast(factor, b_.dtype(g)));
    }
  }

  void clip_values(std::vector<ValueId>& gradients) {
    for (ValueId& g : gradients) {
      if (g == ir::kNoValue) continue;
      ValueId most = hyper(request_.groups.size(), 1, b_.dtype(g));
      g = b_.op("minimum", {b_.op("maximum", {g, b_.neg(most)}), most});
    }
  }

  // Gradients of one micro-batch become those of all up to it.
  void add_earlier(std::vector<ValueId>& gradients) {
    for (size_t i = 0; i < sums_.size(); ++i) {
      if (gradients[i] != ir::kNoValue) gradients[i] = b_.add(sums_[i], gradients[i]);
    }
  }

  // Every process has all gradients, or the step is no program: then nothing is averaged here.
  void average(std::vector<ValueId>& gradients) {
    if (std::count(gradients.begin(), gradients.end(), ir::kNoValue) != 0) return;
    ir::Graph& graph = step_.graph;
    std::vector<ValueId> tokens;
    ValueId token = graph.add_literal({ir::DType::kI32, {Dim(1)}}, std::string(4, '\0'));
    size_t place = 0;
    for (size_t k = 0; k < request_.buckets.size(); ++k) {
      ir::Node start{"all_reduce_start", {}, {}, bucket_attrs(k)};
      for (size_t i : request_.buckets[k]) start.operands.push_back(gradients.at(i));
      place = std::max(place, behind(start.operands));
      start.operands.push_back(token);
      token = graph.add_result({ir::DType::kI32, {Dim(1)}});
      start.results = {token};
      tokens.push_back(token);
      graph.nodes.insert(graph.nodes.begin() + static_cast<std::ptrdiff_t>(place), std::move(start));
      ++place;
    }
    for (size_t k = 0; k < request_.buckets.size(); ++k) {
      ir::Node wait{"all_reduce_wait", {tokens[k]}, {}, bucket_attrs(k)};
      for (size_t i : request_.buckets[k]) {
        gradients[i] = graph.add_result(graph.type(gradients[i]));
        wait.results.push_back(gradients[i]);
      }
      graph.nodes.push_back(std::move(wait));
    }
  }

  ir::Attrs bucket_attrs(size_t bucket) const {
    return {{"bucket", static_cast<int64_t>(bucket)}, {"group", request_.group}};
  }

  // The place behind the last node that gives one of these values.
  size_t behind(const std::vector<ValueId>& values) const {
    const std::vector<ir::Node>& nodes = step_.graph.nodes;
    for (size_t place = nodes.size(); place > 0; --place) {
      for (ValueId v : nodes[place - 1].results) {
        if (std::count(values.begin(), values.end(), v) != 0) return place;
      }
    }
    return 0;
  }

  // What is differentiated: a loop's `loss / k`, times `scale` in f32 at least, as torch promotes it.
  ValueId scaled(ValueId loss) {
    if (request_.micro_batches > 1) {
      loss = b_.div(loss, b_.number(loss, static_cast<double>(request_.micro_batches)));
    }
    if (!request_.scaled) return loss;
    const bool wide = b_.dtype(loss) == ir::DType::kF64;
    ValueId value = wide ? loss : b_.cast(loss, ir::DType::kF32);
    return b_.mul(value, b_.cast(scale_, b_.dtype(value)));
  }

  ValueId hyper(size_t row, size_t column, ir::DType dtype) {
    const auto r = static_cast<int64_t>(row), c = static_cast<int64_t>(column);
    return b_.reshape(b_.slice(b_.slice(table(dtype), 0, r, r + 1), 1, c, c + 1), {});
  }

  // The numbers of a group, by element type.
  ValueId row(size_t group, ir::DType dtype) {
    auto [cells, fresh] = rows_.try_emplace({group, dtype}, ir::kNoValue);
    if (fresh) {
      const auto r = static_cast<int64_t>(group);
      cells->second = b_.reshape(b_.slice(table(dtype), 0, r, r + 1),
                                 {Dim(static_cast<int64_t>(step_.hyper_columns))});
    }
    return cells->second;
  }

  ValueId table(ir::DType dtype) {
    auto [cells, fresh] = tables_.try_emplace(dtype, ir::kNoValue);
    if (fresh) cells->second = b_.cast(hyper_, dtype);
    return cells->second;
  }

  const StepRequest& request_;
  TrainingStep step_;
  Builder b_{step_.graph};
  ValueId hyper_ = ir::kNoValue, scale_ = ir::kNoValue;
  std::map<ir::DType, ValueId> tables_;  // `hyper` by element type
  std::vector<Placed> placed_;
  std::vector<ValueId> buffers_, sums_;
  std::map<std::pair<size_t, ir::DType>, ValueId> rows_;
};

}  // namespace

TrainingStep training_step(ir::Graph forward, const StepRequest& request) {
  return Maker(std::move(forward), request).run();
}

}  // namespace rm::autograd
