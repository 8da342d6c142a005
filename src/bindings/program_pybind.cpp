// _core.Program: a compiled program over torch tensors. run() releases the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <mutex>

#include "backend/registry.hpp"
#include "base/error.hpp"
#include "base/options.hpp"
#include "bindings/bind.hpp"
#include "exchange/all_reduce.hpp"
#include "exchange/framework_program.hpp"
#include "exchange/tensor_exchange.hpp"
#include "generation/draft_check.hpp"
#include "generation/greedy_loop.hpp"
#include "engine/program.hpp"
#include "ir/text.hpp"
#include "ops/registry.hpp"
#include "runtime/device.hpp"
#include "selfcheck/self_check.hpp"

namespace rm::bindings {
namespace {

namespace py = pybind11;

Backend& usable(const std::string& name) {
  Backend* backend = backend::registry().find(name);
  std::string why;
  if (backend == nullptr || !backend->is_available(&why)) {
    throw Error(RM_UNAVAILABLE, "[program] expected backend '" + name + "' to be usable, got " +
                                    (backend == nullptr ? "none of that name" : why), "RM402");
  }
  return *backend;
}

// The kernel rows of every usable backend, in the order given; made anew for each program, so a
// backend loaded later serves later programs. With processes: of sums over them as well.
std::shared_ptr<select::KernelTable> kernel_table(const std::vector<std::string>& backends,
                                                  size_t device,
                                                  std::shared_ptr<select::RowJudge> judge,
                                                  bool with_processes) {
  auto table = std::make_shared<select::KernelTable>(std::move(judge));
  for (const auto& name : backends) {
    Backend& backend = usable(name);
    const rm_device_info& info = backend.get_device_info(name == backends.front() ? device : 0);
    for (const rm_kernel& kernel : backend.kernels()) table->add(name, &kernel, &info);
    if (!with_processes || name != backends.front()) continue;
    for (const rm_kernel& kernel : exchange::all_reduce_rows()) table->add("torch", &kernel, &info);
  }
  return table;
}

// The device of the first backend, one object a device and process: programs share its streams.
runtime::DevicePtr device_of(const std::vector<std::string>& backends, size_t index) {
  if (backends.empty()) return runtime::host();
  Backend& backend = usable(backends.front());
  if (backend.get_device_info(index).dl_device_type == kDLCPU) return runtime::host();
  static std::mutex mutex;
  static auto& made = *new std::map<std::pair<Backend*, size_t>, runtime::DevicePtr>();
  std::lock_guard lock(mutex);
  runtime::DevicePtr& device = made[{&backend, index}];
  if (device == nullptr) device = std::make_shared<runtime::BackendDevice>(backend, index);
  return device;
}

class PyProgram;

// The drafts of one generation; keeps programs and tensors of its checks alive.
struct PyDrafting {
  PyDrafting(std::shared_ptr<generation::DraftPolicy> policy_of_model, std::vector<int64_t> text,
             double margin, double making_ns, bool may_want)
      : policy(std::move(policy_of_model)),
        drafting{policy.get(), std::move(text), {}, margin, making_ns, may_want} {}
  void add(PyProgram& program, const py::sequence& inputs, const py::dict& roles, size_t width);

  std::shared_ptr<generation::DraftPolicy> policy;
  generation::Drafting drafting;
  py::list kept;
};

class PyProgram : public exchange::FrameworkProgram {
 public:
  PyProgram(const std::string& text, const py::dict& weights,
            const std::vector<std::string>& backends, const std::string& force_kernel,
            const std::string& packing, std::shared_ptr<runtime::SharedConstants> shared,
            std::vector<std::vector<int64_t>> repeated,
            std::shared_ptr<selfcheck::SelfCheck> checks, size_t device, bool recorded,
            std::shared_ptr<runtime::Arenas> arenas)
      : FrameworkProgram(exchange::exchange_api(py::module_::import("torch").attr("Tensor")),
                         checked(text),
                         kernel_table(backends, device, std::move(checks),
                                      text.find("all_reduce_start") != std::string::npos),
                         force_kernel, packing_of(packing), device_of(backends, device)) {
    program_.repeat_outputs(std::move(repeated));
    if (!recorded) program_.never_record();
    if (arenas != nullptr) program_.share_arenas(std::move(arenas));
    update_weights(weights, std::move(shared));
  }

