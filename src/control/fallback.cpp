// Parses and applies the fallback policy.
#include "control/fallback.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "control/reasons.hpp"

namespace rm::control {
namespace {

[[noreturn]] void reject(std::string_view text) {
  std::string accepted;
  for (const std::string_view category : categories()) {
    accepted += (accepted.empty() ? "" : ", ") + std::string(category);
  }
  throw_invalid("[fallback] expected warn, allow, error or error:<category,...> of " + accepted +
                "; got '" + std::string(text) + "'");
}

}  // namespace

FallbackPolicy FallbackPolicy::parse(std::string_view text) {
  FallbackPolicy policy;
  if (text == "warn") return policy;
  if (text == "allow") {
    policy.default_ = Action::kAllow;
    return policy;
  }
  if (text == "error") {
    policy.default_ = Action::kError;
    return policy;
  }
  std::string_view rest = text;
  if (!rest.starts_with("error:")) reject(text);
  rest.remove_prefix(6);
  const auto known = categories();
  while (true) {
    const size_t comma = rest.find(',');
    const std::string_view category = rest.substr(0, comma);
    if (std::find(known.begin(), known.end(), category) == known.end()) reject(text);
    policy.errors_.emplace(category);
    if (comma == std::string_view::npos) return policy;
    rest.remove_prefix(comma + 1);
  }
}

FallbackPolicy::Action FallbackPolicy::action_for(std::string_view code) const {
  if (errors_.contains(category_of(code))) return Action::kError;
  return default_;
}

}  // namespace rm::control
