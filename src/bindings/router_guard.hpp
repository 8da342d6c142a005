// The guard of an armed module tree: is it still the tree the entries were made from?
//
// A snapshot holds every dictionary of every module in the tree with the version CPython gave it,
// and every tensor with its data pointer, layout and in-place version.  A check is a walk over flat
// arrays; only a dictionary whose version moved is compared entry by entry.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bindings/router_torch.hpp"

namespace rm::bindings {

class Guard {
 public:
  Guard() = default;
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  ~Guard() { clear(); }

  /// Walks the tree below `root` (an nn.Module).  Throws pybind11 errors.  kArgument: it holds
  /// something that cannot be watched, no snapshot was taken (`detail()` says what); else check().
  ///
  /// `around` names what lies beside the tree (surroundings.py): a tuple of lists of
  /// (dict or None for the root's own, names or None for all, place), (list, place), (cell, place),
  /// (class, names) and (tensor, place); or None.
  Reason snapshot(PyObject* root, const TorchFacts& facts, PyObject* around);

  /// Nothing changed since snapshot()?  Cheap; never raises.
  Reason check(PyObject* root, const TorchFacts& facts);

  /// True when a tracked tensor requires grad.
  bool any_requires_grad(const TorchFacts& facts) noexcept;

  void clear();
  bool taken() const noexcept { return taken_; }
  /// What the last verdict was about: a path such as "encoder.layer.0.weight".
  std::string detail() const { return detail_; }
  std::size_t weights() const noexcept { return weights_.size(); }
  std::size_t modules() const noexcept { return modules_.size(); }

  int traverse(visitproc visit, void* arg) const;

 private:
  enum class Kind : std::uint8_t {
    kExact,       // a registry: the same objects
    kHooks,       // no hooks of the user's
    kAttributes,  // a module's __dict__: plain values and tensors
    kNamed,       // some entries, by value
    kWhole,       // every entry, by value
  };
  struct Item {
    PyRef key, value;
  };
  struct Dict {
    PyRef object;  // empty for the root's own __dict__: holding it would be a cycle
    std::uint64_t tag = UINT64_MAX;  // no dict has this one: the first check compares
    Kind kind = Kind::kExact;
    std::uint32_t module = 0;
    std::vector<Item> items;
    std::string place;  // of kNamed and kWhole
  };
  struct Held {  // a list, another sequence, or a cell
    PyRef object;
    std::vector<PyRef> items;
    std::string place;
  };
  struct Module {
    PyRef object;  // empty for the root
    PyTypeObject* type = nullptr;
    std::string path;
  };
  struct ForwardOf {
    PyRef type;
    PyObject* forward = nullptr;  // borrowed from the type: compared, never used
  };
  struct Weight {
    PyRef tensor;
    const void* data = nullptr;
    std::int64_t version = 0;
    std::uint32_t dims_at = 0;
    std::uint32_t module = 0;
    std::int32_t ndim = 0;
    DLDataType dtype{};
    PyRef key;
    RawTensor raw;
    bool has_raw = false;
    std::string
        place;  // not empty: beside the tree, part of the program and not one of its weights
  };

  void add_module(PyObject* module, bool is_root, const std::string& path);
  void add_dict(PyObject* dict, bool is_root, Kind kind, std::uint32_t module,
                const TorchFacts& facts);
  Reason add_weights(PyObject* dict, std::uint32_t module, const TorchFacts& facts);
  Reason add_weight(PyObject* key, PyObject* value, std::uint32_t module, const char* place,
                    const TorchFacts& facts);
  Reason add_around(PyObject* root, PyObject* around, const TorchFacts& facts);
  void add_entries(PyObject* dict, bool is_root, PyObject* names, std::string place);
  void add_held(PyObject* object, std::string place);
  bool check_entries(const Dict& dict, PyObject* object);
  bool check_held(const Held& held);
  Reason check_dict(Dict& dict, PyObject* object, const TorchFacts& facts);
  Reason check_items(const Dict& dict, PyObject* object, const TorchFacts& facts);
  bool same_weight(Weight& weight, const TorchFacts& facts) noexcept;
  Reason moved(const Weight& weight, const char* how);
  Reason check_writes();
  std::string path_of(std::uint32_t module, PyObject* key) const;

  std::vector<Module> modules_;
  std::vector<ForwardOf> forwards_;
  std::vector<Dict> dicts_;
  std::vector<Held> held_;
  std::vector<Weight> weights_;
  std::vector<std::int64_t> dims_;  // shape then strides of each weight
  PyRef default_dtype_;  // torch's, at the snapshot
  std::shared_ptr<SilentWrites> writes_;
  std::uint64_t clock_ = 0;      // of writes_, at the snapshot
  std::size_t lent_ = SIZE_MAX;  // a weight whose .data was held at the snapshot
  std::size_t grad_hint_ = 0;    // the weight that required grad last time
  std::string detail_;
  bool taken_ = false;
};

}  // namespace rm::bindings
