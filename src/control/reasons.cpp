// The table of reasons.def as data.
#include "control/reasons.hpp"

#include <algorithm>
#include <array>

namespace rm::control {
namespace {

constexpr std::array<std::string_view, 7> kCategories = {
    "routing", "capture", "compile", "device", "correctness", "cache", "training"};

constexpr std::string_view category(std::string_view code) {
  const bool known = code.size() == 5 && code.starts_with("RM") && code[2] >= '1' && code[2] <= '7';
  return known ? kCategories[static_cast<size_t>(code[2] - '1')] : std::string_view();
}

constexpr Reason kReasons[] = {
#define RM_REASON(code, text, remedy) \
  {#code, text, remedy, category(#code), "docs/reason_codes.md#" #code},
#include "control/reasons.def"
#undef RM_REASON
};

}  // namespace

std::span<const Reason> reasons() { return kReasons; }

const Reason* find_reason(std::string_view code) {
  const auto* at = std::find_if(std::begin(kReasons), std::end(kReasons),
                                [&](const Reason& reason) { return reason.code == code; });
  return at == std::end(kReasons) ? nullptr : at;
}

std::string_view category_of(std::string_view code) { return category(code); }

std::span<const std::string_view> categories() { return kCategories; }

}  // namespace rm::control
