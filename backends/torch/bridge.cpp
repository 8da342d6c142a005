// The row: prepare() decodes the call once, launch() encodes the operands, calls and copies out.
#include "bridge.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "call_spec.hpp"
#include "encode.hpp"
#include "python_route.hpp"
#include "rm/plugin.hpp"
#include "torch_api.hpp"

namespace rm::torch_bridge {
namespace {

struct State {
  std::string op, name, overload;  // "aten.topk.default", "aten::topk", ""
  CallSpec call;
  std::vector<Operand> inputs, outputs;
  std::optional<PythonCall> python;
};

/// Gradients off for the calling thread, restored at the end.
class NoGrad {
 public:
  explicit NoGrad(const TorchApi& api) : api_(api), before_(api.grad_enabled()) {
    if (before_) api_.set_grad_enabled(false);
  }
  ~NoGrad() {
    if (before_) api_.set_grad_enabled(true);
  }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  const TorchApi& api_;
  bool before_;
};

const rm_attr* find_attr(const rm_problem& problem, std::string_view name, rm_attr_kind kind) {
  const auto* at = reinterpret_cast<const std::byte*>(problem.attrs);
  for (size_t i = 0; i < problem.num_attrs; ++i, at += problem.attr_stride) {
    const auto* attr = reinterpret_cast<const rm_attr*>(at);
    if (plugin::view(attr->name) == name && attr->kind == kind) return attr;
  }
  return nullptr;
}

std::span<const int64_t> sym_args(const rm_problem& problem) {
  const rm_attr* attr = find_attr(problem, "sym_args", RM_ATTR_INTS);
  return attr == nullptr ? std::span<const int64_t>() : std::span(attr->ints, attr->count);
}

std::string_view schema_args(const rm_problem& problem) {
  const rm_attr* attr = find_attr(problem, "schema_args", RM_ATTR_STRING);
  if (attr == nullptr) {
    throw plugin::Error(RM_INVALID_ARGUMENT,
                        "[torch bridge] expected the attribute schema_args, got none; encode calls "
                        "with aten_args.encode_call");
  }
  return plugin::view(attr->s);
}

void check_operand_indices(const Value& value, size_t count) {
  for (const Value& item : value.items) check_operand_indices(item, count);
  if (value.kind == Value::Kind::kTensor &&
      (value.i < 0 || static_cast<size_t>(value.i) >= count)) {
    throw plugin::Error(RM_INVALID_ARGUMENT, "[torch bridge] expected an operand below " +
                                                 std::to_string(count) + ", got " +
                                                 std::to_string(value.i));
  }
}

/// "aten.add.Tensor" -> "aten::add", "Tensor"; the overload "default" is the empty one. A library's
/// own operator has its namespace in front: "aten.vision.nms.default" -> "vision::nms".
void split_name(std::string_view op, State& state) {
  const size_t first = op.find('.'), last = op.rfind('.');
  if (op.substr(0, first) != "aten" || first == last) {
    throw plugin::Error(
        RM_INVALID_ARGUMENT,
        "[torch bridge] expected 'aten.<name>.<overload>', got '" + std::string(op) + "'");
  }
  state.op = op;
  std::string name(op.substr(first + 1, last - first - 1));
  const size_t inner = name.find('.');
  state.name = inner == std::string::npos
                   ? "aten::" + name
                   : name.substr(0, inner) + "::" + name.substr(inner + 1);
  state.overload = op.substr(last + 1);
  if (state.overload == "default") state.overload.clear();
}

std::unique_ptr<State> make_state(const rm_problem& problem) {
  auto state = std::make_unique<State>();
  split_name(plugin::view(problem.op), *state);
  state->call = parse_call(schema_args(problem), sym_args(problem));
  for (const auto& [type, value] : state->call.args) {
    check_operand_indices(value, problem.num_inputs);
  }
  for (size_t i = 0; i < problem.num_inputs; ++i) {
    state->inputs.push_back(Operand::of(problem.inputs[i]));
  }
  for (size_t i = 0; i < problem.num_outputs; ++i) {
    state->outputs.push_back(Operand::of(problem.outputs[i]));
  }
  if (state->call.needs_python) {
    state->python.emplace(state->op, schema_args(problem), sym_args(problem));
  }
  return state;
}

/// The results of a call on the dispatcher's stack, flattened; every handle is owned from here on.
std::vector<Tensor> take_results(const TorchApi& api, const std::vector<Type>& returns,
                                 const std::vector<Stable>& stack) {
  std::vector<Tensor> results;
  for (size_t i = 0; i < returns.size(); ++i) {
    if (returns[i].wrappers.empty()) {
      results.emplace_back(reinterpret_cast<void*>(stack[i]));
    } else if (returns[i].wrappers == "l") {
      void* list = reinterpret_cast<void*>(stack[i]);
      size_t count = 0;
      check(api.list_size(list, &count), "reading a list of results");
      for (size_t k = 0; k < count; ++k) {
        Stable item = 0;
        check(api.list_get(list, k, &item), "reading a list of results");
        results.emplace_back(reinterpret_cast<void*>(item));
      }
      check(api.delete_list(list), "freeing a list of results");
    } else {
      throw plugin::Error(RM_UNIMPLEMENTED,
                          "[torch bridge] expected tensors or lists of tensors as "
                          "results, got an optional");
    }
  }
  return results;
}

std::vector<Tensor> call_stable(const TorchApi& api, const State& state,
                                const void* const* inputs) {
  std::vector<Stable> stack(std::max(state.call.args.size(), state.call.returns.size()));
  for (size_t i = 0; i < state.call.args.size(); ++i) {
    const auto& [type, value] = state.call.args[i];
    stack[i] = encode(type, value, state.inputs, inputs);
  }
  check(api.call_dispatcher(state.name.c_str(), state.overload.c_str(), stack.data(),
                            api.abi_version()),
        state.op.c_str());
  return take_results(api, state.call.returns, stack);
}

std::vector<Tensor> call_python(const State& state, const void* const* inputs) {
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < state.inputs.size(); ++i) {
    const Operand& operand = state.inputs[i];
    tensors.push_back(operand.present ? operand.over(const_cast<void*>(inputs[i])) : Tensor());
  }
  return (*state.python)(std::move(tensors));
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? "," : "") + std::to_string(size);
  return text + "]";
}

