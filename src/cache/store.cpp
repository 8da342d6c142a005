#include "cache/store.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <ctime>

#include "base/log.hpp"

namespace rm::cache {
namespace {

constexpr std::string_view kExtension = ".rmc";
constexpr int64_t kTouchAfterSeconds = 600;  // an access time per use would cost a write per use
constexpr size_t kQuarantineKept = 16;
constexpr uint64_t kQuarantineMaxBytes = uint64_t{64} << 20;  // 16 large ones were a second cache

/// statfs types of file systems whose flock may be local to one machine.
bool is_network(const std::string& path) {
  struct statfs status;
  if (statfs(path.c_str(), &status) != 0) return false;
  constexpr uint32_t kNetwork[] = {0x6969 /* NFS */, 0xFF534D42 /* CIFS */, 0xFE534D42 /* SMB2 */,
                                   0x517B /* SMB */, 0x5346414F /* AFS */};
  const auto type = static_cast<uint32_t>(status.f_type);
  return std::find(std::begin(kNetwork), std::end(kNetwork), type) != std::end(kNetwork);
}

ObjectInfo info_of(const std::string& path, const struct stat& status) {
  ObjectInfo info;
  info.path = path;
  info.name = path.substr(path.rfind('/') + 1);
  if (info.name.ends_with(kExtension)) info.name.resize(info.name.size() - kExtension.size());
  info.size = static_cast<uint64_t>(status.st_size);
  info.used_s = status.st_mtim.tv_sec;
  info.inode = status.st_ino;
  info.device = status.st_dev;
  return info;
}

}  // namespace

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  DIR* stream = opendir(directory.c_str());
  if (stream == nullptr) return names;
  while (const dirent* entry = readdir(stream)) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  closedir(stream);
  return names;
}

Digest read_secret(const std::string& path) {
  const struct stat status = file_status(open_file(path, OpenFor::kRead), path);
  if ((status.st_mode & 077) != 0 || status.st_size < 16) {
    throw Error(RM_PERMISSION_DENIED,
                "[cache] expected a secret of at least 16 bytes that only its owner can read in '" +
                    path + "', got mode " + std::to_string(status.st_mode & 0777) + " (decimal), " +
                    std::to_string(status.st_size) + " bytes; try chmod 600");
  }
  return hash_file(path);
}

Store::Store(Settings settings)
    : settings_(std::move(settings)), version_(settings_.root + "/" + kVersionDirectory) {
  if (settings_.writable) {
    create_directories();
  } else if (!path_status(version_)) {
    throw Error(RM_NOT_FOUND, "[cache] expected a cache in '" + settings_.root + "', got none");
  }
  locks_work_ = !is_network(version_);
  // With a secret a shared tier is believed entry by entry, whoever owns the directory.
  if (settings_.trust || (settings_.shared && settings_.secret)) return;
  check_trust(settings_.root);
  for (const char* name : {"", "/objects", "/tmp", "/locks", "/stats", "/quarantine"}) {
    check_trust(version_ + name);
  }
}

void Store::check_trust(const std::string& path) const {
  struct stat status;
  if (stat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return;
    throw FileError("stat", path, errno);
  }
  const bool own = status.st_uid == geteuid() || (settings_.shared && status.st_uid == 0);
  if (!S_ISDIR(status.st_mode) || !own || (status.st_mode & 022) != 0) {
    char mode[8];
    snprintf(mode, sizeof(mode), "%04o", static_cast<unsigned>(status.st_mode & 07777));
    throw Error(RM_PERMISSION_DENIED,
                "[cache] expected a directory of this user that nobody else can write to, got '" +
                    path + "' of user " + std::to_string(status.st_uid) + " with mode " + mode +
                    "; try chmod go-w, another RM_CACHE_DIR, or RM_CACHE_TRUST=1");
  }
}

void Store::create_directories() const {
  for (const char* name : {"objects", "tmp", "locks", "stats", "quarantine"}) {
    try {
      make_directories(directory(name));
    } catch (const FileError& error) {
      // A read-only cache that is already there still serves; stores fail and are counted.
      const bool read_only = error.errno_value() == EROFS || error.errno_value() == EACCES;
      if (!read_only || !path_status(directory("objects"))) throw;
    }
  }
}

std::string Store::object_path(const Digest& key, const Digest& guard_digest) const {
  const std::string hex = key.hex();
  std::string path = directory("objects") + "/" + hex.substr(0, 2) + "/" + hex;
  if (guard_digest != Digest{}) path += "-" + guard_digest.hex();
  return path.append(kExtension);
}

std::string Store::lock_path(const Digest& key) const {
  const std::string hex = key.hex();
  return directory("locks") + "/" + hex.substr(0, 2) + "/" + hex;
}

DecodeRules Store::rules() const {
  DecodeRules rules;
  rules.secret = &settings_.secret;
  rules.require_code = settings_.shared && settings_.secret.has_value();
  return rules;
}

