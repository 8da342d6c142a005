// Reason codes: one vocabulary for logs, exceptions, reports and JSON (reasons.def is the table).
#pragma once

#include <span>
#include <string_view>

namespace rm::control {

struct Reason {
  std::string_view code;      ///< "RM402"
  std::string_view text;      ///< one line
  std::string_view remedy;    ///< what the user can do
  std::string_view category;  ///< "device"
  std::string_view anchor;    ///< docs/reason_codes.md#rm402
};

/// In the order of the codes.
std::span<const Reason> reasons();

/// NULL for a code that is not in the table.
const Reason* find_reason(std::string_view code);

/// "routing", "capture", "compile", "device", "correctness", "cache"; empty for another code.
std::string_view category_of(std::string_view code);

/// The six categories, in the order of their codes.
std::span<const std::string_view> categories();

}  // namespace rm::control
