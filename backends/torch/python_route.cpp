// CPython by dlsym: the plugin links no libpython, so one build serves every interpreter.
#include "python_route.hpp"

#include <dlfcn.h>

#include <string>

#include "rm/plugin.hpp"

namespace rm::torch_bridge {
namespace {

using Object = void;  // PyObject

struct Python {
  int (*is_initialized)();
  int (*gil_ensure)();
  void (*gil_release)(int);
  Object* (*import_module)(const char*);
  Object* (*get_attr)(Object*, const char*);
  Object* (*call)(Object* callable, Object* tuple);
  Object* (*tuple_new)(ptrdiff_t);
  int (*tuple_set)(Object*, ptrdiff_t, Object*);  // steals
  Object* (*list_new)(ptrdiff_t);
  int (*list_set)(Object*, ptrdiff_t, Object*);  // steals
  ptrdiff_t (*list_size)(Object*);
  Object* (*list_get)(Object*, ptrdiff_t);  // borrowed
  Object* (*unicode)(const char*, ptrdiff_t);
  Object* (*integer)(long long);
  Object* (*capsule_new)(void*, const char*, void (*)(Object*));
  void* (*capsule_get)(Object*, const char*);
  void (*dec_ref)(Object*);
  Object* none;
  void (*inc_ref)(Object*);
  void (*error_fetch)(Object**, Object**, Object**);
  Object* (*str)(Object*);
  const char* (*utf8)(Object*, ptrdiff_t*);
};

const Python& python() {
  static const Python table = [] {
    Python p{};
    std::string missing;
    const auto need = [&](const char* symbol, auto& out) {
      out = reinterpret_cast<std::remove_reference_t<decltype(out)>>(dlsym(RTLD_DEFAULT, symbol));
      if (out == nullptr && missing.empty()) missing = symbol;
    };
    need("Py_IsInitialized", p.is_initialized);
    need("PyGILState_Ensure", p.gil_ensure);
    need("PyGILState_Release", p.gil_release);
    need("PyImport_ImportModule", p.import_module);
    need("PyObject_GetAttrString", p.get_attr);
    need("PyObject_CallObject", p.call);
    need("PyTuple_New", p.tuple_new);
    need("PyTuple_SetItem", p.tuple_set);
    need("PyList_New", p.list_new);
    need("PyList_SetItem", p.list_set);
    need("PyList_Size", p.list_size);
    need("PyList_GetItem", p.list_get);
    need("PyUnicode_FromStringAndSize", p.unicode);
    need("PyLong_FromLongLong", p.integer);
    need("PyCapsule_New", p.capsule_new);
    need("PyCapsule_GetPointer", p.capsule_get);
    need("Py_DecRef", p.dec_ref);
    need("Py_IncRef", p.inc_ref);
    need("_Py_NoneStruct", p.none);
    need("PyErr_Fetch", p.error_fetch);
    need("PyObject_Str", p.str);
    need("PyUnicode_AsUTF8AndSize", p.utf8);
    if (!missing.empty() || p.is_initialized() == 0) {
      throw plugin::Error(
          RM_FAILED_PRECONDITION,
          "[torch bridge] expected a Python interpreter for an operator with Scalar "
          "arguments, got none" +
              (missing.empty() ? "" : " (no " + missing + ")"));
    }
    return p;
  }();
  return table;
}

class Gil {
 public:
  Gil() : state_(python().gil_ensure()) {}
  ~Gil() { python().gil_release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  int state_;
};

/// An owned reference; the GIL is held while one lives.
class Ref {
 public:
  explicit Ref(Object* object) : object_(object) {}
  ~Ref() {
    if (object_ != nullptr) python().dec_ref(object_);
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  Object* get() const { return object_; }
  Object* release() { return std::exchange(object_, nullptr); }

 private:
  Object* object_;
};

[[noreturn]] void raise_python_error(const std::string& what) {
  const Python& py = python();
  Object *type = nullptr, *value = nullptr, *trace = nullptr;
  py.error_fetch(&type, &value, &trace);
  const Ref owned_type(type), owned_value(value), owned_trace(trace);
  std::string text = "no message";
  if (value != nullptr) {
    const Ref string(py.str(value));
    const char* chars = string.get() == nullptr ? nullptr : py.utf8(string.get(), nullptr);
    if (chars != nullptr) text = chars;
  }
  throw plugin::Error(RM_UNKNOWN, "[torch bridge] " + what + " failed: " + text);
}

Object* not_null(Object* object, const std::string& what) {
  if (object == nullptr) raise_python_error(what);
  return object;
}

}  // namespace

PythonCall::PythonCall(std::string_view op, std::string_view schema_args,
                       std::span<const int64_t> sym_args) {
  const Python& py = python();
  const Gil gil;
  const Ref module(
      not_null(py.import_module("rm_abstract.capture.aten_args"), "importing aten_args"));
  const Ref bind(not_null(py.get_attr(module.get(), "bind"), "aten_args.bind"));
  Ref symbols(not_null(py.list_new(static_cast<ptrdiff_t>(sym_args.size())), "a list"));
  for (size_t i = 0; i < sym_args.size(); ++i) {
    py.list_set(symbols.get(), static_cast<ptrdiff_t>(i), py.integer(sym_args[i]));
  }
  const Ref args(not_null(py.tuple_new(3), "a tuple"));
  py.tuple_set(args.get(), 0, py.unicode(op.data(), static_cast<ptrdiff_t>(op.size())));
  py.tuple_set(args.get(), 1,
               py.unicode(schema_args.data(), static_cast<ptrdiff_t>(schema_args.size())));
  py.tuple_set(args.get(), 2, symbols.release());
  callable_ = not_null(py.call(bind.get(), args.get()), "binding " + std::string(op));
}

PythonCall::~PythonCall() {
  if (python().is_initialized() == 0) return;  // the interpreter is gone, and the object with it
  const Gil gil;
  python().dec_ref(callable_);
}

std::vector<Tensor> PythonCall::operator()(std::vector<Tensor> inputs) const {
  const Python& py = python();
  const Gil gil;
  Ref list(not_null(py.list_new(static_cast<ptrdiff_t>(inputs.size())), "a list"));
  for (size_t i = 0; i < inputs.size(); ++i) {
    Object* item = nullptr;
    if (inputs[i].get() == nullptr) {
      py.inc_ref(item = py.none);
    } else {
      item = not_null(py.capsule_new(inputs[i].get(), nullptr, nullptr), "a capsule");
    }
    py.list_set(list.get(), static_cast<ptrdiff_t>(i), item);
  }
  const Ref args(not_null(py.tuple_new(1), "a tuple"));
  py.tuple_set(args.get(), 0, list.release());
  for (Tensor& input : inputs) input.release();  // the callable turns each into a Python tensor
  const Ref result(not_null(py.call(callable_, args.get()), "the operator"));
  std::vector<Tensor> out;
  const ptrdiff_t count = py.list_size(result.get());
  for (ptrdiff_t i = 0; i < count; ++i) {
    out.emplace_back(py.capsule_get(py.list_get(result.get(), i), nullptr));
  }
  return out;
}

}  // namespace rm::torch_bridge
