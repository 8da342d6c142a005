// The key of one call: every argument bound to its parameter and reduced to what an entry depends
// on.  Tensors count by dtype, rank, device and gradient; plain values by value; everything else by
// type.  Two calls with equal keys may be served by one entry; sizes are the entry's affair.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "router/torch.hpp"

namespace rm::router {

using KeyWords = std::vector<std::uint64_t>;

struct KeyHash {
  std::size_t operator()(const KeyWords& words) const noexcept;
};

/// The parameters of a forward, in signature order; the first `positional` bind by position.
class CallShape {
 public:
  CallShape(PyObject* names, std::size_t positional);

  struct Call {
    KeyWords key;
    std::vector<PyObject*> flat;  // borrowed: tensors and opaque objects, in parameter order
    std::string detail;
  };
  /// Reduces one call.  kArgument (with detail) when something cannot be described.
  Reason describe(PyObject* args, PyObject* kwargs, const TorchFacts& facts, bool grad, Call* out);

  int traverse(visitproc visit, void* arg) const;

 private:
  struct Slot {
    std::uint32_t index;
    PyObject* value;
  };
  std::uint32_t index_of(PyObject* name);
  Reason bind(PyObject* args, PyObject* kwargs, std::vector<Slot>* slots, std::string* detail);
  Reason add(PyObject* value, int depth, const TorchFacts& facts, bool grad, Call* out);
  Reason add_tensor(PyObject* value, const TorchFacts& facts, bool grad, Call* out);
  Reason add_container(PyObject* value, int depth, const TorchFacts& facts, bool grad, Call* out);
  std::uint64_t identity(PyObject* object);

  std::vector<PyRef> names_;
  std::size_t positional_;
  std::size_t in_signature_;  // names; those behind them were seen among **kwargs
  std::unordered_map<PyObject*, PyRef> kept_;  // objects whose address stands in a key
};

}  // namespace rm::router
