// Which keys a mask lets anything attend to: static caches are mostly empty, padding is on the
// left, windows slide.
#pragma once

#include "ops/sdpa/shape.hpp"

namespace rm::cpu {

struct KeyRange {
  int64_t begin, end;  // empty: 0, 0
};

/// The smallest range of keys outside of which no query of heads [h0, h1) of batch b attends to
/// anything. Additive masks hide a key by -inf, or by the lowest number of their type where the row
/// has another; a row of lowest numbers alone attends to all keys alike, as in torch.
KeyRange attended(const SdpaShape& p, const SdpaData& data, int64_t b, int64_t h0, int64_t h1);

}  // namespace rm::cpu
