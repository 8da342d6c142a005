// Programs of a plugin run by the core's own compiler with the CPU backend's kernels.
//
// Invariant: no exception crosses to the plugin; every entry returns a status of the host.
#include "rm/host_executor.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "backend/registry.hpp"
#include "backend/status.hpp"
#include "base/error.hpp"
#include "base/options.hpp"
#include "engine/host_executor.hpp"
#include "engine/program.hpp"
#include "ir/text.hpp"
#include "ops/registry.hpp"
#include "selfcheck/self_check.hpp"
#include "passes/pass.hpp"

struct rm_host_program {
  std::unique_ptr<rm::engine::Program> program;
};

namespace rm::engine {
namespace {

engine::TensorView view_of(const rm_tensor& tensor) {
  engine::TensorView out;
  if (!ir::from_dlpack(tensor.dtype, &out.layout.dtype) || tensor.ndim < 0) {
    throw_invalid("[host_executor] expected an element type of the IR, got another");
  }
  out.layout.dims.assign(tensor.shape, tensor.shape + tensor.ndim);
  out.layout.strides = ir::contiguous_strides(out.layout.dims);
  out.data = static_cast<const char*>(tensor.data) + tensor.byte_offset;
  return out;
}

/// Gives the program the plugin's own output tensors. One that lies where an input lies (the new
/// value of a donated input) is written after the run, unless the program updates it in place.
class GivenOutputs final : public engine::OutputAllocator {
 public:
  GivenOutputs(rm_tensor* const* tensors, size_t count, const std::vector<engine::TensorView>& in)
      : tensors_(tensors), count_(count), inputs_(in) {}
  void* allocate(size_t index, const ir::Layout& layout) override {
    const engine::TensorView own = given(index);
    if (own.layout != layout) {
      throw_invalid("[host_executor] expected outputs of the program's shapes, got others");
    }
    void* const data = const_cast<void*>(own.data);
    const auto is_same = [&](const engine::TensorView& input) { return input.data == data; };
    if (std::none_of(inputs_.begin(), inputs_.end(), is_same)) return data;
    later_.push_back({data, std::make_unique<char[]>(bytes_of(layout)), bytes_of(layout)});
    return later_.back().value.get();
  }
  void reuse(size_t index, size_t input) override {
    const engine::TensorView own = given(index);
    if (own.layout != inputs_[input].layout) {
      throw_invalid("[host_executor] expected a donated input's type for its new value");
    }
    if (own.data == inputs_[input].data) return;
    moved_.push_back({const_cast<void*>(own.data), inputs_[input].data, bytes_of(own.layout)});
  }
  /// After the run: what could not be written at once.
  void finish() {
    for (const Later& one : later_) std::memcpy(one.to, one.value.get(), one.bytes);
    for (const Moved& one : moved_) std::memcpy(one.to, one.from, one.bytes);
  }

 private:
  struct Later {
    void* to;
    std::unique_ptr<char[]> value;
    size_t bytes;
  };
  struct Moved {
    void* to;
    const void* from;
    size_t bytes;
  };
  static size_t bytes_of(const ir::Layout& layout) {
    return static_cast<size_t>(layout.num_bytes());
  }
  engine::TensorView given(size_t index) const {
    if (index >= count_) throw_invalid("[host_executor] expected a tensor for every output");
    return view_of(*tensors_[index]);
  }

