#include "exchange/all_reduce.hpp"

#include <dlpack/dlpack.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backend/status.hpp"
#include "exchange/tensor_exchange.hpp"

namespace rm::exchange {
namespace {

namespace py = pybind11;

// Weak references by number; changed and read with the GIL.
std::vector<py::object>& groups() {
  static auto& all = *new std::vector<py::object>();  // outlives the interpreter
  return all;
}

struct TypeOf {
  DLDataType dtype;
  std::vector<int64_t> shape, strides;
};

struct State {
  bool starts;
  int64_t group, bucket;
  DLDevice device;
  std::vector<TypeOf> tensors;  // operands of a start, results of a wait
};

int64_t attr(const rm_problem& problem, std::string_view name) {
  const auto* at = reinterpret_cast<const std::byte*>(problem.attrs);
  for (size_t i = 0; i < problem.num_attrs; ++i, at += problem.attr_stride) {
    const auto& found = *reinterpret_cast<const rm_attr*>(at);
    if (backend::view(found.name) == name && found.kind == RM_ATTR_INT) return found.i;
  }
  return -1;
}

TypeOf type_of(const rm_tensor& t) {
  return {t.dtype, {t.shape, t.shape + t.ndim}, {t.strides, t.strides + t.ndim}};
}

// A tensor over memory that somebody else owns.
struct Lent {
  DLManagedTensorVersioned managed{};
  TypeOf type;
};

py::object lend(const DLPackExchangeAPI* api, const TypeOf& type, DLDevice device, const void* data) {
  auto lent = std::make_unique<Lent>();
  lent->type = type;
  lent->managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  lent->managed.manager_ctx = lent.get();
  lent->managed.deleter = [](DLManagedTensorVersioned* t) { delete static_cast<Lent*>(t->manager_ctx); };
  DLTensor& t = lent->managed.dl_tensor;
  t.data = const_cast<void*>(data);
  t.device = device;
  t.ndim = static_cast<int32_t>(type.shape.size());
  t.dtype = type.dtype;
  t.shape = lent->type.shape.data();
  t.strides = lent->type.strides.data();
  void* object = nullptr;
  if (api->managed_tensor_to_py_object_no_sync(&lent.release()->managed, &object) != 0) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

void call(const State& state, const rm_launch& l) {
  const auto number = static_cast<size_t>(state.group);
  const py::object average = number < groups().size() ? groups()[number]() : py::none();
  if (average.is_none()) {
    throw py::value_error("expected a group of processes that is still there, got none");
  }
  const DLPackExchangeAPI* api = exchange_api(py::module_::import("torch").attr("Tensor"));
  py::list tensors;
  for (size_t i = 0; i < state.tensors.size(); ++i) {
    const void* data = state.starts ? l.inputs[i] : l.outputs[i];
    tensors.append(lend(api, state.tensors[i], state.device, data));
  }
  average.attr(state.starts ? "start" : "wait")(state.bucket, tensors);
}

rm_status* failed(rm_code code, const std::string& message) {
  return backend::host_api()->status_create(code, backend::to_rm_str(message), "", 0);
}

int supports(const rm_problem*, const rm_device_info*, rm_str*) { return 1; }

double cost(const rm_problem*, const rm_device_info*, uint32_t) { return 0; }

template <bool kStarts>
rm_status* prepare(const rm_problem* problem, const rm_device_info* info, uint32_t,
                   rm_kernel_state** out) {
  auto state = std::make_unique<State>();
  state->starts = kStarts;
  state->group = attr(*problem, "group");
  state->bucket = attr(*problem, "bucket");
  state->device = {static_cast<DLDeviceType>(info->dl_device_type), info->dl_device_id};
  const size_t count = kStarts ? problem->num_inputs - 1 : problem->num_outputs;  // not the token
  for (size_t i = 0; i < count; ++i) {
    state->tensors.push_back(type_of(kStarts ? *problem->inputs[i] : *problem->outputs[i]));
  }
  *out = reinterpret_cast<rm_kernel_state*>(state.release());
  return nullptr;
}

void release(rm_kernel_state* state) { delete reinterpret_cast<State*>(state); }

rm_status* launch(const rm_launch* l) {
  const py::gil_scoped_acquire gil;
  try {
    call(*reinterpret_cast<const State*>(l->state), *l);
    return nullptr;
  } catch (py::error_already_set& error) {
    return failed(RM_UNAVAILABLE, error.what());
  } catch (const std::exception& error) {
    return failed(RM_INTERNAL, error.what());
  }
}

rm_kernel row(std::string_view op, std::string_view name, decltype(rm_kernel::prepare) prepares) {
  rm_kernel made{};
  made.struct_size = sizeof made;
  made.op = backend::to_rm_str(op);
  made.name = backend::to_rm_str(name);
  made.digest = backend::to_rm_str("1");
  made.traits = RM_KERNEL_BRIDGE;
  made.num_configs = 1;
  made.supports = supports;
  made.cost_ns = cost;
  made.prepare = prepares;
  made.release = release;
  made.launch = launch;
  return made;
}

}  // namespace

int64_t add_group(py::object average) {
  groups().push_back(py::weakref(average));
  return static_cast<int64_t>(groups().size()) - 1;
}

std::span<const rm_kernel> all_reduce_rows() {
  static const std::vector<rm_kernel> rows{
      row("all_reduce_start", "all_reduce_start_torch", prepare<true>),
      row("all_reduce_wait", "all_reduce_wait_torch", prepare<false>)};
  return rows;
}

}  // namespace rm::exchange
