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

class ConstantStore {
 public:
  ConstantPtr find(const std::string& key) const;
  /// Keeps the first one put under a key and returns it.
  ConstantPtr put(Constant constant);
  /// The operand as the kernel wants it, or null when it is used as it lies.
  std::shared_ptr<void> packed(const plan::KernelState& state, size_t input,
                               const Constant& constant, const ir::Layout& view);
  int64_t packed_bytes() const;
  int64_t derived_bytes() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, ConstantPtr> constants_;
  std::map<std::string, std::pair<std::shared_ptr<void>, int64_t>> packed_;
};

}  // namespace rm::runtime
