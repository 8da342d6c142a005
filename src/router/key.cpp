// Reduction of a call to its key.  See the header for what counts.
#include "router/key.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "router/kinds.hpp"

namespace rm::router {
namespace {

constexpr int kMaxDepth = 8;                    // containers within containers
constexpr std::size_t kMaxNames = 256;          // keyword names seen beyond the signature
constexpr std::size_t kMaxKept = 4096;          // strings and types held for their address
constexpr std::uint32_t kPastSignature = 4096;  // *args come after every name

enum Tag : std::uint64_t {
  kTagTensor = 1,
  kTagNone,
  kTagTrue,
  kTagFalse,
  kTagInt,
  kTagFloat,
  kTagStr,
  kTagIdentity,
  kTagList,
  kTagTuple,
  kTagDict,
  kTagOpaque,
  kTagArgument,
};

std::uint64_t word(Tag tag, std::uint64_t payload = 0) { return tag | payload << 8; }

}  // namespace

std::size_t KeyHash::operator()(const KeyWords& words) const noexcept {
  std::uint64_t h = 0x9e3779b97f4a7c15ull ^ words.size();
  for (const std::uint64_t w : words) h = std::rotl((h ^ w) * 0xff51afd7ed558ccdull, 31);
  return static_cast<std::size_t>(h ^ (h >> 32));
}

CallShape::CallShape(PyObject* names, std::size_t positional)
    : positional_(positional), in_signature_(static_cast<std::size_t>(PyTuple_GET_SIZE(names))) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    Py_INCREF(name);
    PyUnicode_InternInPlace(&name);
    names_.push_back(PyRef::steal(name));
  }
}

std::uint32_t CallShape::index_of(PyObject* name) {
  for (std::size_t i = 0; i < names_.size(); ++i) {
    if (names_[i].get() == name) return static_cast<std::uint32_t>(i);
  }
  for (std::size_t i = 0; i < names_.size(); ++i) {
    if (PyUnicode_Compare(names_[i].get(), name) == 0) return static_cast<std::uint32_t>(i);
  }
  Py_INCREF(name);
  PyUnicode_InternInPlace(&name);
  names_.push_back(PyRef::steal(name));
  return static_cast<std::uint32_t>(names_.size() - 1);
}

Reason CallShape::bind(PyObject* args, PyObject* kwargs, std::vector<Slot>* slots,
                       std::string* detail) {
  const auto given = static_cast<std::size_t>(PyTuple_GET_SIZE(args));
  for (std::size_t i = 0; i < given; ++i) {
    const auto index = i < positional_ ? i : kPastSignature + i;
    slots->push_back({static_cast<std::uint32_t>(index), PyTuple_GET_ITEM(args, i)});
  }
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (kwargs != nullptr && PyDict_Next(kwargs, &position, &key, &value)) {
    if (!PyUnicode_CheckExact(key) || names_.size() > kMaxNames) {
      *detail = "too many keyword names";
      return Reason::kArgument;
    }
    const std::uint32_t index = index_of(key);
    if (index < std::min(given, positional_)) {
      *detail = "an argument given twice";  // eager raises the user's own TypeError
      return Reason::kArgument;
    }
    slots->push_back({index, value});
  }
  // What falls into **kwargs lies there as it was given: forward may walk through it.
  const auto rank = [this](const Slot& slot) {
    const bool extra = slot.index >= in_signature_ && slot.index < kPastSignature;
    return extra ? static_cast<std::uint32_t>(in_signature_) : slot.index;
  };
  std::stable_sort(slots->begin(), slots->end(),
                   [&](const Slot& a, const Slot& b) { return rank(a) < rank(b); });
  return Reason::kNone;
}

Reason CallShape::describe(PyObject* args, PyObject* kwargs, const TorchFacts& facts, bool grad,
                           Call* out) {
  out->key.clear();
  out->flat.clear();
  if (kept_.size() > kMaxKept) {
    out->detail = "too many different strings";
    return Reason::kArgument;
  }
  std::vector<Slot> slots;
  slots.reserve(16);
  if (Reason bad = bind(args, kwargs, &slots, &out->detail); bad != Reason::kNone) return bad;
  for (const Slot& slot : slots) {
    out->key.push_back(word(kTagArgument, slot.index));
    const Reason bad = add(slot.value, 0, facts, grad, out);
    if (bad == Reason::kNone) continue;
    const char* name =
        slot.index < names_.size() ? PyUnicode_AsUTF8(names_[slot.index].get()) : "*args";
    out->detail = std::string(name != nullptr ? name : "?") + ": " + out->detail;
    PyErr_Clear();
    return bad;
  }
  return Reason::kNone;
}

