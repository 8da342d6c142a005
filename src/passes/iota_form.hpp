// Values that are an arithmetic progression along one axis: what masks and range lookups are made
// of, behind reshapes, expands, slices and additions.
#pragma once

#include <optional>

#include "passes/rewriter.hpp"

namespace rm::passes {

/// value[i] = start + step * i[axis]; axis -1: the constant `start` everywhere.
struct IotaForm {
  ir::Dim start;
  int64_t step = 0;
  int axis = -1;
};

std::optional<IotaForm> iota_form(const Rewriter& rw, ir::ValueId v);
/// The same for the result of a node that is not emitted yet.
std::optional<IotaForm> iota_form(const Rewriter& rw, const ir::Node& node);

/// Lowest and highest value over a tensor of shape `dims` (of at least one element).
struct IotaRange {
  ir::Dim lo, hi;
};
IotaRange range(const IotaForm& form, const ir::Dims& dims);

}  // namespace rm::passes
