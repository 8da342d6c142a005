// The instances a program keeps, used last first. Bounded in number and in bytes.
//
// Bytes are those that only a kept shape needs: constants derived for it (masks, position biases)
// and prepared kernels, each counted once however many instances share it. Packed weights are not
// counted: they are shared by all shapes. The instance inserted last is always kept.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/instance.hpp"
#include "engine/tensor_view.hpp"

namespace rm::engine {

/// Not thread safe. Destroys no instance: what it drops is returned, so that the caller can let it
/// go without a lock (an instance may own kernels and weights of another library).
class InstanceCache {
 public:
  using Dropped = std::vector<std::shared_ptr<Instance>>;

  /// The instance of exactly these dtypes, dims and strides, or null.
  std::shared_ptr<Instance> find(const std::vector<TensorView>& inputs);
  Dropped insert(std::shared_ptr<Instance> made);
  /// Puts `better` in the place of `old`; false when `old` is not kept any more.
  bool replace(const Instance& old, std::shared_ptr<Instance> better);
  Dropped clear();

  size_t size() const { return entries_.size(); }
  int64_t bytes() const { return bytes_; }
  int64_t largest_arena() const { return largest_arena_; }
  /// The one made last, or null.
  const Instance* newest() const { return newest_.get(); }

 private:
  struct Entry {
    uint64_t hash;
    std::shared_ptr<Instance> instance;
  };
  struct Memory {
    int64_t bytes;
    int holders;
  };
  void count(const Instance& instance, int holders);
  void measure_arenas();

  std::vector<Entry> entries_;  // used last: at the front
  std::unordered_map<const void*, Memory> memory_;
  int64_t bytes_ = 0, largest_arena_ = 0;
  std::shared_ptr<Instance> newest_;
};

}  // namespace rm::engine
