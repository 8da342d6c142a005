// The table's functions report through return codes; each is turned into rm::Error or a Python one.
#include "exchange/tensor_exchange.hpp"

#include "base/error.hpp"

namespace rm::exchange {

namespace py = pybind11;

const DLPackExchangeAPI* exchange_api(py::handle tensor_type) {
  if (py::hasattr(tensor_type, "__dlpack_c_exchange_api__")) {
    py::object capsule = tensor_type.attr("__dlpack_c_exchange_api__");
    auto* header = static_cast<DLPackExchangeAPIHeader*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (header == nullptr) throw py::error_already_set();
    for (; header != nullptr; header = header->prev_api) {
      if (header->version.major != DLPACK_MAJOR_VERSION) continue;
      auto* api = reinterpret_cast<const DLPackExchangeAPI*>(header);
      if (api->dltensor_from_py_object_no_sync != nullptr) return api;
    }
  }
  throw Error(RM_FAILED_PRECONDITION,
              "[tensor] expected a tensor type with the DLPack 1.x C exchange table, got none; try "
              "torch >= 2.10");
}

namespace {

bool same(DLDevice a, DLDevice b) {
  return a.device_type == b.device_type && a.device_id == b.device_id;
}

std::string text(DLDevice device) {
  const std::string name = device.device_type == kDLCPU    ? "the CPU"
                           : device.device_type == kDLCUDA ? "cuda:" + std::to_string(device.device_id)
                                                           : "";
  return !name.empty() ? name : "device type " + std::to_string(device.device_type);
}

engine::TensorView viewed(const DLPackExchangeAPI* api, PyObject* tensor, const char* what,
                          DLDevice device, bool or_host) {
  DLTensor dl{};
  if (api->dltensor_from_py_object_no_sync(tensor, &dl) != 0) {
    PyErr_Clear();
    throw_invalid(std::string("[tensor] expected a dense tensor for ") + what + ", got another kind");
  }
  engine::TensorView out;
  const bool placed = same(dl.device, device) || (or_host && dl.device.device_type == kDLCPU);
  if (!placed || !ir::from_dlpack(dl.dtype, &out.layout.dtype)) {
    throw_invalid("[tensor] expected a tensor of a supported dtype on " + text(device) + " for " +
                  what + ", got " + text(dl.device) + ", dtype code " +
                  std::to_string(dl.dtype.code) + "/" + std::to_string(dl.dtype.bits));
  }
  out.device = dl.device;
  out.data = static_cast<const char*>(dl.data) + dl.byte_offset;
  out.layout.dims.assign(dl.shape, dl.shape + dl.ndim);
  if (dl.strides != nullptr) {
    out.layout.strides.assign(dl.strides, dl.strides + dl.ndim);
  } else {
    out.layout.strides = ir::contiguous_strides(out.layout.dims);
  }
  if (out.layout.is_contiguous()) out.layout.strides = ir::contiguous_strides(out.layout.dims);
  if (dl.data == nullptr && !out.layout.is_empty()) {
    throw_invalid(std::string("[tensor] expected a tensor with memory for ") + what +
                  ", got one whose storage was freed");
  }
  return out;
}

}  // namespace

engine::TensorView view_of(const DLPackExchangeAPI* api, PyObject* tensor, const char* what,
                           DLDevice device) {
  return viewed(api, tensor, what, device, false);
}

void* current_stream(const DLPackExchangeAPI* api, DLDevice device) {
  if (device.device_type == kDLCPU) return nullptr;
  void* stream = nullptr;
  if (api->current_work_stream == nullptr ||
      api->current_work_stream(device.device_type, device.device_id, &stream) != 0) {
    PyErr_Clear();
    throw Error(RM_FAILED_PRECONDITION, "[tensor] expected the framework's current stream of " +
                                            text(device) + ", got none");
  }
  return stream;
}

engine::OwnedTensor own(const DLPackExchangeAPI* api, PyObject* tensor, const char* what,
                        DLDevice device) {
  engine::TensorView view = viewed(api, tensor, what, device, true);
  // A tensor of our own over the same storage: the caller's object may be given another one.
  const py::object alias = py::handle(tensor).attr("detach")();
  DLManagedTensorVersioned* managed = nullptr;
  if (api->managed_tensor_from_py_object_no_sync(alias.ptr(), &managed) != 0) {
    throw py::error_already_set();
  }
  std::shared_ptr<const void> owner(managed, [](DLManagedTensorVersioned* t) {
    if (t->deleter != nullptr) t->deleter(t);
  });
  return {std::move(view), std::move(owner)};
}

namespace {

/// A tensor of the framework's, seen through a layout of our own.
struct Relaid {
  DLManagedTensorVersioned outer{};
  DLManagedTensorVersioned* inner;
  ir::Ints shape, strides;

  Relaid(DLManagedTensorVersioned* tensor, const ir::Layout& layout)
      : outer(*tensor), inner(tensor), shape(layout.dims), strides(layout.strides) {
    outer.manager_ctx = this;
    outer.dl_tensor.shape = shape.data();
    outer.dl_tensor.strides = strides.data();
    outer.deleter = [](DLManagedTensorVersioned* self) {
      auto* mine = static_cast<Relaid*>(self->manager_ctx);
      if (mine->inner->deleter != nullptr) mine->inner->deleter(mine->inner);
      delete mine;
    };
  }
};

}  // namespace

FrameworkOutputs::~FrameworkOutputs() {
  for (auto* t : tensors_) {
    if (t != nullptr && t->deleter != nullptr) t->deleter(t);
  }
}

void* FrameworkOutputs::allocate(size_t index, const ir::Layout& layout) {
  DLTensor prototype{};
  prototype.device = device_;
  prototype.ndim = static_cast<int32_t>(layout.dims.size());
  prototype.dtype = ir::to_dlpack(layout.dtype);
  ir::Ints held = layout.dims;  // an axis of stride 0 needs memory for one element
  bool repeats = false;
  for (size_t i = 0; i < held.size(); ++i) {
    if (layout.strides[i] != 0 || held[i] <= 1) continue;
    held[i] = 1;
    repeats = true;
  }
  prototype.shape = held.data();
  std::string message;
  auto set_error = [](void* context, const char* kind, const char* text) {
    *static_cast<std::string*>(context) = std::string(kind) + ": " + text;
  };
  DLManagedTensorVersioned* tensor = nullptr;
  if (api_->managed_tensor_allocator(&prototype, &tensor, &message, set_error) != 0) {
    throw Error(RM_RESOURCE_EXHAUSTED,
                "[output] expected memory for output " + std::to_string(index) + ", got " + message,
                "RM305");
  }
  tensors_.push_back(repeats ? &(new Relaid(tensor, layout))->outer : tensor);
  return static_cast<char*>(tensor->dl_tensor.data) + tensor->dl_tensor.byte_offset;
}

void FrameworkOutputs::reuse(size_t /*index*/, size_t /*input*/) { tensors_.push_back(nullptr); }

py::list FrameworkOutputs::take() {
  py::list out(tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i] == nullptr) {
      out[i] = py::none();
      continue;
    }
    void* object = nullptr;
    if (api_->managed_tensor_to_py_object_no_sync(tensors_[i], &object) != 0) {
      throw py::error_already_set();
    }
    tensors_[i] = nullptr;
    PyList_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(i), static_cast<PyObject*>(object));
  }
  return out;
}

}  // namespace rm::exchange
