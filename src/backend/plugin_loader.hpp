// Opens a plugin file.  Absolute paths only, RTLD_NOW | RTLD_LOCAL, never dlclose: kernels of a
// plugin may be on any thread's stack, and its tables are used until the process ends.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "backend/c_api_backend.hpp"

namespace rm::backend {

/// The build id is the content digest of the file.  Throws rm::Error with a reason: RM401 (a
/// library the plugin needs is missing), RM403 (another ABI major), RM405 (not a plugin, a
/// sanitizer this process does not run, a table that does not add up).
std::unique_ptr<CApiBackend> load_plugin(const std::filesystem::path& path, Options options = {});

/// The plugins of a folder, `rm_backend_*.so`, sorted by name.  A folder that does not exist has
/// none; a relative path throws.
std::vector<std::filesystem::path> plugin_files(const std::filesystem::path& folder);

}  // namespace rm::backend
