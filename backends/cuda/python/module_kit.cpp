// The exchange table's functions report through return codes; each becomes a typed exception.
#include "module_kit.hpp"

#include <dlpack/dlpack.h>

#include "_shim/dispatch_shim.hpp"

namespace rm::ops_bindings {
namespace {

struct Exceptions {
  PyObject *invalid = nullptr, *unsupported = nullptr, *no_device = nullptr, *device = nullptr;
};
Exceptions exceptions;  // one copy a module: each operator is its own shared object

[[noreturn]] void raise_invalid(const char* op, const std::string& text) {
  PyErr_SetString(exceptions.invalid, ("[" + std::string(op) + "] " + text).c_str());
  throw py::error_already_set();
}

bool from_dlpack(DLDataType t, DType* out) {
  if (t.lanes != 1) return false;
  switch (t.code) {
    case kDLFloat:
      if (t.bits != 16 && t.bits != 32 && t.bits != 64) return false;
      *out = t.bits == 16 ? DType::f16 : t.bits == 32 ? DType::f32 : DType::f64;
      return true;
    case kDLBfloat:
      *out = DType::bf16;
      return t.bits == 16;
    case kDLInt:
      *out = t.bits == 64   ? DType::i64
             : t.bits == 32 ? DType::i32
             : t.bits == 16 ? DType::i16
                            : DType::i8;
      return t.bits == 64 || t.bits == 32 || t.bits == 16 || t.bits == 8;
    case kDLUInt:
      *out = DType::u8;
      return t.bits == 8;
    case kDLBool:
      *out = DType::boolean;
      return t.bits == 8;
    default:
      return false;
  }
}

/// Memory that the current device's kernels may read: CUDA's, and of that device.
void check_device(const char* op, const char* what, int type, int id) {
  if (type != kDLCUDA) {
    raise_invalid(op, std::string("expected ") + what + " in CUDA memory, got " +
                          (type == kDLCPU        ? "the host's"
                           : type == kDLCUDAHost ? "pinned host memory"
                                                 : "DLPack device type " + std::to_string(type)) +
                          "; try .cuda(), or the _numpy form");
  }
  int current = id;
  if (cudaGetDevice(&current) == cudaSuccess && current != id) {
    raise_invalid(op, std::string("expected ") + what + " on the current device, cuda:" +
                          std::to_string(current) + ", got cuda:" + std::to_string(id) +
                          "; try torch.cuda.device(" + std::to_string(id) + ")");
  }
}

std::string text_of_dtype(const DLDataType& t) {
  const char* kind = t.code == kDLFloat     ? "float"
                     : t.code == kDLBfloat  ? "bfloat"
                     : t.code == kDLInt     ? "int"
                     : t.code == kDLUInt    ? "uint"
                     : t.code == kDLComplex ? "complex"
                     : t.code == kDLBool    ? "bool"
                                            : nullptr;
  return (kind ? kind : "DLPack dtype " + std::to_string(t.code) + " of ") + std::to_string(t.bits);
}

Tensor from_dl(const char* op, const char* what, const DLTensor& dl) {
  Tensor t;
  check_device(op, what, dl.device.device_type, dl.device.device_id);
  if (!from_dlpack(dl.dtype, &t.dtype) || dl.ndim > cuda_ops::kMaxRank) {
    raise_invalid(op, std::string("expected ") + what +
                          " of float16, 32, 64, bfloat16, int8, 16, 32, 64, uint8 or bool and of "
                          "rank <= 8, got " +
                          text_of_dtype(dl.dtype) + " of rank " + std::to_string(dl.ndim));
  }
  t.data = static_cast<char*>(dl.data) + dl.byte_offset;
  t.rank = dl.ndim;
  std::int64_t dense = 1;
  for (int d = dl.ndim - 1; d >= 0; --d) {
    t.shape[d] = dl.shape[d];
    t.stride[d] = dl.strides ? dl.strides[d] : dense;
    dense *= dl.shape[d];
  }
  return t;
}

#if defined(DLPACK_MAJOR_VERSION) && (DLPACK_MAJOR_VERSION > 1 || DLPACK_MINOR_VERSION >= 3)
/// The producer's C table, or null; remembered for the last type seen.
const DLPackExchangeAPI* exchange_api(PyTypeObject* type) {
  static PyTypeObject* known_type = nullptr;
  static const DLPackExchangeAPI* known_api = nullptr;
  if (type == known_type) return known_api;
  const DLPackExchangeAPI* api = nullptr;
  const py::handle object(reinterpret_cast<PyObject*>(type));
  if (py::hasattr(object, "__dlpack_c_exchange_api__")) {
    const py::object capsule = object.attr("__dlpack_c_exchange_api__");
    auto* header = static_cast<DLPackExchangeAPIHeader*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (header == nullptr) PyErr_Clear();
    for (; header != nullptr && api == nullptr; header = header->prev_api) {
      auto* table = reinterpret_cast<const DLPackExchangeAPI*>(header);
      if (header->version.major == DLPACK_MAJOR_VERSION && table->dltensor_from_py_object_no_sync)
        api = table;
    }
  }
  known_type = type;
  known_api = api;
  return api;
}
#endif

DType dtype_of_numpy(const char* op, const char* what, const py::dtype& d) {
  const char kind = d.kind();
  const auto size = d.itemsize();
  if (kind == 'f' && size == 4) return DType::f32;
  if (kind == 'f' && size == 8) return DType::f64;
  if (kind == 'f' && size == 2) return DType::f16;
  if (kind == 'u' && size == 2) return DType::bf16;
  if (kind == 'u' && size == 1) return DType::u8;
  if (kind == 'b') return DType::boolean;
  if (kind == 'i') {
    return size == 8 ? DType::i64 : size == 4 ? DType::i32 : size == 2 ? DType::i16 : DType::i8;
  }
  const auto name = py::cast<std::string>(py::str(d));
  if (name == "bfloat16") return DType::bf16;
  raise_invalid(op, std::string("expected ") + what +
                        " of float32, float16, uint16 (bfloat16 bits), float64, an integer type or "
                        "bool, got numpy's " +
                        name);
}

void check_cuda(const char* op, cudaError_t e, const char* what) {
  if (e != cudaSuccess) cudaGetLastError();
  check(cuda_ops::cuda_status(op, e, what));
}

}  // namespace

void add_exceptions(py::module_& m) {
  const auto name = py::cast<std::string>(m.attr("__name__"));
  const auto add = [&](const char* short_name, PyObject* base, const char* doc) {
    PyObject* e = PyErr_NewExceptionWithDoc((name + "." + short_name).c_str(), doc, base, nullptr);
    if (e == nullptr) throw py::error_already_set();
    m.add_object(short_name, py::reinterpret_borrow<py::object>(e));
    return e;  // the module keeps one reference, this table the other
  };
  exceptions.invalid =
      add("InvalidArgument", PyExc_ValueError, "An operand or attribute is not legal.");
  exceptions.unsupported = add("Unsupported", PyExc_NotImplementedError,
                               "No kernel takes the problem; the message says why.");
  exceptions.no_device = add("NoDevice", PyExc_RuntimeError, "There is no CUDA device or driver.");
  exceptions.device = add("DeviceError", PyExc_RuntimeError, "The CUDA runtime reported an error.");
}

void check(const Status& status) {
  if (status) return;
  PyObject* type = status.code == cuda_ops::Code::invalid_argument ? exceptions.invalid
                   : status.code == cuda_ops::Code::unsupported    ? exceptions.unsupported
                   : status.code == cuda_ops::Code::no_device      ? exceptions.no_device
                                                                   : exceptions.device;
  PyErr_SetString(type, status.message.c_str());
  throw py::error_already_set();
}

namespace {

/// What a producer said when it could not describe its tensor, up to the end of the line.
[[noreturn]] void raise_foreign(const char* op, const char* what) {
  const std::string text = py::error_already_set().what();
  raise_invalid(op, std::string("expected ") + what + " as DLPack describes tensors, got " +
                        text.substr(0, text.find('\n')));
}

}  // namespace

Tensor device_tensor(const char* op, const char* what, py::handle object) {
#if defined(DLPACK_MAJOR_VERSION) && (DLPACK_MAJOR_VERSION > 1 || DLPACK_MINOR_VERSION >= 3)
  if (const DLPackExchangeAPI* api = exchange_api(Py_TYPE(object.ptr()))) {
    DLTensor dl{};
    if (api->dltensor_from_py_object_no_sync(object.ptr(), &dl) != 0) raise_foreign(op, what);
    return from_dl(op, what, dl);
  }
#endif
  if (!py::hasattr(object, "__dlpack__")) {
    raise_invalid(op, std::string("expected a DLPack tensor for ") + what + ", got " +
                          Py_TYPE(object.ptr())->tp_name + "; try the _numpy form for host arrays");
  }
  if (py::hasattr(object, "__dlpack_device__")) {  // numpy's refuses a stream
    const auto device = object.attr("__dlpack_device__")().cast<std::pair<int, int>>();
    check_device(op, what, device.first, device.second);
  }
  // -1: the caller orders the streams itself. The capsule frees only its description here.
  const py::object capsule = object.attr("__dlpack__")(py::arg("stream") = -1);
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (managed == nullptr) throw py::error_already_set();
  return from_dl(op, what, managed->dl_tensor);
}

OptionalTensor::OptionalTensor(const char* op, const char* what, py::handle object) {
  if (!object.is_none()) tensor_ = device_tensor(op, what, object);
}

Workspace workspace_of(const char* op, py::handle object) {
  if (object.is_none()) return {};
  const Tensor t = device_tensor(op, "workspace", object);
  if (!is_contiguous(t)) raise_invalid(op, "expected a dense workspace, got a strided one");
  return {t.data, static_cast<std::size_t>(numel(t)) * size_of(t.dtype)};
}

namespace {

/// Waits for the copy, and so for the kernels before it, without the interpreter's lock.
cudaError_t copy_released(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  const py::gil_scoped_release released;
  return cudaMemcpy(to, from, bytes, kind);
}

}  // namespace

HostCall::~HostCall() {
  for (void* p : memory_) cudaFree(p);
}

void* HostCall::allocate(std::size_t bytes) {
  void* p = nullptr;
  check_cuda(op_, cudaMalloc(&p, std::max<std::size_t>(bytes, 256)), "device memory");
  memory_.push_back(p);
  return p;
}

Tensor HostCall::upload(const char* what, py::handle object) {
  const py::array source = py::array::ensure(object, py::array::c_style);
  if (!source) {
    PyErr_Clear();
    raise_invalid(op_, std::string("expected a numpy array for ") + what + ", got " +
                           Py_TYPE(object.ptr())->tp_name);
  }
  if (source.ndim() > cuda_ops::kMaxRank)
    raise_invalid(op_, std::string("expected ") + what + " of rank <= 8, got " +
                           std::to_string(source.ndim()));
  Tensor t;
  t.dtype = dtype_of_numpy(op_, what, source.dtype());
  t.rank = static_cast<int>(source.ndim());
  std::int64_t dense = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    t.shape[d] = source.shape(d);
    t.stride[d] = dense;
    dense *= t.shape[d];
  }
  t.data = allocate(static_cast<std::size_t>(source.nbytes()));
  check_cuda(op_,
             copy_released(t.data, source.data(), static_cast<std::size_t>(source.nbytes()),
                           cudaMemcpyHostToDevice),
             "a copy to the device");
  return t;
}

