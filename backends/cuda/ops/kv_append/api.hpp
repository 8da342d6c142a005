// Writes new keys and values into their caches: cache[b, g, positions[b] + s, :] = new[b, g, s, :].
// Positions outside the cache are not written. Dense last axes, 16-bit or 32-bit elements.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

struct KvAppend {
  Tensor k, v;              // [B, G, S, D]
  Tensor k_cache, v_cache;  // [B, G, T, D]
  Tensor positions;         // [B] int32 or int64
};

std::span<const KernelRow<KvAppend>> kv_append_rows();
Status kv_append(const KvAppend& p, const char* kernel, Stream stream);

}  // namespace rm::cuda_ops
