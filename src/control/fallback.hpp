// What happens when acceleration is refused: warn | allow | error[:category,...].
#pragma once

#include <set>
#include <string>
#include <string_view>

namespace rm::control {

class FallbackPolicy {
 public:
  enum class Action { kWarn, kAllow, kError };

  /// "error" raises for every category; "error:device,compile" for those, and warns for the rest.
  /// Throws rm::Error(RM_INVALID_ARGUMENT) naming the accepted values.
  static FallbackPolicy parse(std::string_view text);

  /// `code` is a reason code; one outside the table is treated as the policy's default.
  Action action_for(std::string_view code) const;

 private:
  Action default_ = Action::kWarn;
  std::set<std::string, std::less<>> errors_;  // categories; empty with kError = all
};

}  // namespace rm::control