  void update_weights(const py::dict& weights, std::shared_ptr<runtime::SharedConstants> shared) {
    std::map<std::string, engine::OwnedTensor> tensors;
    for (auto [name, tensor] : weights) {
      auto key = name.cast<std::string>();
      tensors[key] = exchange::own(api_, tensor.ptr(), key.c_str(), device_);
    }
    py::gil_scoped_release release;
    program_.set_weights(tensors, std::move(shared));
  }

  py::list run_on(const py::sequence& inputs, bool only_accepted) {
    return run(views_of(inputs), only_accepted);
  }

  py::tuple launch_into(const py::sequence& inputs) {
    std::vector<engine::TensorView> views = views_of(inputs);
    void* stream = exchange::current_stream(api_, device_);
    exchange::FrameworkOutputs outputs(api_, device_);
    std::shared_ptr<void> kept;
    {
      py::gil_scoped_release release;
      kept = program_.launch_into(views, outputs, stream);
    }
    auto owner = std::make_unique<std::shared_ptr<void>>(std::move(kept));
    py::capsule capsule(owner.get(), [](void* p) { delete static_cast<std::shared_ptr<void>*>(p); });
    owner.release();
    return py::make_tuple(outputs.take(), capsule);
  }

  std::vector<size_t> updated_inputs() const {
    const ir::Graph& graph = program_.graph();
    std::vector<size_t> found;
    for (size_t i = 0; i < graph.inputs().size(); ++i) {
      if (graph.value(graph.inputs()[i]).donated) found.push_back(i);
    }
    return found;
  }

  void accept_kernels(uint64_t set) { program_.accept_kernels(set); }

  uint64_t kernel_set(const py::sequence& inputs) {
    std::vector<engine::TensorView> views = views_of(inputs);
    void* stream = exchange::current_stream(api_, device_);
    py::gil_scoped_release release;
    return program_.kernel_set(views, stream);
  }

  // (the results of one step for `tokens`, as `run` gives them; the largest logit of every row). The
  // role tensors are written.
  py::tuple decode_step(const py::sequence& inputs, const py::dict& roles,
                       const std::vector<int64_t>& tokens) {
    std::vector<engine::TensorView> views = views_of(inputs);
    generation::GreedyRoles r = roles_of(roles);
    exchange::FrameworkOutputs outputs(api_);
    std::vector<int64_t> largest;
    {
      py::gil_scoped_release release;
      largest = generation::decode_step(program_, views, r, tokens, outputs);
    }
    return py::make_tuple(outputs.take(), largest);
  }

  // (tokens made, [count][rows]; rows finished; interrupted). The role tensors are written.
  py::tuple decode_greedy(const py::sequence& inputs, const py::dict& roles, int64_t steps,
                          int64_t capacity, const std::vector<std::vector<int64_t>>& eos,
                          int64_t pad, std::vector<bool> finished, bool until_one_ends,
                          const py::object& stop, PyDrafting* drafting, const py::object& on_tokens) {
    std::vector<engine::TensorView> views = views_of(inputs);
    generation::GreedyRoles r = roles_of(roles);
    std::vector<char> ended(finished.begin(), finished.end());
    generation::GreedyResult result;
    generation::GreedyHooks hooks;
    hooks.drafting = drafting == nullptr ? nullptr : &drafting->drafting;
    if (!on_tokens.is_none()) {
      hooks.on_tokens = [&](const std::vector<int64_t>& tokens) {
        py::gil_scoped_acquire acquire;
        return on_tokens(tokens).cast<int64_t>();
      };
    }
    hooks.poll = [&] {
      py::gil_scoped_acquire acquire;
      if (PyErr_CheckSignals() != 0) return generation::Poll::kInterrupt;
      bool stopped = !stop.is_none() && py::cast<bool>(stop());
      return stopped ? generation::Poll::kStop : generation::Poll::kContinue;
    };
    {
      py::gil_scoped_release release;
      generation::GreedyLimits limits{steps, capacity, eos, pad, until_one_ends};
      result = generation::decode_greedy(program_, views, r, limits, ended, hooks);
    }
    if (result.interrupted) throw py::error_already_set();
    return py::make_tuple(result.tokens, std::vector<bool>(ended.begin(), ended.end()),
                          result.wants_checks);
  }

