// Constants of a program: the weights, values derived from them (merged, cast, transposed) and
// copies packed for a kernel. Thread safe.
//
// A store belongs to one generation of weights: new weights get a new store. It owns the weights;
// everything else belongs to the instances that use it, so memory goes with the last of them.
// Keys name content: the same expression over the same weights has the same key, so every concrete
// shape of a program finds what another shape in use already derived or packed.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/weak_map.hpp"
#include "ir/layout.hpp"
#include "runtime/device.hpp"
#include "select/prepared_kernels.hpp"

namespace rm::runtime {

struct Constant {
  std::string key;
  const void* data = nullptr;  // first byte of the buffer the layout is a view of
  int64_t bytes = 0;
  ir::Layout layout;
  std::shared_ptr<const void> owner;  // keeps `data` valid; empty: it outlives every program
  bool derived = false;               // `owner` is memory made here, not a weight's
};
using ConstantPtr = std::shared_ptr<const Constant>;

/// A copy of a constant in the layout a kernel asked for.
struct PackedCopy {
  std::shared_ptr<void> memory;
  int64_t bytes = 0;
};
using PackedPtr = std::shared_ptr<const PackedCopy>;

/// Derived constants of several programs over the same weights: each is held once, as long as any
/// of them uses it. Thread safe. Whoever shares it vouches that "w:<name>" means one tensor in all.
class SharedConstants {
 public:
  ConstantPtr find(const std::string& key) const;
  /// Keeps the first one that is put under a key and still used, and returns it.
  ConstantPtr put(const ConstantPtr& constant);
  /// Of everything that is still used, each once.
  int64_t bytes() const;

 private:
  mutable std::mutex mutex_;
  WeakMap<const Constant> constants_;
};

/// How the copying of one operand is run; the default runs it at once. `work` holds no lock and
/// writes only memory that nobody else can see.
using RunCopy = std::function<void(const std::function<void()>& work)>;

class ConstantStore {
 public:
  explicit ConstantStore(std::shared_ptr<SharedConstants> shared = nullptr,
                         DevicePtr device = host())
      : shared_(std::move(shared)), device_(std::move(device)) {}

  /// Where every constant of the store lies.
  Device& device() const { return *device_; }

  /// Before the store is used by several threads.
  void put_weight(Constant weight);
  ConstantPtr find(const std::string& key);
  /// The constant in use under the key, or this one.
  ConstantPtr put(Constant constant);
  /// The operand in the layout the kernel asks for, or null when it is used as it is. Two threads
  /// may copy one operand at once; then the first copy serves both.
  PackedPtr packed(const select::Prepared& kernel, size_t input, const Constant& constant,
                   const ir::Layout& view, const RunCopy& run_copy = {});
  int64_t packed_bytes() const;
  int64_t derived_bytes() const;

 private:
  std::shared_ptr<SharedConstants> shared_;     // may be null
  DevicePtr device_;
  std::map<std::string, ConstantPtr> weights_;  // never changes once shared
  mutable std::mutex mutex_;                    // guards what follows; nothing slow runs under it
  WeakMap<const Constant> derived_;
  WeakMap<const PackedCopy> packed_;
};

}  // namespace rm::runtime