/// Copies a result to where the host wants it; a result of another shape or type is an error, since
/// everything behind it was planned for this one.
void store(const TorchApi& api, const State& state, const Tensor& result, const Operand& operand,
           void* dst) {
  bool defined = false;
  check(api.is_defined(result.get(), &defined), "reading a result");
  if (!defined) {
    throw plugin::Error(RM_INTERNAL, "[" + state.op + "] expected a tensor, got an undefined one");
  }
  int64_t ndim = 0, *sizes = nullptr;
  int32_t dtype = 0;
  check(api.get_dim(result.get(), &ndim), "reading a result");
  check(api.get_sizes(result.get(), &sizes), "reading a result");
  check(api.get_dtype(result.get(), &dtype), "reading a result");
  const std::span<const int64_t> shape(sizes, static_cast<size_t>(ndim));
  if (!std::equal(shape.begin(), shape.end(), operand.shape.begin(), operand.shape.end()) ||
      dtype != operand.dtype) {
    throw plugin::Error(RM_INTERNAL, "[" + state.op + "] expected shape " +
                                         shape_text(operand.shape) + " of torch type " +
                                         std::to_string(operand.dtype) + ", got " +
                                         shape_text(shape) + " of type " + std::to_string(dtype));
  }
  if (operand.elements() == 0) return;
  check(api.copy(operand.over(dst).get(), result.get(), 0), "copying a result");
}

int supports(const rm_problem* problem, const rm_device_info*, rm_str* why_not) {
  static thread_local std::string why;  // the contract wants a string that outlives the call
  try {
    require_torch();
    State state;
    split_name(plugin::view(problem->op), state);
    parse_call(schema_args(*problem), sym_args(*problem));
    return 1;
  } catch (const std::exception& e) {
    why = e.what();
    if (why_not != nullptr) *why_not = plugin::str(why);
    return 0;
  }
}

/// Dispatch, argument boxing and the copy of the results; the operator itself is not modelled: no
/// other row implements it.
double cost_ns(const rm_problem* problem, const rm_device_info*, uint32_t) {
  constexpr double kCallNs = 3000, kBytesPerNs = 8;
  double bytes = 0;
  for (size_t i = 0; i < problem->num_outputs; ++i) {
    const rm_tensor* tensor = problem->outputs[i];
    if (tensor == nullptr) continue;
    double count = tensor->dtype.bits / 8.0;
    for (int32_t d = 0; d < tensor->ndim; ++d) count *= static_cast<double>(tensor->shape[d]);
    bytes += count;
  }
  return kCallNs + bytes / kBytesPerNs;
}

rm_status* prepare(const rm_problem* problem, const rm_device_info*, uint32_t,
                   rm_kernel_state** out) {
  return plugin::guard(
      [&] { *out = reinterpret_cast<rm_kernel_state*>(make_state(*problem).release()); });
}

void release(rm_kernel_state* state) { delete reinterpret_cast<State*>(state); }

rm_status* launch(const rm_launch* launch) {
  return plugin::guard([&] {
    const auto& state = *reinterpret_cast<const State*>(launch->state);
    const TorchApi& api = require_torch();
    const NoGrad no_grad(api);
    const std::vector<Tensor> results =
        state.python ? call_python(state, launch->inputs) : call_stable(api, state, launch->inputs);
    if (results.size() != state.outputs.size()) {
      throw plugin::Error(RM_INTERNAL, "[" + state.op + "] expected " +
                                           std::to_string(state.outputs.size()) + " results, got " +
                                           std::to_string(results.size()));
    }
    for (size_t i = 0; i < results.size(); ++i) {
      if (state.outputs[i].present && launch->outputs[i] != nullptr) {
        store(api, state, results[i], state.outputs[i], launch->outputs[i]);
      }
    }
  });
}

}  // namespace

const rm_kernels* kernel_rows() {
  static const rm_kernel row = [] {
    rm_kernel r{};
    r.struct_size = sizeof r;
    r.op = plugin::str("aten.*");
    r.name = plugin::str("aten_libtorch");
    // The sources of the row; the version of libtorch goes into the device's fingerprint.
    r.digest = plugin::str("aten_libtorch/1");
    r.traits = RM_KERNEL_FALLBACK | RM_KERNEL_BRIDGE;
    r.num_configs = 1;
    r.supports = &supports;
    r.cost_ns = &cost_ns;
    r.prepare = &prepare;
    r.release = &release;
    r.launch = &launch;
    return r;
  }();
  static const rm_kernels rows = {sizeof(rm_kernels), &row, 1, sizeof(rm_kernel)};
  return &rows;
}

}  // namespace rm::torch_bridge
