// Few entries, nearly always the first one: a vector and a hash that keeps comparisons rare.
#include "engine/instance_cache.hpp"

#include <algorithm>
#include <bit>

namespace rm::engine {
namespace {

constexpr size_t kMaxInstances = 64;
// What all kept shapes but the newest may hold; at least a little more than the newest does, so that
// two large shapes in turn both stay.
constexpr int64_t kSpareBytes = int64_t{24} << 20;
// An estimate: libraries generate code of some ten kilobytes for a problem, our own kernels none.
constexpr int64_t kKernelBytes = int64_t{32} << 10;

uint64_t mix(uint64_t hash, uint64_t value) {
  return std::rotl(hash ^ value, 29) * 0x9e3779b97f4a7c15ULL;
}

uint64_t mix(uint64_t hash, const ir::Layout& l) {
  hash = mix(hash, l.dims.size() << 8 | static_cast<uint64_t>(l.dtype));
  for (int64_t d : l.dims) hash = mix(hash, static_cast<uint64_t>(d));
  for (int64_t s : l.strides) hash = mix(hash, static_cast<uint64_t>(s));
  return hash;
}

// Each piece of memory an instance makes the program hold: visit(identity, bytes).
template <class F>
void for_each_memory(const Instance& instance, F&& visit) {
  for (const auto& c : instance.constants->constants) {
    if (c->derived) visit(c->owner.get(), c->bytes);
  }
  for (const auto& p : instance.plan->steps) visit(p.kernel.get(), kKernelBytes);
}

int64_t own_bytes(const Instance& instance) {
  std::unordered_map<const void*, int64_t> pieces;
  for_each_memory(instance, [&](const void* id, int64_t bytes) { pieces.emplace(id, bytes); });
  int64_t total = 0;
  for (const auto& [id, bytes] : pieces) total += bytes;
  return total;
}

}  // namespace

std::shared_ptr<Instance> InstanceCache::find(const std::vector<TensorView>& inputs) {
  uint64_t hash = inputs.size();
  for (const auto& t : inputs) hash = mix(hash, t.layout);
  auto same = [&](const Entry& e) {
    return e.hash == hash &&
           std::equal(inputs.begin(), inputs.end(), e.instance->inputs.begin(),
                      e.instance->inputs.end(),
                      [](const TensorView& t, const ir::Layout& l) { return t.layout == l; });
  };
  auto it = std::find_if(entries_.begin(), entries_.end(), same);
  if (it == entries_.end()) return nullptr;
  std::rotate(entries_.begin(), it, it + 1);
  return entries_.front().instance;
}

InstanceCache::Dropped InstanceCache::insert(std::shared_ptr<Instance> made) {
  uint64_t hash = made->inputs.size();
  for (const auto& l : made->inputs) hash = mix(hash, l);
  count(*made, 1);
  const int64_t own = own_bytes(*made);
  newest_ = made;
  entries_.insert(entries_.begin(), {hash, std::move(made)});
  Dropped dropped;
  const int64_t spare = std::max(kSpareBytes, own + own / 4);
  while (entries_.size() > kMaxInstances || (entries_.size() > 1 && bytes_ - own > spare)) {
    count(*entries_.back().instance, -1);
    dropped.push_back(std::move(entries_.back().instance));
    entries_.pop_back();
  }
  measure_arenas();
  return dropped;
}

bool InstanceCache::replace(const Instance& old, std::shared_ptr<Instance> better) {
  for (Entry& e : entries_) {
    if (e.instance.get() != &old) continue;
    count(*better, 1);
    count(old, -1);
    if (newest_ == e.instance) newest_ = better;
    e.instance = std::move(better);  // the caller has `old`, so nothing is destroyed here
    measure_arenas();
    return true;
  }
  return false;
}

InstanceCache::Dropped InstanceCache::clear() {
  Dropped dropped;
  for (Entry& e : entries_) dropped.push_back(std::move(e.instance));
  dropped.push_back(std::move(newest_));
  entries_.clear();
  memory_.clear();
  newest_ = nullptr;
  bytes_ = largest_arena_ = 0;
  return dropped;
}

void InstanceCache::count(const Instance& instance, int holders) {
  for_each_memory(instance, [&](const void* id, int64_t bytes) {
    auto it = memory_.try_emplace(id, Memory{bytes, 0}).first;
    if (it->second.holders == 0) bytes_ += bytes;
    it->second.holders += holders;
    if (it->second.holders > 0) return;
    bytes_ -= it->second.bytes;
    memory_.erase(it);
  });
}

void InstanceCache::measure_arenas() {
  largest_arena_ = 0;
  for (const Entry& e : entries_) {
    largest_arena_ = std::max(largest_arena_, e.instance->plan->arena_bytes);
  }
}

}  // namespace rm::engine
