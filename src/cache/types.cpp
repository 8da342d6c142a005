#include "cache/types.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace rm::cache {
namespace {

constexpr std::pair<ArtefactKind, std::string_view> kKinds[] = {
    {ArtefactKind::kProgram, "program"}, {ArtefactKind::kVendor, "vendor"},
    {ArtefactKind::kVerdict, "verdict"}, {ArtefactKind::kFront, "front"},
    {ArtefactKind::kFileDigest, "file digest"}};

}  // namespace

std::string_view kind_name(ArtefactKind kind) {
  for (const auto& [value, name] : kKinds) {
    if (value == kind) return name;
  }
  return "unknown";
}

std::optional<ArtefactKind> kind_from_name(std::string_view name) {
  for (const auto& [value, known] : kKinds) {
    if (known == name) return value;
  }
  return std::nullopt;
}

std::optional<ArtefactKind> kind_from_number(uint16_t number) {
  for (const auto& [value, name] : kKinds) {
    if (static_cast<uint16_t>(value) == number) return value;
  }
  return std::nullopt;
}

const Section* Entry::section(std::string_view name) const {
  const auto found = std::find_if(sections.begin(), sections.end(),
                                  [&](const Section& section) { return section.name == name; });
  return found == sections.end() ? nullptr : &*found;
}

}  // namespace rm::cache
