// Plugin files: checked before dlopen where dlopen would end the process, explained where it fails.
#include "backend/plugin_loader.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>

#include "backend/status.hpp"
#include "base/error.hpp"
#include "base/hash.hpp"

namespace rm::backend {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const fs::path& path, rm_code code, const std::string& what,
                       const char* reason = "RM405") {
  throw Error(code, "[plugin " + path.string() + "] " + what, reason);
}

std::string read_bytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path, RM_NOT_FOUND, "expected a readable file, got none");
  return std::string(std::istreambuf_iterator<char>(file), {});
}

/// A sanitizer's runtime refuses to start late and ends the process: ask before dlopen does.
void check_sanitizers(const fs::path& path, const std::string& bytes) {
  constexpr std::array<std::pair<const char*, const char*>, 3> kRuntimes = {
      {{"__asan_init", "address"}, {"__tsan_init", "thread"}, {"__msan_init", "memory"}}};
  for (const auto& [symbol, name] : kRuntimes) {
    if (bytes.find(symbol) != std::string::npos && dlsym(RTLD_DEFAULT, symbol) == nullptr) {
      fail(path, RM_FAILED_PRECONDITION,
           std::string("expected a plain build, got one with the ") + name +
               " sanitizer, which this process does not run; rebuild without RM_SANITIZE");
    }
  }
}

}  // namespace

std::unique_ptr<CApiBackend> load_plugin(const fs::path& path, Options options) {
  if (!path.is_absolute()) {
    fail(path, RM_INVALID_ARGUMENT, "expected an absolute path, got a relative one");
  }
  const std::string bytes = read_bytes(path);
  if (bytes.compare(0, 4, "\177ELF") != 0) {
    fail(path, RM_INVALID_ARGUMENT, "expected an ELF shared library, got another kind of file");
  }
  check_sanitizers(path, bytes);

  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* text = dlerror();
    const std::string why = text == nullptr ? "dlopen gave no reason" : text;
    // glibc's wording for a DT_NEEDED entry that is not on the system: the vendor's library.
    const bool missing = why.find("cannot open shared object file") != std::string::npos;
    fail(path, RM_UNAVAILABLE, "dlopen failed: " + why, missing ? "RM401" : "RM405");
  }
  const auto query = reinterpret_cast<rm_backend_query_fn>(dlsym(library, RM_BACKEND_QUERY_SYMBOL));
  if (query == nullptr) {
    fail(path, RM_INVALID_ARGUMENT,
         "expected the symbol " RM_BACKEND_QUERY_SYMBOL ", got a library without it");
  }
  const rm_backend_api* api = nullptr;
  try {
    api = query(RM_ABI_VERSION, host_api());
  } catch (...) {
    fail(path, RM_INTERNAL, RM_BACKEND_QUERY_SYMBOL " threw across the C line");
  }
  if (api == nullptr) {
    fail(path, RM_FAILED_PRECONDITION,
         "it does not speak ABI major " + std::to_string(RM_ABI_MAJOR) +
             "; install the plugin built for this version of rm_abstract",
         "RM403");
  }
  return std::make_unique<CApiBackend>(api, PluginIdentity{path.string(), hash_bytes(bytes).hex()},
                                       std::move(options));
}

std::vector<fs::path> plugin_files(const fs::path& folder) {
  if (!folder.is_absolute()) {
    fail(folder, RM_INVALID_ARGUMENT, "expected an absolute folder, got a relative one");
  }
  std::vector<fs::path> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("rm_backend_") && name.ends_with(".so")) files.push_back(entry.path());
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    fail(folder, RM_PERMISSION_DENIED, "cannot be listed: " + error.message());
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace rm::backend