std::optional<Store::Loaded> Store::load(const std::string& path, const DecodeRules& rules) const {
  const std::optional<struct stat> named = path_status(path);
  if (!named) return std::nullopt;
  Loaded out{{}, info_of(path, *named)};
  if (S_ISLNK(named->st_mode)) {  // entries are files: whoever made the link, it is not ours
    out.decoded.why = "a symbolic link";
    return out;
  }
  std::optional<Fd> file = open_if_exists(path, OpenFor::kReadNoLink);
  if (!file) return std::nullopt;
  const struct stat status = file_status(*file, path);
  out.info = info_of(path, status);
  if (!S_ISREG(status.st_mode)) {
    out.decoded.why = "not a regular file";
    return out;
  }
  try {
    auto bytes = std::make_shared<const FileBytes>(*file, out.info.size, path);
    const ByteSpan span = bytes->bytes();
    const bool is_mapped = out.info.size >= FileBytes::kMapFromBytes;
    const auto kept = is_mapped ? std::make_shared<const Fd>(std::move(*file)) : nullptr;
    out.decoded = decode_entry(span, std::move(bytes), rules, kept);
  } catch (const FileError& error) {
    if (error.errno_value() != EIO) throw;
    out.decoded.why = error.what();  // cut short under us, or a bad disk
  }
  return out;
}

std::vector<ObjectInfo> Store::guarded(const Digest& key) const {
  const std::string plain = object_path(key, {});
  const std::string folder = plain.substr(0, plain.rfind('/'));
  const std::string prefix = key.hex() + "-";
  std::vector<ObjectInfo> out;
  for (const std::string& name : names_in(folder)) {
    if (!name.starts_with(prefix) || !name.ends_with(kExtension)) continue;
    const std::string path = folder + "/" + name;
    if (const auto status = path_status(path)) out.push_back(info_of(path, *status));
  }
  std::sort(out.begin(), out.end(),
            [](const ObjectInfo& a, const ObjectInfo& b) { return a.used_s > b.used_s; });
  return out;
}

Published Store::publish(const Entry& entry, uint64_t* written_bytes) {
  const EncodedEntry encoded = encode_entry(entry, settings_.secret);
  const std::string path = object_path(entry.key, entry.guard_digest);
  *written_bytes = 0;
  for (ByteSpan piece : encoded.pieces) *written_bytes += piece.size();
  for (int attempt = 0;; ++attempt) {
    try {
      make_directories(path.substr(0, path.rfind('/')));
      return publish_file(directory("tmp"), path, encoded.pieces);
    } catch (const FileError& error) {
      // Somebody cleared the cache while we ran: put the directories back, once.
      if (error.errno_value() != ENOENT || attempt > 0) throw;
      create_directories();
    }
  }
}

void Store::touch(const ObjectInfo& info) const noexcept {
  const int64_t age = time(nullptr) - info.used_s;
  if (age >= 0 && age < kTouchAfterSeconds) return;
  utimensat(AT_FDCWD, info.path.c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
}

bool Store::still_there(const ObjectInfo& info) const noexcept {
  struct stat status;
  return lstat(info.path.c_str(), &status) == 0 && status.st_ino == info.inode &&
         status.st_dev == info.device;
}

void Store::remove(const ObjectInfo& info) const noexcept {
  if (settings_.writable && still_there(info)) unlink(info.path.c_str());
}

void Store::quarantine(const ObjectInfo& info) const noexcept {
  if (!settings_.writable || !still_there(info)) return;
  try {
    const std::string folder = directory("quarantine");
    const std::string target =
        folder + "/" + std::to_string(time(nullptr)) + "-" + info.name.substr(0, 129);
    const bool keep = info.size <= kQuarantineMaxBytes;
    if (!keep || rename(info.path.c_str(), target.c_str()) != 0) unlink(info.path.c_str());
    std::vector<std::string> kept = names_in(folder);
    std::sort(kept.begin(), kept.end());  // names start with the time
    for (size_t i = 0; i + kQuarantineKept < kept.size(); ++i) {
      unlink((folder + "/" + kept[i]).c_str());
    }
  } catch (const std::exception& error) {  // out of memory, at worst
    log_warn(LogTopic::kCache, error.what());
  }
}

std::vector<ObjectInfo> Store::objects() const {
  std::vector<ObjectInfo> out;
  const std::string root = directory("objects");
  for (const std::string& shard : names_in(root)) {
    const std::string folder = root + "/" + shard;
    for (const std::string& name : names_in(folder)) {
      if (!name.ends_with(kExtension)) continue;
      const std::string path = folder + "/" + name;
      struct stat status;
      if (lstat(path.c_str(), &status) == 0) out.push_back(info_of(path, status));
    }
  }
  return out;
}

}  // namespace rm::cache