  rm_tensor* const* tensors_;
  size_t count_;
  const std::vector<engine::TensorView>& inputs_;
  std::vector<Later> later_;
  std::vector<Moved> moved_;
};

template <class Body>
rm_status* guard(Body&& body) noexcept {
  const auto failed = [](rm_code code, std::string_view message) {
    return backend::host_api()->status_create(code, backend::to_rm_str(message), nullptr, 0);
  };
  try {
    body();
    return nullptr;
  } catch (const Error& error) {
    return failed(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    return failed(RM_RESOURCE_EXHAUSTED, "[host_executor] expected free memory, got none");
  } catch (const std::exception& error) {
    return failed(RM_INTERNAL, error.what());
  } catch (...) {
    return failed(RM_UNKNOWN, "[host_executor] expected std::exception, got another exception");
  }
}

// One judge for all programs of the process: workers live long, and have no cache folder.
std::shared_ptr<const select::KernelTable> cpu_kernels(const Options& options) {
  static const auto judge = std::make_shared<selfcheck::SelfCheck>(
      selfcheck::Settings{selfcheck::mode_from(options.text("self_check"))});
  Backend* cpu = backend::registry().find("cpu");
  std::string why;
  if (cpu == nullptr || !cpu->is_available(&why)) {
    throw Error(RM_UNAVAILABLE, "[host_executor] expected the cpu backend, got none " + why);
  }
  auto table = std::make_shared<select::KernelTable>(judge);
  for (const rm_kernel& kernel : cpu->kernels())
    table->add("cpu", &kernel, &cpu->get_device_info(0));
  return table;
}

// The plugin keeps its constants valid until it destroys the program (rm/host_executor.h).
std::map<std::string, engine::OwnedTensor> tensors_of(rm_constants constants) {
  std::map<std::string, engine::OwnedTensor> views;
  for (size_t i = 0; i < constants.size; ++i) {
    const auto* row = reinterpret_cast<const rm_constant*>(
        reinterpret_cast<const std::byte*>(constants.data) + i * constants.stride);
    if (row->tensor == nullptr || row->tensor->data == nullptr) continue;
    views[std::string(backend::view(row->name))] = {view_of(*row->tensor), nullptr};
  }
  return views;
}

Options options_of(rm_options options) {
  std::map<std::string, std::string> given;
  for (size_t i = 0; i < options.size; ++i) {
    given[std::string(backend::view(options.data[i].key))] = backend::view(options.data[i].value);
  }
  return Options::resolve({given.begin(), given.end()});
}

rm_status* prepare(const rm_program* program, rm_constants constants, rm_options options,
                   rm_host_program** out) {
  return guard([&] {
    if (backend::view(program->format) != "rm.ir/1") {
      throw_invalid("[host_executor] expected a program in rm.ir/1");
    }
    const auto* code = static_cast<const char*>(program->code.data);
    ir::Graph graph = ir::parse({code, program->code.size});
    ops::infer_and_check(graph);
    const Options given = options_of(options);
    passes::PassContext context = passes::context_from(given);
    context.weight_bits = 0;  // a device's gate compares with the weights as they are
    passes::run_pipeline(graph, passes::inference_pipeline(), context);
    auto made = std::make_unique<rm_host_program>();
    for (const ir::ValueId id : graph.outputs) {
      if (!graph.type(id).is_static()) throw_invalid("[host_executor] expected static shapes");
    }
    auto views = tensors_of(constants);
    std::erase_if(views, [&](const auto& view) {
      for (const ir::ValueId id : graph.weights()) {
        if (graph.value(id).name == view.first) return false;
      }
      return true;  // the plugin's program may use fewer than it was given
    });
    made->program = std::make_unique<engine::Program>(std::move(graph), cpu_kernels(given));
    made->program->set_weights(views);
    *out = made.release();
  });
}

rm_status* run(const rm_host_program* program, const rm_tensor* const* inputs, size_t num_inputs,
               rm_tensor* const* outputs, size_t num_outputs) {
  return guard([&] {
    std::vector<engine::TensorView> views;
    for (size_t i = 0; i < num_inputs; ++i) views.push_back(view_of(*inputs[i]));
    GivenOutputs given(outputs, num_outputs, views);
    program->program->run(views, given);
    given.finish();
  });
}

void destroy(rm_host_program* program) { delete program; }

}  // namespace

void offer_host_executor() {
  static const rm_host_executor table = {sizeof(rm_host_executor), &prepare, &run, &destroy};
  backend::offer_host_extension(RM_HOST_EXECUTOR_EXTENSION, &table);
}

}  // namespace rm::engine
