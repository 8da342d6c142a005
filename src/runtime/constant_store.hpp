// Constants of a program: weights as they lie in the user's tensors, values derived from them
// (merged, cast, transposed) and copies packed for a kernel. Shared by all instances; thread safe.
//
// Keys name content: the same expression over the same weights has the same key, so every concrete
// shape of a program finds what another shape already derived or packed.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "ir/layout.hpp"
#include "plan/plan.hpp"

namespace rm::runtime {

struct Constant {
  std::string key;
  const void* data = nullptr;  // first byte of the buffer the layout is a view of
  int64_t bytes = 0;
  ir::Layout layout;
  std::shared_ptr<void> owner;  // empty: the caller keeps the memory alive
};

using ConstantPtr = std::shared_ptr<const Constant>;

/// Derived constants of several programs over the same weights: each is held once, as long as any
/// of them uses it. Thread safe. Whoever shares it vouches that "w:<name>" means one tensor in all.
class SharedConstants {
 public:
  ConstantPtr find(const std::string& key) const;
  /// Keeps the first one that is put under a key and still used, and returns it.
  ConstantPtr put(ConstantPtr constant);
  /// Of everything that is still used, each once.
  int64_t bytes() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::weak_ptr<const Constant>> constants_;
};

class ConstantStore {
 public:
  ConstantStore() = default;
  explicit ConstantStore(std::shared_ptr<SharedConstants> shared) : shared_(std::move(shared)) {}

  ConstantPtr find(const std::string& key);
  /// Keeps the first one put under a key and returns it.
  ConstantPtr put(Constant constant);
  /// The operand as the kernel wants it, or null when it is used as it lies.
  std::shared_ptr<void> packed(const plan::KernelState& state, size_t input,
                               const Constant& constant, const ir::Layout& view);
  int64_t packed_bytes() const;
  int64_t derived_bytes() const;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<SharedConstants> shared_;  // may be null
  std::map<std::string, ConstantPtr> constants_;
  std::map<std::string, std::pair<std::shared_ptr<void>, int64_t>> packed_;
};

}  // namespace rm::runtime
