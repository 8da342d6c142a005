// Keys are digests over (operator, attributes, type, operand keys), so equal expressions over equal
// weights share one result whatever the shape of the instance that asked first.
#include "engine/constant_expressions.hpp"

#include <cstring>

#include "base/error.hpp"
#include "base/hash.hpp"
#include "ir/scalar.hpp"
#include "ir/text.hpp"
#include "ops/registry.hpp"
#include "plan/lower.hpp"
#include "runtime/aligned_memory.hpp"
#include "runtime/execution_context.hpp"

namespace rm::engine {
namespace {

using ir::Graph;
using ir::Node;
using ir::ValueId;
using ir::ValueKind;
using runtime::Constant;
using runtime::ConstantPtr;

bool is_generator(std::string_view op) { return op == "iota" || op == "full" || op == "dim_value"; }

// iota, full and dim_value are computed here: they have no operands a kernel could read.
// They lie in host memory.
Constant generate(const Graph& graph, const Node& node, const std::string& key) {
  const ir::TensorType& type = graph.type(node.result());
  Constant c;
  c.key = key;
  size_t item = ir::size_bytes(type.dtype);
  if (node.op == "full" || node.op == "dim_value") {
    std::shared_ptr<void> memory = runtime::allocate_host(item);
    if (node.op == "dim_value") {
      ir::store_int(type.dtype, memory.get(), node.dims("value")[0].value());
    } else if (std::holds_alternative<int64_t>(node.attrs.at("value"))) {
      ir::store_int(type.dtype, memory.get(), node.i("value"));
    } else {
      ir::store_element(type.dtype, memory.get(), node.f("value"));
    }
    ir::Ints dims = ir::static_dims(type.dims);
    c.layout = {type.dtype, dims, ir::Ints(dims.size(), 0), 0};  // one element, stride 0
    c.bytes = static_cast<int64_t>(item);
    c.data = memory.get();
    c.owner = std::move(memory);
    c.derived = true;
    return c;
  }
  int64_t count = type.num_elements(), start = node.dims("start")[0].value(), step = node.i("step");
  std::shared_ptr<void> memory = runtime::allocate_host(static_cast<size_t>(count) * item);
  for (int64_t i = 0; i < count; ++i) {
    ir::store_int(type.dtype, static_cast<char*>(memory.get()) + static_cast<size_t>(i) * item,
                  start + i * step);
  }
  c.layout = ir::contiguous(type);
  c.bytes = count * static_cast<int64_t>(item);
  c.data = memory.get();
  c.owner = std::move(memory);
  c.derived = true;
  return c;
}

class Materialiser {
 public:
  Materialiser(const Graph& graph, const ConstantAnalysis& analysis, select::PreparedCache& kernels,
               runtime::ConstantStore& store, rm_stream* stream, const runtime::RunCopy& run_copy)
      : graph_(graph),
        analysis_(analysis),
        kernels_(kernels),
        store_(store),
        stream_(stream),
        run_copy_(run_copy),
        definitions_(graph.definitions()),
        out_(graph.num_values()),
        kept_(graph.num_values(), 0) {
    for (ValueId v : analysis.needed) kept_[static_cast<size_t>(v)] = 1;
  }

  std::vector<ConstantPtr> run() {
    for (ValueId v : analysis_.needed) get(v);
    return std::move(out_);
  }

 private:
  ConstantPtr get(ValueId v) {
    auto i = static_cast<size_t>(v);
    if (out_[i] != nullptr) return out_[i];
    const std::string& key = analysis_.keys[i];
    if ((out_[i] = store_.find(key)) != nullptr) return out_[i];
    const ir::Value& value = graph_.value(v);
    if (value.kind == ValueKind::kWeight) {
      throw Error(RM_NOT_FOUND, "[weights] expected a tensor for '" + value.name + "', got none");
    }
    if (value.kind == ValueKind::kLiteral) return out_[i] = keep(v, placed(literal(value, key)));
    const Node& node = graph_.nodes[static_cast<size_t>(definitions_[i])];
    if (is_generator(node.op)) {
      return out_[i] = keep(v, placed(generate(graph_, node, key)));
    }
    compute(definitions_[i]);
    return out_[i];
  }

