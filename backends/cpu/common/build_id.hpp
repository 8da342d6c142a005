// The linker's build id of this plugin (sha1 of its contents) in hex.
#pragma once

#include <string>

namespace rm::cpu {
const std::string& build_id();
}  // namespace rm::cpu
