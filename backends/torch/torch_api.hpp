// The C functions of libtorch that the bridge uses, found in the libtorch_cpu.so this process has
// already loaded.  Declared here from their documented meaning: no torch header, no torch at build
// time.  Needs torch >= 2.10 (torch_call_dispatcher); later functions are optional entries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace rm::torch_bridge {

using Stable = uint64_t;  // torch's StableIValue: a value or an owning pointer, by schema type

/// Non-zero: the call failed.
using TorchError = int32_t;

struct TorchApi {
  TorchError (*call_dispatcher)(const char* name, const char* overload, Stable* stack,
                                uint64_t abi_version);
  uint64_t (*abi_version)();
  TorchError (*create_tensor_from_blob)(void* data, int64_t ndim, const int64_t* sizes,
                                        const int64_t* strides, int64_t offset, int32_t dtype,
                                        int32_t device_type, int32_t device_index, void** out);
  TorchError (*delete_tensor)(void* tensor);
  TorchError (*copy)(void* dst, void* src, int32_t non_blocking);
  TorchError (*get_dim)(void* tensor, int64_t* out);
  TorchError (*get_sizes)(void* tensor, int64_t** out);  // borrowed from the tensor
  TorchError (*get_dtype)(void* tensor, int32_t* out);
  TorchError (*get_data_ptr)(void* tensor, void** out);  // of the first element
  TorchError (*is_defined)(void* tensor, bool* out);
  bool (*grad_enabled)();
  void (*set_grad_enabled)(bool enabled);
  TorchError (*new_list)(size_t reserve, void** out);
  TorchError (*list_push_back)(void* list, Stable element);
  TorchError (*list_size)(void* list, size_t* out);
  TorchError (*list_get)(void* list, size_t index, Stable* out);
  TorchError (*delete_list)(void* list);
  TorchError (*new_string)(const char* data, size_t length, void** out);
  // Optional entries, NULL before torch 2.13.
  TorchError (*new_box)(Stable** out);
  TorchError (*delete_box)(Stable* box);
  const char* (*last_error)();

  /// The value of a getter such as aoti_torch_dtype_float32; throws when libtorch lacks it.
  int32_t constant(const std::string& symbol) const;

  void* library;
};

/// NULL, and the reason in *why, while the process has no usable libtorch.  Looks again next time:
/// torch may be imported later.
const TorchApi* torch_api(std::string* why = nullptr);

/// torch_api(), or an exception with the reason.
const TorchApi& require_torch();

/// Throws with torch's own message when `error` is not zero.
void check(TorchError error, const char* what);

}  // namespace rm::torch_bridge
