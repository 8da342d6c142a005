// A map to objects that others own: an entry lasts as long as somebody uses its object.
//
// Not thread safe. No object is ever destroyed by a call of the map, so a lock around it is short.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

namespace rm {

template <class T>
class WeakMap {
 public:
  /// nullptr when nobody uses an object of that name.
  std::shared_ptr<T> find(const std::string& key) const {
    auto it = entries_.find(key);
    return it == entries_.end() ? nullptr : it->second.lock();
  }

  /// Returns the object in use under `key`; when there is none, remembers and returns `object`.
  std::shared_ptr<T> put(const std::string& key, const std::shared_ptr<T>& object) {
    std::weak_ptr<T>& entry = entries_[key];
    if (std::shared_ptr<T> first = entry.lock()) return first;
    entry = object;
    if (entries_.size() >= sweep_at_) sweep();
    return object;
  }

  /// `visit(object)` for every object in use.
  template <class F>
  void for_each(F&& visit) const {
    for (const auto& [key, entry] : entries_) {
      if (const std::shared_ptr<T> object = entry.lock()) visit(*object);
    }
  }

  size_t num_entries() const { return entries_.size(); }  // with those not swept yet

 private:
  // Amortised: the map is swept when it has doubled since the last time.
  void sweep() {
    std::erase_if(entries_, [](const auto& entry) { return entry.second.expired(); });
    sweep_at_ = std::max(kFirstSweep, 2 * entries_.size());
  }

  static constexpr size_t kFirstSweep = 64;
  std::unordered_map<std::string, std::weak_ptr<T>> entries_;
  size_t sweep_at_ = kFirstSweep;
};

}  // namespace rm
