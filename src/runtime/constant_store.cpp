// Packing goes through the kernel's own description of the layout it wants.
#include "runtime/constant_store.hpp"

#include "backend/status.hpp"
#include "runtime/aligned_memory.hpp"

namespace rm::runtime {

namespace {
// Weights are every store's own; what derives from them is the same for all.
bool is_derived(const std::string& key) { return key.starts_with("d:"); }
}  // namespace

ConstantPtr SharedConstants::find(const std::string& key) const {
  std::lock_guard lock(mutex_);
  auto it = constants_.find(key);
  return it == constants_.end() ? nullptr : it->second.lock();
}

ConstantPtr SharedConstants::put(ConstantPtr constant) {
  std::lock_guard lock(mutex_);
  std::weak_ptr<const Constant>& held = constants_[constant->key];
  if (ConstantPtr first = held.lock()) return first;
  held = constant;
  return constant;
}

int64_t SharedConstants::bytes() const {
  std::lock_guard lock(mutex_);
  int64_t total = 0;
  for (const auto& [key, held] : constants_) {
    if (const ConstantPtr constant = held.lock()) total += constant->bytes;
  }
  return total;
}

ConstantPtr ConstantStore::find(const std::string& key) {
  std::lock_guard lock(mutex_);
  auto it = constants_.find(key);
  if (it != constants_.end()) return it->second;
  if (shared_ == nullptr || !is_derived(key)) return nullptr;
  ConstantPtr found = shared_->find(key);
  if (found != nullptr) constants_.emplace(key, found);
  return found;
}

ConstantPtr ConstantStore::put(Constant constant) {
  auto shared = std::make_shared<const Constant>(std::move(constant));
  // Only memory of its own: a view of a weight would outlive the weight's owner in another program.
  if (shared_ != nullptr && is_derived(shared->key) && shared->owner != nullptr) {
    shared = shared_->put(std::move(shared));
  }
  std::lock_guard lock(mutex_);
  return constants_.emplace(shared->key, shared).first->second;
}

std::shared_ptr<void> ConstantStore::packed(const plan::KernelState& state, size_t input,
                                            const Constant& constant, const ir::Layout& view) {
  const rm_kernel* kernel = state.kernel();
  if (kernel->packing == nullptr || kernel->prepack == nullptr) return nullptr;
  rm_packing packing{};
  packing.struct_size = sizeof packing;
  kernel->packing(state.get(), input, &packing);
  if (packing.bytes == 0) return nullptr;

  std::string key = constant.key + "\n" + std::string(backend::view(packing.layout)) + "\n" +
                    std::string(backend::view(kernel->op)) + std::to_string(input);
  for (size_t i = 0; i < view.dims.size(); ++i) {
    key += " " + std::to_string(view.dims[i]) + ":" + std::to_string(view.strides[i]);
  }
  key += "+" + std::to_string(view.offset);
  // Packing under the lock: two instances made at once must not hold two copies of the weights.
  std::lock_guard lock(mutex_);
  auto it = packed_.find(key);
  if (it != packed_.end()) return it->second.first;
  std::shared_ptr<void> memory = allocate_host(packing.bytes);
  rm_tensor source{};
  source.data = const_cast<char*>(static_cast<const char*>(constant.data)) +
                view.offset * static_cast<int64_t>(ir::size_bytes(view.dtype));
  source.device = {kDLCPU, 0};
  source.ndim = static_cast<int32_t>(view.dims.size());
  source.dtype = ir::to_dlpack(view.dtype);
  source.shape = const_cast<int64_t*>(view.dims.data());
  source.strides = const_cast<int64_t*>(view.strides.data());
  backend::check(kernel->prepack(state.get(), input, &source, memory.get()), "prepack");
  packed_.emplace(key, std::make_pair(memory, static_cast<int64_t>(packing.bytes)));
  return memory;
}

int64_t ConstantStore::packed_bytes() const {
  std::lock_guard lock(mutex_);
  int64_t total = 0;
  for (const auto& [key, entry] : packed_) total += entry.second;
  return total;
}

int64_t ConstantStore::derived_bytes() const {
  std::lock_guard lock(mutex_);
  int64_t total = 0;
  for (const auto& [key, c] : constants_) total += c->owner != nullptr ? c->bytes : 0;
  return total;
}

}  // namespace rm::runtime
