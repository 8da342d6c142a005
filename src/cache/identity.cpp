#include "cache/identity.hpp"

#include <dlfcn.h>
#include <sys/stat.h>

#include <climits>
#include <cstdlib>
#include <ctime>

#include "base/error.hpp"
#include "base/file.hpp"
#include "cache/compile_cache.hpp"
#include "cache/state.hpp"

namespace rm::cache {

const Digest& core_digest() {
  static const Digest digest = [] {
    Dl_info info;
    if (dladdr(reinterpret_cast<const void*>(&core_digest), &info) == 0 ||
        info.dli_fname == nullptr) {
      throw Error(RM_INTERNAL, "[cache] expected the core to lie in a file, got none");
    }
    // For a program the loader gives argv[0], which need not be a path.
    const bool is_path = path_status(info.dli_fname).has_value();
    return hash_file(is_path ? info.dli_fname : "/proc/self/exe");
  }();
  return digest;
}

std::string file_identity(const std::string& path) {
  char resolved[PATH_MAX];
  struct stat status;
  if (realpath(path.c_str(), resolved) == nullptr || stat(resolved, &status) != 0) {
    throw FileError("stat", path, errno);
  }
  constexpr int64_t kGrainSeconds = 2;  // of the coarsest time stamps (FAT); others are finer
  const int64_t newest = std::max(status.st_mtim.tv_sec, status.st_ctim.tv_sec);
  if (time(nullptr) - newest <= kGrainSeconds) return {};
  std::string out(resolved);
  for (const int64_t value :
       {static_cast<int64_t>(status.st_dev), static_cast<int64_t>(status.st_ino),
        static_cast<int64_t>(status.st_size), static_cast<int64_t>(status.st_mtim.tv_sec),
        static_cast<int64_t>(status.st_mtim.tv_nsec), static_cast<int64_t>(status.st_ctim.tv_sec),
        static_cast<int64_t>(status.st_ctim.tv_nsec)}) {
    out += '\0' + std::to_string(value);
  }
  return out;
}

Digest CompileCache::file_digest(const std::string& path) {
  const std::string identity = file_identity(path);
  if (identity.empty()) return hash_file(path);
  State& own = state();
  {
    const std::lock_guard guard(own.mutex);
    const auto known = own.file_digests.find(identity);
    if (known != own.file_digests.end()) return known->second;
  }
  const Key key = KeyBuilder(ArtefactKind::kFileDigest)
                      .set(KeyField::kProgram, identity)
                      .set(KeyField::kSalt, settings_.salt)
                      .finish();
  const auto hash_now = [&] {
    const Digest digest = hash_file(path);
    if (file_identity(path) != identity) {
      throw Error(RM_ABORTED, "[cache] expected '" + path +
                                  "' to stay as it is while it is read, "
                                  "got a change");
    }
    return Artefact{{{"digest", digest.hex()}}, {}, "file digest", {}};
  };
  const EntryPtr entry = get_or_compile(key, hash_now).entry;
  const Section* section = entry->section("digest");
  if (section == nullptr) {
    throw Error(RM_DATA_LOSS, "[cache] expected a digest for '" + path + "', got another record");
  }
  const Digest digest = Digest::from_hex(
      {reinterpret_cast<const char*>(section->bytes.data()), section->bytes.size()});
  const std::lock_guard guard(own.mutex);
  own.file_digests.emplace(identity, digest);
  return digest;
}

}  // namespace rm::cache