std::uint64_t CallShape::identity(PyObject* object) {
  kept_.try_emplace(object, PyRef::borrow(object));
  return reinterpret_cast<std::uint64_t>(object);
}

Reason CallShape::add_tensor(PyObject* value, const TorchFacts& facts, bool grad, Call* out) {
  DLTensor view{};
  if (!facts.is_plain_tensor(value)) {
    out->detail = std::string("a tensor subclass (") + Py_TYPE(value)->tp_name + ")";
    return Reason::kArgument;
  }
  if (!facts.view(value, &view) || facts.is_lazy_view(value)) {
    out->detail = "not a dense tensor";
    return Reason::kArgument;
  }
  if (grad && facts.requires_grad(value)) {
    out->detail = "gradients are enabled and an input requires them; try torch.no_grad()";
    return Reason::kGradients;
  }
  const std::uint64_t dtype =
      view.dtype.code | std::uint64_t{view.dtype.bits} << 8 | std::uint64_t{view.dtype.lanes} << 16;
  out->key.push_back(word(kTagTensor, dtype | static_cast<std::uint64_t>(view.ndim) << 32));
  out->key.push_back(static_cast<std::uint64_t>(view.device.device_type) << 32 |
                     static_cast<std::uint32_t>(view.device.device_id));
  out->flat.push_back(value);
  return Reason::kNone;
}

Reason CallShape::add_container(PyObject* value, int depth, const TorchFacts& facts, bool grad,
                                Call* out) {
  if (depth >= kMaxDepth) {
    out->detail = "containers nested too deep";
    return Reason::kArgument;
  }
  if (PyDict_CheckExact(value)) {
    out->key.push_back(word(kTagDict, static_cast<std::uint64_t>(PyDict_GET_SIZE(value))));
    PyObject *key = nullptr, *item = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(value, &position, &key, &item)) {
      for (PyObject* part : {key, item}) {
        if (Reason bad = add(part, depth + 1, facts, grad, out); bad != Reason::kNone) return bad;
      }
    }
    return Reason::kNone;
  }
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
  out->key.push_back(
      word(PyList_CheckExact(value) ? kTagList : kTagTuple, static_cast<std::uint64_t>(size)));
  if (!PyList_CheckExact(value))
    out->key.push_back(identity(reinterpret_cast<PyObject*>(Py_TYPE(value))));
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(value, i);
    if (Reason bad = add(item, depth + 1, facts, grad, out); bad != Reason::kNone) return bad;
  }
  return Reason::kNone;
}

Reason CallShape::add(PyObject* value, int depth, const TorchFacts& facts, bool grad, Call* out) {
  if (facts.is_any_tensor(value)) return add_tensor(value, facts, grad, out);
  if (value == Py_None) {
    out->key.push_back(word(kTagNone));
  } else if (PyBool_Check(value)) {
    out->key.push_back(word(value == Py_True ? kTagTrue : kTagFalse));
  } else if (PyLong_CheckExact(value)) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0) {
      out->detail = "an integer beyond 64 bits";
      return Reason::kArgument;
    }
    out->key.push_back(word(kTagInt));
    out->key.push_back(static_cast<std::uint64_t>(number));
  } else if (PyFloat_CheckExact(value)) {
    out->key.push_back(word(kTagFloat));
    out->key.push_back(std::bit_cast<std::uint64_t>(PyFloat_AS_DOUBLE(value)));
  } else if (PyUnicode_CheckExact(value)) {
    PyObject* text = value;
    Py_INCREF(text);
    PyUnicode_InternInPlace(&text);
    const PyRef holder = PyRef::steal(text);
    out->key.push_back(word(kTagStr));
    out->key.push_back(identity(text));
  } else if (kind_of(value) == ValueKind::kFixed) {
    out->key.push_back(word(kTagIdentity));
    out->key.push_back(identity(value));
  } else if (PyTuple_Check(value) || PyList_CheckExact(value) || PyDict_CheckExact(value)) {
    return add_container(value, depth, facts, grad, out);
  } else {
    out->key.push_back(word(kTagOpaque));
    out->key.push_back(identity(reinterpret_cast<PyObject*>(Py_TYPE(value))));
    out->flat.push_back(value);
  }
  return Reason::kNone;
}

int CallShape::traverse(visitproc visit, void* arg) const {
  for (const auto& [address, object] : kept_) Py_VISIT(object.get());
  return 0;
}

}  // namespace rm::router