const Tensor* HostCall::keep(const Tensor& t) {
  kept_.push_back(std::make_unique<Tensor>(t));
  return kept_.back().get();
}

const Tensor* HostCall::upload_optional(const char* what, py::handle array) {
  return array.is_none() ? nullptr : keep(upload(what, array));
}

Tensor HostCall::output(const std::vector<py::ssize_t>& shape, const py::dtype& dtype) {
  py::array host(dtype, shape);
  Tensor t;
  t.dtype = dtype_of_numpy(op_, "the result", dtype);
  t.rank = static_cast<int>(shape.size());
  std::int64_t dense = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    t.shape[d] = shape[d];
    t.stride[d] = dense;
    dense *= t.shape[d];
  }
  t.data = allocate(static_cast<std::size_t>(host.nbytes()));
  outputs_.emplace_back(t.data, host);
  return t;
}

Workspace HostCall::workspace(std::size_t bytes) {
  return bytes == 0 ? Workspace{} : Workspace{allocate(bytes), bytes};
}

py::array HostCall::download(const Tensor& t) {
  for (auto& [data, host] : outputs_) {
    if (data != t.data) continue;
    check_cuda(op_,
               copy_released(host.mutable_data(), data, static_cast<std::size_t>(host.nbytes()),
                             cudaMemcpyDeviceToHost),
               "a finished kernel");
    return host;
  }
  throw py::value_error("no output of this call");
}

std::vector<py::ssize_t> shape_of(const Tensor& t) { return {t.shape, t.shape + t.rank}; }

py::dtype dtype_of(py::handle array) {
  const py::array a = py::array::ensure(array);
  if (!a) {
    PyErr_Clear();
    throw py::type_error("expected a numpy array");
  }
  return a.dtype();
}

}  // namespace rm::ops_bindings