  // A check of drafts by this program, with the tensors it reads.
  generation::Check check(const py::sequence& inputs, const py::dict& roles, size_t width) {
    return {&program_, views_of(inputs), roles_of(roles), width};
  }

  void wait_for_packing() {
    py::gil_scoped_release release;
    program_.wait_for_packing();
  }

  int64_t release_arenas() {
    py::gil_scoped_release release;
    return program_.release_arenas();
  }

  py::dict report() const {
    engine::ProgramReport r;
    {
      py::gil_scoped_release release;
      r = program_.report();
    }
    py::dict out;
    out["nodes"] = r.nodes;
    out["native_nodes"] = r.native_nodes;
    out["flops"] = r.flops;
    out["native_flops"] = r.native_flops;
    out["kernels"] = r.kernels;
    out["instances"] = r.instances;
    out["arena_bytes"] = r.arena_bytes;
    out["arena_lower_bound_bytes"] = r.arena_lower_bound_bytes;
    out["packed_bytes"] = r.packed_bytes;
    out["derived_bytes"] = r.derived_bytes;
    out["free_arena_bytes"] = r.free_arena_bytes;
    out["recordings"] = r.recordings;
    out["instantiate_ms"] = r.last_instantiate_ms;
    return out;
  }

  std::vector<std::pair<std::string, double>> profile(const py::sequence& inputs, int rounds) {
    if (rounds < 1) throw_invalid("[profile] expected at least one round, got " + std::to_string(rounds));
    std::vector<engine::TensorView> views = views_of(inputs);
    void* stream = exchange::current_stream(api_, device_);
    py::gil_scoped_release release;
    return program_.profile(views, rounds, stream);
  }

  void start_trace() {
    py::gil_scoped_release release;
    program_.start_trace();
  }

  // (plans as lists of their steps, runs as (plan, start ns, thread, ns by step), runs left out).
  py::tuple take_trace() {
    engine::StepTrace trace;
    {
      py::gil_scoped_release release;
      trace = program_.take_trace();
    }
    std::map<const plan::Plan*, size_t> numbers;
    py::list plans, runs;
    for (const engine::TracedRun& run : trace.take_runs()) {
      const auto [at, fresh] = numbers.try_emplace(run.plan.get(), numbers.size());
      if (fresh) plans.append(py::cast(engine::Program::steps_of(*run.plan)));
      runs.append(py::make_tuple(at->second, run.start_ns, run.thread, run.step_ns));
    }
    return py::make_tuple(plans, runs, trace.dropped());
  }

  std::string describe(const py::sequence& inputs) {
    std::vector<ir::Layout> layouts;
    for (const auto& t : inputs) layouts.push_back(view(t.ptr()).layout);
    py::gil_scoped_release release;
    return program_.describe(layouts);
  }

