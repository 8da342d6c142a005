// The guard of a routed module tree: is it still the tree the entries were made from?
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

#include "router/contents.hpp"
#include "router/torch.hpp"

namespace rm::router {

class Guard {
 public:
  Guard() = default;
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  ~Guard() { clear(); }

  /// For a program that trains the tree's weights: it reads their numbers anew at every call, so
  /// only their identity is watched, and modules may be in training mode as long as they stay so.
  /// Called before snapshot().
  void watch_structure_only() noexcept { trains_ = true; }

  /// Walks the tree below `root` (an nn.Module).  Throws pybind11 errors.  kModule: it holds
  /// something that cannot be watched, no snapshot was taken (`detail()` says what); else check().
  ///
  /// `sources` lists what forward may read beside the tree: the fields of guards/sources.py's
  /// `Sources` in order.  None: every attribute of every module counts, nothing beside the tree.
  Reason snapshot(PyObject* root, const TorchFacts& facts, PyObject* sources);

  /// Nothing changed since snapshot()?  Cheap; never raises.
  Reason check(PyObject* root, const TorchFacts& facts);

  /// As check(), for a guard that was set aside while the tree was another: the tree may be again
  /// what it was.  `lists_by_content`: a list that was replaced by one with the same items is the
  /// same, and is watched from here on; for code that does not ask which object a list is.
  Reason check_again(PyObject* root, const TorchFacts& facts, bool lists_by_content);

  /// True when a tracked tensor requires grad.
  bool any_requires_grad(const TorchFacts& facts) noexcept;

  /// Later snapshots also compare the content of all weights, a part of it at every check.
  void compare_all_contents() { all_contents_ = true; }

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
    kAttributes,  // a module's __dict__: the entries that forward may read, and no others of them
    kReached,     // another object's __dict__, the same way
    kNamed,       // some entries, those that are missing too
    kWhole,       // every entry, and no others
  };
  struct Item {
    PyRef key, value;  // no value: there is no such entry
  };
  struct Dict {
    PyRef object;  // empty for the root's own __dict__: holding it would be a cycle
    std::uint64_t tag = UINT64_MAX;  // no dict has this one: the first check compares
    Kind kind = Kind::kExact;
    std::uint32_t module = 0;
    std::vector<Item> items;
    std::string place;  // of all kinds but a module's own
  };
  struct Held {  // a list, another sequence, a set (its copy is the one item), or a cell
    PyRef object;
    std::vector<PyRef> items;
    std::string place;
  };
  struct Array {  // NumPy's, by content
    PyRef object;
    std::string content, place;
  };
  struct Attributes {  // the __dict__ of an object, which a script may replace whole
    PyRef dict;
    PyObject** place = nullptr;  // in the object, which somebody keeps alive; null: it has none
    static Attributes of(PyObject* object);
    bool replaced() const noexcept { return place != nullptr && *place != dict.get(); }
  };
  struct Object {  // of this very class, with these values in its slots
    PyRef object, type;
    Attributes attributes;
    std::vector<Item> slots;
    std::string place;
  };
  struct Class {  // what each name that forward may read finds on it
    PyRef type, order;     // order: its base classes, which isinstance asks for
    PyRef name;
    unsigned version = 0;  // CPython's own; 0: unknown, the names are looked up
    std::vector<PyRef> found;
  };
  struct Function {
    PyRef function, code, defaults, keyword_defaults, name, doc;
  };
  /// Classes that are registered with abstract ones, which isinstance asks for.
  struct Registered {
    PyRef kinds;  // a tuple of abstract classes; empty: none are asked
    PyRef of;     // of(kinds) gives what is registered now, in a form that can be compared
    PyRef found;
    std::uint64_t token = 0;  // Python's, another one after every registration of the process
  };
  struct Module {
    PyRef object;  // empty for the root
    PyTypeObject* type = nullptr;
    Attributes attributes;  // of the root none: it is asked for them at every check
    std::string path;
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
    bool wants_gradient = false;
    std::string
        place;  // not empty: beside the tree, part of the program and not one of its weights
  };

  void add_module(PyObject* module, bool is_root, const std::string& path);
  void add_dict(PyObject* dict, bool is_root, Kind kind, std::uint32_t module);
  Reason add_weights(PyObject* dict, std::uint32_t module, const TorchFacts& facts);
  Reason add_weight(PyObject* key, PyObject* value, std::uint32_t module, const char* place,
                    const TorchFacts& facts);
  Reason add_sources(PyObject* root, PyObject* sources, const TorchFacts& facts);
  void add_entries(PyObject* dict, bool is_root, PyObject* names, std::string place);
  void add_held(PyObject* object, std::string place);
  void add_object(PyObject* object, PyObject* slots, std::string place);
  void add_class(PyObject* type);
  void add_function(PyObject* function);
  bool counts(Kind kind, PyObject* key) const noexcept;
  void set_names(PyObject* names, bool every);
  bool check_entries(Dict& dict, PyObject* object);
  bool taken_over(Item& item, PyObject* now);
  bool check_held(const Held& held);
  bool check_array(const Array& array);
  bool check_object(const Object& object);
  bool check_class(Class& known);
  bool check_function(const Function& known);
  bool check_registered();
  bool check_beside();
  Reason check_dict(Dict& dict, PyObject* object, const TorchFacts& facts);
  bool in_order(const Dict& dict, PyObject* object) const noexcept;
  PyObject* added_entry(const Dict& dict, PyObject* object) const noexcept;
  Reason check_items(Dict& dict, PyObject* object, const TorchFacts& facts);
  bool same_weight(Weight& weight, const TorchFacts& facts) noexcept;
  Reason moved(const Weight& weight, const char* how);
  Reason check_writes();
  std::string path_of(std::uint32_t module, PyObject* key) const;
  std::string path_of(const Weight& weight) const;

  std::vector<Module> modules_;
  std::vector<Class> classes_;
  std::vector<Dict> dicts_;
  std::vector<Held> held_;
  std::vector<Array> arrays_;
  std::vector<Object> objects_;
  std::vector<Function> functions_;
  Registered registered_;
  PyRef names_;                    // a frozenset: what the code that forward reaches may read
  std::vector<PyRef> names_list_;  // the same, in one order
  bool every_name_ = true;         // it may read any attribute
  struct {
    bool training = false;       // whether parts are in training mode
    bool requires_grad = false;  // of weights
    bool gradients = false;      // weights' .grad, which is not watched
  } asks_;                       // by code of the user
  std::vector<Weight> weights_;
  std::vector<std::int64_t> dims_;  // shape then strides of each weight
  Contents contents_;          // of the weights that are no Parameters, or of all
  bool all_contents_ = false;
  PyRef default_dtype_;  // torch's, at the snapshot
  std::shared_ptr<WriteTracker> writes_;
  std::uint64_t clock_ = 0;      // of writes_, at the snapshot
  std::size_t aliased_ = SIZE_MAX;  // a weight whose .data was held at the snapshot
  std::size_t grad_hint_ = 0;    // the weight that required grad last time
  std::string detail_;
  bool taken_ = false;
  bool trains_ = false;  // watch_structure_only()
  bool lists_by_content_ = false;  // within check_again()
};

}  // namespace rm::router
