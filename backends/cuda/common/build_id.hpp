// The linker's build id of this plugin (sha1 of its contents) in hex: the digest of its kernels.
#pragma once

#include <string>

namespace rm::cuda {
const std::string& build_id();
}  // namespace rm::cuda
