// What the steps that plans fuse should give (docs/operators.md: linears, append_sdpa). They are no
// operators of the graph, so src/ops has no reference of them; these are made of those it has.
#pragma once

#include <string_view>
#include <vector>

#include "selfcheck/expected.hpp"

namespace rm::selfcheck {

bool is_fused(std::string_view op);

/// As `expected`, for one of these.
std::vector<Part> expected_fused(const Shape& shape, const std::vector<Filled>& inputs,
                                 const std::vector<Filled>& before);

}  // namespace rm::selfcheck