 private:
  std::vector<engine::TensorView> views_of(const py::sequence& inputs) const {
    std::vector<engine::TensorView> views;
    views.reserve(inputs.size());
    for (const auto& t : inputs) views.push_back(view(t.ptr()));
    return views;
  }
  static generation::GreedyRoles roles_of(const py::dict& roles) {
    auto role = [&](const char* name) {
      return roles.contains(name) ? roles[name].cast<int>() : -1;
    };
    return {role("ids"), role("positions"), role("length"), role("mask"), role("logits")};
  }
  static engine::Packing packing_of(const std::string& name) {
    if (name == "never") return engine::Packing::kNever;
    if (name == "first") return engine::Packing::kFirst;
    if (name == "later") return engine::Packing::kLater;
    if (name == "spare") return engine::Packing::kSpare;
    throw_invalid("[program] expected packing never, first, later or spare, got '" + name + "'");
  }
  static ir::Graph checked(const std::string& text) {
    ir::Graph graph = ir::parse(text);
    ops::infer_and_check(graph);
    return graph;
  }
};

void PyDrafting::add(PyProgram& program, const py::sequence& inputs, const py::dict& roles,
                     size_t width) {
  drafting.checks.push_back(program.check(inputs, roles, width));
  kept.append(py::cast(&program, py::return_value_policy::reference));
  kept.append(inputs);
}

void bind_drafts(py::module_& m) {
  using generation::DraftPolicy;
  py::class_<DraftPolicy, std::shared_ptr<DraftPolicy>>(
      m, "DraftPolicy", "What is known about drafts on one model. Any thread may use it.")
      .def(py::init<bool>(), py::arg("always") = false)
      .def(
          "counts",
          [](const DraftPolicy& policy) {
            DraftPolicy::Counts c = policy.counts();
            py::dict out;
            out["checks"] = c.checks;
            out["drafted"] = c.drafted;
            out["accepted"] = c.accepted;
            out["step_us"] = c.step_ns / 1e3;
            out["check_us"] = c.check_ns / 1e3;
            return out;
          },
          "checks run, tokens drafted for them, of which accepted; microseconds of a plain step and "
          "of the last check.");
  py::class_<PyDrafting>(m, "Drafting", "The drafts of one generation of one row.")
      .def(py::init<std::shared_ptr<DraftPolicy>, std::vector<int64_t>, double, double, bool>(),
           py::arg("policy"), py::arg("text"), py::arg("margin"), py::arg("making_ns"),
           py::arg("may_want"),
           "`text`: the tokens so far. `margin`: a smaller lead of the best logit, as a part of the "
           "largest, counts as a tie. `may_want`: the loop may end to have checks made, when they "
           "would have saved the `making_ns` that takes.")
      .def("add", &PyDrafting::add, py::arg("program"), py::arg("inputs"), py::arg("roles"),
           py::arg("width"), "A program over `width` tokens that gives the logits of each.");
}

}  // namespace

// _core.NewKernels(set): raised by Program.run before anything is executed.
void bind_new_kernels(py::module_& m) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> kind;
  kind.call_once_and_store_result([&]() -> py::object {
    return py::exception<engine::NewKernels>(m, "NewKernels", PyExc_RuntimeError);
  });
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const engine::NewKernels& found) {
      PyErr_SetObject(kind.get_stored().ptr(), py::int_(found.set).ptr());
    }
  });
}