  // What only leads to another constant (merged weights on their way to a quantised form) is not
  // kept: it goes when this instance is made.
  ConstantPtr keep(ValueId v, Constant c) {
    if (kept_[static_cast<size_t>(v)] != 0) return store_.put(std::move(c));
    return std::make_shared<const Constant>(std::move(c));
  }

  // A constant made on the host, on the device.
  Constant placed(Constant c) {
    if (store_.device().is_host()) return c;
    std::shared_ptr<void> memory = store_.device().allocate(static_cast<size_t>(c.bytes));
    store_.device().upload(memory.get(), c.data, static_cast<size_t>(c.bytes));
    c.data = memory.get();
    c.owner = std::move(memory);
    return c;
  }

  static Constant literal(const ir::Value& value, const std::string& key) {
    std::shared_ptr<void> memory = runtime::allocate_host(value.literal.size());
    std::memcpy(memory.get(), value.literal.data(), value.literal.size());
    return {key, memory.get(), static_cast<int64_t>(value.literal.size()),
            ir::contiguous(value.type), memory, true};
  }

  // Runs one node over constants. View operators cost nothing: the result shares the memory.
  void compute(int32_t n) {
    const Node& node = graph_.nodes[static_cast<size_t>(n)];
    std::vector<ConstantPtr> sources;
    std::vector<plan::External> externals(graph_.num_values());
    plan::LowerRequest request;
    request.graph = &graph_;
    request.nodes = {n};
    request.externals.assign(graph_.num_values(), nullptr);
    for (ValueId v : node.operands) {
      if (v == ir::kNoValue) continue;
      ConstantPtr c = get(v);
      externals[static_cast<size_t>(v)] = {
          plan::BufferKind::kConstant, static_cast<int32_t>(sources.size()), c->layout, c->bytes};
      request.externals[static_cast<size_t>(v)] = &externals[static_cast<size_t>(v)];
      sources.push_back(std::move(c));
    }
    request.results = node.results;
    request.own_outputs = false;
    plan::StepList list = plan::lower(request);
    // Operands enter as inputs of a one-off plan: nothing is packed for it. Results get memory.
    std::vector<std::shared_ptr<void>> memory;
    std::vector<int32_t> output_of(list.buffers.size(), -1);
    for (auto& b : list.buffers) {
      if (b.kind == plan::BufferKind::kConstant) b.kind = plan::BufferKind::kInput;
    }
    for (const auto& r : list.outputs) {
      auto& b = list.buffers[static_cast<size_t>(r.buffer)];
      if (b.kind != plan::BufferKind::kTemp) continue;
      b.kind = plan::BufferKind::kOutput;
      b.index = static_cast<int32_t>(memory.size());
      memory.push_back(store_.device().allocate(static_cast<size_t>(b.bytes)));
    }
    std::vector<plan::Ref> results = list.outputs;
    std::vector<plan::Buffer> buffers = list.buffers;
    if (!list.steps.empty()) execute(std::move(list), sources, memory);
    for (size_t k = 0; k < results.size(); ++k) {
      const plan::Buffer& b = buffers[static_cast<size_t>(results[k].buffer)];
      bool view = b.kind == plan::BufferKind::kInput;
      auto index = static_cast<size_t>(b.index);
      Constant c;
      c.key = analysis_.keys[static_cast<size_t>(node.results[k])];
      c.data = view ? sources[index]->data : memory[index].get();
      c.bytes = view ? sources[index]->bytes : b.bytes;
      c.layout = results[k].layout;
      c.owner = view ? sources[index]->owner : memory[index];
      c.derived = view ? sources[index]->derived : true;
      out_[static_cast<size_t>(node.results[k])] = keep(node.results[k], std::move(c));
    }
  }

