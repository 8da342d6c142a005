// One row, run once on random operands and compared with the operator's reference.
#pragma once

#include <cstdint>
#include <string>

#include "select/kernel_table.hpp"
#include "selfcheck/alike.hpp"
#include "selfcheck/place.hpp"

namespace rm::selfcheck {

/// Empty when the row's results are right, and nothing around them was written; else what was wrong.
/// A row whose launch fails is wrong, too. `place`: where it is launched, null for a row of the host.
/// Throws rm::Error when the row cannot be prepared, or there is no memory for the check.
std::string check_row(const select::Row& row, uint32_t config, const Shape& shape,
                      Place* place = nullptr);

}  // namespace rm::selfcheck
