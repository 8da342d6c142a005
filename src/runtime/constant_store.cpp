// Packing goes through the kernel's own description of the layout it wants.
#include "runtime/constant_store.hpp"

#include <set>

#include "backend/status.hpp"

namespace rm::runtime {
namespace {

// Several constants may be views of one piece of memory, which counts once.
int64_t memory_of(const WeakMap<const Constant>& constants) {
  std::set<const void*> seen;
  int64_t total = 0;
  constants.for_each([&](const Constant& c) {
    if (c.derived && seen.insert(c.owner.get()).second) total += c.bytes;
  });
  return total;
}

std::string packed_key(const select::Prepared& kernel, const rm_packing& packing, size_t input,
                       const Constant& constant, const ir::Layout& view) {
  // A layout's name means something within one backend only.
  std::string key = constant.key + "\n" + kernel.row->backend + "\n" +
                    std::string(backend::view(packing.layout)) + "\n" +
                    std::string(backend::view(kernel.state->kernel()->op)) + std::to_string(input);
  for (size_t i = 0; i < view.dims.size(); ++i) {
    key += " " + std::to_string(view.dims[i]) + ":" + std::to_string(view.strides[i]);
  }
  return key + "+" + std::to_string(view.offset);
}

rm_tensor source_of(const Constant& constant, const ir::Layout& view, DLDevice device) {
  rm_tensor source{};
  source.data = const_cast<char*>(static_cast<const char*>(constant.data)) +
                view.offset * static_cast<int64_t>(ir::size_bytes(view.dtype));
  source.device = device;
  source.ndim = static_cast<int32_t>(view.dims.size());
  source.dtype = ir::to_dlpack(view.dtype);
  source.shape = const_cast<int64_t*>(view.dims.data());
  source.strides = const_cast<int64_t*>(view.strides.data());
  return source;
}

}  // namespace

ConstantPtr SharedConstants::find(const std::string& key) const {
  std::lock_guard lock(mutex_);
  return constants_.find(key);
}

ConstantPtr SharedConstants::put(const ConstantPtr& constant) {
  std::lock_guard lock(mutex_);
  return constants_.put(constant->key, constant);
}

int64_t SharedConstants::bytes() const {
  std::lock_guard lock(mutex_);
  return memory_of(constants_);
}

void ConstantStore::put_weight(Constant weight) {
  std::string key = weight.key;
  weights_.emplace(std::move(key), std::make_shared<const Constant>(std::move(weight)));
}

ConstantPtr ConstantStore::find(const std::string& key) {
  if (auto it = weights_.find(key); it != weights_.end()) return it->second;
  std::lock_guard lock(mutex_);
  ConstantPtr found = derived_.find(key);
  if (found != nullptr || shared_ == nullptr) return found;
  found = shared_->find(key);
  return found == nullptr ? nullptr : derived_.put(key, found);
}

ConstantPtr ConstantStore::put(Constant constant) {
  auto made = std::make_shared<const Constant>(std::move(constant));
  // Only memory of its own is shared: a view would keep this program's weights for another one.
  if (shared_ != nullptr && made->derived) made = shared_->put(made);
  std::lock_guard lock(mutex_);
  return derived_.put(made->key, made);
}

PackedPtr ConstantStore::packed(const select::Prepared& prepared, size_t input,
                                const Constant& constant, const ir::Layout& view,
                                const RunCopy& run_copy) {
  const select::KernelState& state = *prepared.state;
  const rm_kernel* kernel = state.kernel();
  if (kernel->packing == nullptr || kernel->prepack == nullptr) return nullptr;
  rm_packing packing{};
  packing.struct_size = sizeof packing;
  kernel->packing(state.get(), input, &packing);
  if (packing.bytes == 0) return nullptr;

  const std::string key = packed_key(prepared, packing, input, constant, view);
  {
    std::lock_guard lock(mutex_);
    if (PackedPtr found = packed_.find(key)) return found;
  }
  const auto bytes = static_cast<int64_t>(packing.bytes);
  auto made = std::make_shared<PackedCopy>(PackedCopy{device_->allocate(packing.bytes), bytes});
  const rm_tensor source = source_of(constant, view, device_->id());
  auto work = [&] {
    backend::check(kernel->prepack(state.get(), input, &source, made->memory.get()), "prepack");
  };
  run_copy ? run_copy(work) : work();
  std::lock_guard lock(mutex_);
  return packed_.put(key, made);
}

int64_t ConstantStore::packed_bytes() const {
  std::lock_guard lock(mutex_);
  int64_t total = 0;
  packed_.for_each([&](const PackedCopy& copy) { total += copy.bytes; });
  return total;
}

int64_t ConstantStore::derived_bytes() const {
  std::lock_guard lock(mutex_);
  return memory_of(derived_);
}

}  // namespace rm::runtime