  void execute(plan::StepList list, const std::vector<ConstantPtr>& sources,
               const std::vector<std::shared_ptr<void>>& memory) {
    auto plan = std::make_shared<plan::Plan>(
        plan::bind_kernels(std::move(list), kernels_, select::PackRule::kNone));
    plan::plan_memory(*plan);
    plan::verify_plan(*plan);
    auto bound =
        std::make_shared<runtime::BoundConstants>(runtime::bind_constants(*plan, {}, store_));
    runtime::ExecutionContext context(plan, bound);
    const std::shared_ptr<void> arena =
        store_.device().allocate(static_cast<size_t>(plan->arena_bytes));
    context.bind_arena(static_cast<std::byte*>(arena.get()));
    for (size_t i = 0; i < sources.size(); ++i) context.bind_input(i, sources[i]->data);
    for (size_t i = 0; i < memory.size(); ++i) context.bind_output(i, memory[i].get());
    const auto work = [&] { context.run(stream_); };
    run_copy_ ? run_copy_(work) : work();
  }

  const Graph& graph_;
  const ConstantAnalysis& analysis_;
  select::PreparedCache& kernels_;
  runtime::ConstantStore& store_;
  rm_stream* const stream_;
  const runtime::RunCopy& run_copy_;
  std::vector<int32_t> definitions_;
  std::vector<ConstantPtr> out_;
  std::vector<char> kept_;
};

}  // namespace

ConstantAnalysis analyse_constants(const Graph& graph) {
  ConstantAnalysis a;
  a.is_constant.assign(graph.num_values(), 0);
  a.keys.resize(graph.num_values());
  std::vector<char> noted(graph.num_values(), 0);
  for (size_t i = 0; i < graph.num_values(); ++i) {
    const ir::Value& v = graph.value(static_cast<ValueId>(i));
    if (v.kind == ValueKind::kWeight) a.keys[i] = "w:" + v.name;
    if (v.kind == ValueKind::kLiteral) {
      a.keys[i] = "l:" + hash_bytes(v.type.str() + "=" + v.literal).hex();
    }
    a.is_constant[i] = a.keys[i].empty() ? 0 : 1;
  }
  auto need = [&](ValueId v) {
    if (v == ir::kNoValue || a.is_constant[static_cast<size_t>(v)] == 0) return;
    if (noted[static_cast<size_t>(v)]++ == 0) a.needed.push_back(v);
  };
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    const bool constant = ops::is_constant(
        node, [&](ValueId v) { return a.is_constant[static_cast<size_t>(v)] != 0; });
    if (!constant) {
      a.body.push_back(static_cast<int32_t>(n));
      for (ValueId v : node.operands) need(v);
      continue;
    }
    std::string text = node.op + "\n" + ir::print(node.attrs);
    for (ValueId v : node.operands) {
      text += "\n" + (v == ir::kNoValue ? "_" : a.keys[static_cast<size_t>(v)]);
    }
    for (size_t k = 0; k < node.results.size(); ++k) {
      auto r = static_cast<size_t>(node.results[k]);
      a.is_constant[r] = 1;
      a.keys[r] =
          "d:" +
          hash_bytes(text + "\n" + std::to_string(k) + graph.type(node.results[k]).str()).hex();
    }
  }
  for (ValueId v : graph.outputs) need(v);
  return a;
}

std::vector<ConstantPtr> materialise_constants(const Graph& graph, const ConstantAnalysis& analysis,
                                               select::PreparedCache& kernels,
                                               runtime::ConstantStore& store,
                                               rm_stream* stream,
                                               const runtime::RunCopy& run_copy) {
  return Materialiser(graph, analysis, kernels, store, stream, run_copy).run();
}

}  // namespace rm::engine
