// Looks libtorch up by soname without loading it.
#include "torch_api.hpp"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

#include "rm/plugin.hpp"

namespace rm::torch_bridge {
namespace {

template <class Fn>
bool find(void* library, const char* symbol, Fn& out) {
  out = reinterpret_cast<Fn>(dlsym(library, symbol));
  return out != nullptr;
}

/// Empty, or what is missing.
std::string fill(void* library, TorchApi& api) {
  std::string missing;
  const auto need = [&](const char* symbol, auto& out) {
    if (!find(library, symbol, out) && missing.empty()) missing = symbol;
  };
  need("torch_call_dispatcher", api.call_dispatcher);
  need("aoti_torch_abi_version", api.abi_version);
  need("aoti_torch_create_tensor_from_blob", api.create_tensor_from_blob);
  need("aoti_torch_delete_tensor_object", api.delete_tensor);
  need("aoti_torch_copy_", api.copy);
  need("aoti_torch_get_dim", api.get_dim);
  need("aoti_torch_get_sizes", api.get_sizes);
  need("aoti_torch_get_dtype", api.get_dtype);
  need("aoti_torch_is_defined", api.is_defined);
  need("aoti_torch_grad_mode_is_enabled", api.grad_enabled);
  need("aoti_torch_grad_mode_set_enabled", api.set_grad_enabled);
  need("torch_new_list_reserve_size", api.new_list);
  need("torch_list_push_back", api.list_push_back);
  need("torch_list_size", api.list_size);
  need("torch_list_get_item", api.list_get);
  need("torch_delete_list", api.delete_list);
  need("torch_new_string_handle", api.new_string);
  find(library, "torch_new_stable_ivalue", api.new_box);
  find(library, "torch_delete_stable_ivalue", api.delete_box);
  find(library, "torch_exception_get_what_without_backtrace", api.last_error);
  api.library = library;
  return missing;
}

}  // namespace

int32_t TorchApi::constant(const std::string& symbol) const {
  int32_t (*getter)() = nullptr;
  if (!find(library, symbol.c_str(), getter)) {
    throw plugin::Error(RM_UNIMPLEMENTED,
                        "[torch bridge] expected a value libtorch's C interface "
                        "knows, got one that needs " +
                            symbol);
  }
  return getter();
}

const TorchApi* torch_api(std::string* why) {
  static std::mutex mutex;
  static TorchApi api{};
  static std::atomic<bool> ready = false;  // launches only read it
  if (ready.load(std::memory_order_acquire)) return &api;
  const std::lock_guard lock(mutex);
  void* library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    if (why)
      *why = "[torch bridge] expected libtorch_cpu.so in this process, got none; import torch";
    return nullptr;
  }
  TorchApi found{};
  const std::string missing = fill(library, found);
  if (!missing.empty()) {
    if (why) *why = "[torch bridge] expected torch >= 2.10, got one without " + missing;
    return nullptr;
  }
  if (!ready.load(std::memory_order_relaxed)) {
    api = found;
    ready.store(true, std::memory_order_release);
  }
  return &api;
}

const TorchApi& require_torch() {
  std::string why;
  const TorchApi* api = torch_api(&why);
  if (api == nullptr) throw plugin::Error(RM_FAILED_PRECONDITION, why);
  return *api;
}

void check(TorchError error, const char* what) {
  if (error == 0) return;
  const TorchApi& api = require_torch();
  const char* text = api.last_error == nullptr ? nullptr : api.last_error();
  throw plugin::Error(
      RM_UNKNOWN, std::string("[torch bridge] ") + what +
                      " failed: " + (text == nullptr ? "torch wrote the reason to stderr" : text));
}

}  // namespace rm::torch_bridge
