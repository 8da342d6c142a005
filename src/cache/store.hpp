// One cache directory: names, trust, loading, publishing, quarantine, listing.
//
//   v1/objects/ab/<key>[-<guards>].rmc   immutable, 0400      v1/tmp/         being written
//   v1/locks/ab/<key>                    flock only           v1/stats/0..f   counters
//   v1/kernels/     verdicts of src/selfcheck
//   v1/quarantine/                       the newest 16        v1/gc.lock
//
// Nothing is modified in place: files appear by link and disappear by unlink or rename.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "base/file.hpp"
#include "cache/format.hpp"

namespace rm::cache {

inline constexpr char kVersionDirectory[] = "v1";

struct ObjectInfo {
  std::string path, name;  // name: without folder and ".rmc"
  uint64_t size = 0;
  int64_t used_s = 0;  // mtime: of the last use, with a grain of ten minutes
  ino_t inode = 0;
  dev_t device = 0;
};

class Store {
 public:
  struct Settings {
    std::string root;
    bool writable = true;
    bool shared = false;  // somebody else's: entries need a code when there is a secret
    bool trust = false;   // use a directory that others can write to
    std::optional<Digest> secret;
  };

  /// Creates what is missing when writable. Throws rm::Error when the directory cannot be used:
  /// not creatable, not a directory, or writable by others (and not trusted).
  explicit Store(Settings settings);

  const std::string& root() const { return settings_.root; }
  std::string directory(std::string_view name) const { return version_ + "/" + std::string(name); }
  std::string object_path(const Digest& key, const Digest& guard_digest) const;
  std::string lock_path(const Digest& key) const;
  bool writable() const { return settings_.writable; }
  /// flock means nothing on network file systems: then nobody waits for anybody.
  bool locks_work() const { return locks_work_; }

  struct Loaded {
    Decoded decoded;
    ObjectInfo info;
  };
  /// nullopt when there is no such file. Content never throws; failing system calls do.
  std::optional<Loaded> load(const std::string& path, const DecodeRules& rules) const;
  DecodeRules rules() const;
  /// Files of the key that carry guards, newest use first.
  std::vector<ObjectInfo> guarded(const Digest& key) const;

  /// Throws FileError when the entry could not be stored.
  Published publish(const Entry& entry, uint64_t* written_bytes);
  /// Marks the file as used now, if its mark is older than ten minutes. Never fails.
  void touch(const ObjectInfo& info) const noexcept;
  /// Unless another file has the name by now. Never fails.
  void remove(const ObjectInfo& info) const noexcept;
  void quarantine(const ObjectInfo& info) const noexcept;

  /// Every object; of what disappears meanwhile, or cannot be read, nothing is listed.
  std::vector<ObjectInfo> objects() const;

 private:
  void check_trust(const std::string& path) const;
  void create_directories() const;
  bool still_there(const ObjectInfo& info) const noexcept;

  Settings settings_;
  std::string version_;
  bool locks_work_ = true;
};

/// The paths of a directory's regular files and folders, without those that start with a dot;
/// empty when it cannot be read.
std::vector<std::string> names_in(const std::string& directory);
/// 32 bytes made from a file's whole content. Throws rm::Error when the file is readable by others
/// or shorter than 16 bytes: such a secret is none.
Digest read_secret(const std::string& path);

}  // namespace rm::cache
