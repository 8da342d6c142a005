// Identity of binaries: what made an artefact is part of its key by content, not by version.
#pragma once

#include <string>

#include "base/hash.hpp"

namespace rm::cache {

/// Digest of the library or program that contains the core, computed once a process.
const Digest& core_digest();

/// Bytes that change whenever the file may have: resolved path, device, inode, size, times.
/// Empty when the file is too young for its times to tell two writes apart.
std::string file_identity(const std::string& path);

}  // namespace rm::cache
