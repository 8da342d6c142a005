// BackendService over rm::Backend.
#include "device/worker_service.hpp"

#include <unistd.h>

#include "backend/status.hpp"
#include "base/error.hpp"
#include "device/worker_states.hpp"

namespace rm::device {
namespace {

/// DLPack views of mapped tensors; addresses are stable while the object lives.
class Views {
 public:
  explicit Views(const worker::MappedTensors& tensors) : tensors_(tensors.size()) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      DLTensor& tensor = tensors_[i];
      const worker::TensorSlot& slot = *tensors[i].slot;
      tensor.data = tensors[i].data;
      tensor.device = {kDLCPU, 0};
      tensor.ndim = static_cast<int32_t>(slot.dims.size());
      tensor.dtype = slot.dtype;
      tensor.shape = const_cast<int64_t*>(slot.dims.data());
      pointers_.push_back(&tensor);
    }
  }
  Views(const Views&) = delete;
  Views& operator=(const Views&) = delete;
  DLTensor* const* data() const { return pointers_.data(); }
  size_t size() const { return pointers_.size(); }

 private:
  std::vector<DLTensor> tensors_;
  std::vector<DLTensor*> pointers_;
};

std::vector<rm_constant> constants_of(const worker::MappedTensors& tensors, const Views& views) {
  std::vector<rm_constant> out;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const worker::TensorSlot& slot = *tensors[i].slot;
    out.push_back({sizeof(rm_constant),
                   {slot.name.data(), slot.name.size()},
                   {slot.digest.data(), slot.digest.size()},
                   views.data()[i]});
  }
  return out;
}

/// Runs `body`; an error without a reason of its own gets the one its code means here.
template <class Body>
auto with_reason(const std::string& otherwise, Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    if (!error.reason().empty()) throw;
    throw Error(error.code(), error.what(), reason_of(error.code(), otherwise));
  }
}

class LoadedExecutable final : public worker::Runnable {
 public:
  LoadedExecutable(Backend& backend, const worker::LoadJob& job)
      : backend_(backend),
        weights_(job.constants),
        inputs_(job.inputs),
        outputs_(job.outputs),
        constants_(constants_of(job.constants, weights_)),
        states_(job.states),
        executable_(backend.deserialize(job.device, job.artefact, constants_)) {
    args_.struct_size = sizeof args_;
    args_.inputs = inputs_.data();
    args_.num_inputs = inputs_.size();
    args_.outputs = outputs_.data();
    args_.num_outputs = outputs_.size();
  }
  void run(worker::States* states) override {
    with_reason(kExecuting, [&] {
      std::vector<rm_state_handle> handles;
      if (!states_.empty()) {
        if (states == nullptr) throw_invalid("[execute] expected states, got none");
        handles = static_cast<BackendStates*>(states)->handles(states_);
      }
      rm_execute_args args = args_;
      args.states = handles.data();
      args.num_states = handles.size();
      backend_.execute(*executable_, args);
    });
  }

 private:
  Backend& backend_;
  const Views weights_, inputs_, outputs_;
  const std::vector<rm_constant> constants_;
  const worker::Slots states_;
  const std::unique_ptr<backend::Executable> executable_;
  rm_execute_args args_{};
};

/// What the device's compiler takes, by its property `program_format`.
std::string program_format(Backend& backend, size_t device) {
  const rm_options& properties = backend.get_device_info(device).properties;
  for (size_t i = 0; i < properties.size; ++i) {
    if (backend::view(properties.data[i].key) == "program_format") {
      return std::string(backend::view(properties.data[i].value));
    }
  }
  return "rm.ir/1";
}

}  // namespace

std::string reason_of(rm_code code, const std::string& otherwise) {
  switch (code) {
    case RM_UNIMPLEMENTED:
      return "RM304";
    case RM_RESOURCE_EXHAUSTED:
      return "RM305";
    case RM_CANCELLED:
    case RM_DEADLINE_EXCEEDED:
      return otherwise == kExecuting ? "RM308" : "RM302";
    case RM_FAILED_PRECONDITION:
      return "RM403";
    case RM_DATA_LOSS:
      return "RM602";
    case RM_UNAVAILABLE:
      return "RM407";
    default:
      return otherwise;
  }
}

worker::Ready BackendService::describe() {
  return {static_cast<uint64_t>(getpid()), backend_.name(), backend_.version(), backend_.build_id(),
          backend_.fingerprint(0)};
}

worker::Bytes BackendService::compile(const worker::CompileJob& job) {
  return with_reason(kCompiling, [&] {
    const Views views(job.constants);
    const auto constants = constants_of(job.constants, views);
    const std::string format = program_format(backend_, job.device);
    const rm_program program{sizeof(rm_program),
                             backend::to_rm_str(format),
                             {job.program.data(), job.program.size()}};
    const backend::CompileOptions options{job.options, job.progress, job.cancelled, constants};
    return backend_.serialize(*backend_.prepare_model(job.device, program, options));
  });
}

std::unique_ptr<worker::Runnable> BackendService::load(const worker::LoadJob& job) {
  return with_reason(kExecuting, [&]() -> std::unique_ptr<worker::Runnable> {
    if (backend_.check_compat(job.device, job.artefact) == RM_COMPAT_NO) {
      throw Error(RM_FAILED_PRECONDITION,
                  "[load] expected an artefact of this device and compiler, got another's; it is "
                  "compiled again",
                  "RM403");
    }
    return std::make_unique<LoadedExecutable>(backend_, job);
  });
}

std::unique_ptr<worker::States> BackendService::make_states(uint64_t device,
                                                            const worker::Slots& slots) {
  return with_reason(kExecuting, [&]() -> std::unique_ptr<worker::States> {
    return std::make_unique<BackendStates>(backend_, device, slots);
  });
}

void BackendService::copy_states(const worker::CopyJob& job) {
  with_reason(kExecuting, [&] { device::copy_states(job); });
}

}  // namespace rm::device