void bind_program(py::module_& m) {
  bind_new_kernels(m);
  bind_drafts(m);
  py::module_::import("atexit").attr("register")(
      py::cpp_function([] {
        py::gil_scoped_release release;  // a job that ends may need it to let go of tensors
        engine::Background::stop_all();
      }));
  py::class_<runtime::SharedConstants, std::shared_ptr<runtime::SharedConstants>>(
      m, "SharedConstants",
      "What derives from weights, held once for all programs that are given it and the same weights.")
      .def(py::init<>())
      .def("bytes", &runtime::SharedConstants::bytes, "Memory of all that programs still use.");
  m.def("add_group", &exchange::add_group, py::arg("average"),
        "The number by which nodes all_reduce_start and all_reduce_wait name this object, which sums "
        "over a group of processes: start(bucket, tensors), wait(bucket, tensors).");
  py::class_<runtime::Arenas, std::shared_ptr<runtime::Arenas>>(
      m, "Arenas", "Memory for the temporaries of all programs of one device that are given it.")
      .def(py::init<>())
      .def("free_bytes", &runtime::Arenas::free_bytes, "What no run uses.");
  py::class_<exchange::FrameworkProgram, std::shared_ptr<exchange::FrameworkProgram>>(
      m, "FrameworkProgram", "What the router needs of a program.");
  py::class_<PyProgram, exchange::FrameworkProgram, std::shared_ptr<PyProgram>>(
      m, "Program", "A compiled program: run(inputs) binds concrete shapes and executes.")
      .def(py::init<const std::string&, const py::dict&, const std::vector<std::string>&,
                    const std::string&, const std::string&,
                    std::shared_ptr<runtime::SharedConstants>, std::vector<std::vector<int64_t>>,
                    std::shared_ptr<selfcheck::SelfCheck>, size_t, bool,
                    std::shared_ptr<runtime::Arenas>>(),
           py::arg("text"), py::arg("weights"), py::arg("backends"), py::arg("force_kernel") = "",
           py::arg("packing") = "first", py::arg("shared") = nullptr,
           py::arg("repeated") = std::vector<std::vector<int64_t>>{}, py::arg("checks") = nullptr,
           py::arg("device") = 0, py::arg("recorded") = true,
           py::arg("arenas") = nullptr,
           "backends: the first one's device number `device` is the program's; inputs lie on it.\n"
           "checks: the judge of kernel rows; None trusts all of them.\n"
           "recorded: a device that can replays plans as one launch, from memory of their own.\n"
           "arenas: memory for temporaries of several programs that run one after the other.\n"
           "repeated: by output, the axes along which it may come with stride 0.\n"
           "packing: 'first' copies weights into the kernels' layouts before the first call, "
           "'later' behind the second call of a shape, 'spare' only those that lie as [K,N], 'never' reads them where they lie.")
      .def("decode_greedy", &PyProgram::decode_greedy, py::arg("inputs"), py::arg("roles"),
           py::arg("steps"), py::arg("capacity"), py::arg("eos"), py::arg("pad"),
           py::arg("finished"), py::arg("until_one_ends") = false, py::arg("stop") = py::none(),
           py::arg("drafting") = nullptr, py::arg("on_tokens") = py::none(),
           "Up to `steps` greedy tokens a row: ([count * rows] tokens, rows finished, ended because "
           "programs that check drafts would win). The tensors of `roles` (ids, positions, length, "
           "mask) are updated in place. `stop()` is asked now and then; true ends the loop after a "
           "whole step. `on_tokens(tokens)` gets the tokens of every run of one row; it returns -1 to go "
           "on, or how many of them it accepted to end the loop with those.")
      .def("decode_step", &PyProgram::decode_step, py::arg("inputs"), py::arg("roles"),
           py::arg("tokens"),
           "One step for `tokens`, one a row: (the program's results, the first largest logit of every "
           "row, none where logits are not dense). The tensors of `roles` are updated in place.")
      .def("wait_for_packing", &PyProgram::wait_for_packing)
      .def("run", &PyProgram::run_on, py::arg("inputs"), py::arg("only_accepted") = false,
           "The results. With `only_accepted` raises NewKernels(set), and executes nothing, when "
           "these sizes use a set of kernels that accept_kernels was not told of.")
      .def("launch_into", &PyProgram::launch_into, py::arg("inputs"),
           "For a recording of the current stream: (results, what has to be kept as long as the "
           "recording). Inputs and results are used where they lie. Raises CoreError, and launches "
           "nothing, for sizes that did not run before or cannot be recorded.")
      .def("updated_inputs", &PyProgram::updated_inputs,
           "Numbers of the inputs that a run updates in place.")
      .def("accept_kernels", &PyProgram::accept_kernels, py::arg("set"))
      .def("kernel_set", &PyProgram::kernel_set, py::arg("inputs"),
           "The digest of the set of kernels that a run with these inputs uses now.")
      .def("update_weights", &PyProgram::update_weights, py::arg("weights"),
           py::arg("shared") = nullptr)
      .def("release_arenas", &PyProgram::release_arenas,
           "Gives up scratch memory that no run uses; its bytes.")
      .def("report", &PyProgram::report)
      .def("start_trace", &PyProgram::start_trace,
           "From now on every run reads the clock around each of its steps.")
      .def("take_trace", &PyProgram::take_trace,
           "Ends it: (plans as lists of their steps, runs as (plan, start in ns of the monotonic "
           "clock, thread, ns of every step), runs that were too many to keep).")
      .def("profile", &PyProgram::profile, py::arg("inputs"), py::arg("rounds") = 10,
           "[(step, median nanoseconds)] over `rounds` runs; outputs are discarded.")
      .def("describe", &PyProgram::describe, py::arg("inputs"));
}

}  // namespace rm::bindings
