// The table behind options.hpp: written once by initialize(), read only afterwards.
#include "common/options.hpp"

#include <map>

namespace rm::cpu {
namespace {
std::map<std::string, std::string, std::less<>>& table() {
  static std::map<std::string, std::string, std::less<>> options;
  return options;
}
}  // namespace

void set_plugin_options(rm_options options) {
  for (size_t i = 0; i < options.size; ++i) {
    const rm_option& o = options.data[i];
    table()[std::string(o.key.data, o.key.size)] = std::string(o.value.data, o.value.size);
  }
}

std::string plugin_option(std::string_view key) {
  const auto found = table().find(key);
  return found == table().end() ? std::string() : found->second;
}

}  // namespace rm::cpu
