// Looking after the directory: listing, verifying, eviction, clearing, importing.
#include <dirent.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>

#include "base/error.hpp"
#include "base/log.hpp"
#include "cache/compile_cache.hpp"
#include "cache/state.hpp"

namespace rm::cache {
namespace {

constexpr int64_t kHour = 3600, kDay = 86400;

struct Candidate {
  ObjectInfo info;
};

std::optional<EntryInfo> read_info(const ObjectInfo& object) {
  try {
    const auto file = open_if_exists(object.path, OpenFor::kReadNoLink);
    if (!file) return std::nullopt;
    std::byte raw[kHeaderBytes];
    if (read_at(*file, 0, raw, object.path) != kHeaderBytes) return std::nullopt;
    const auto header = decode_header(raw);
    if (!header || header->metadata_bytes > object.size) return std::nullopt;
    std::string json(header->metadata_bytes, '\0');
    const auto out = std::as_writable_bytes(std::span(json));
    if (read_at(*file, kHeaderBytes, out, object.path) != json.size()) return std::nullopt;
    auto metadata = decode_metadata(json);
    if (!metadata) return std::nullopt;
    return EntryInfo{object, *header, std::move(*metadata)};
  } catch (const FileError& error) {
    log_debug(LogTopic::kCache, error.what());
    return std::nullopt;
  }
}

/// Oldest use first. A mark in the future (the clock was wrong, or is) says nothing: oldest.
int64_t order_of(const ObjectInfo& info, int64_t now) {
  return info.used_s > now + 60 ? 0 : info.used_s;
}

/// The writer of "<host>.<pid>.<random>" is gone, or can no longer be asked.
bool is_abandoned(const std::string& name, int64_t age_s) {
  char host[256] = "localhost";
  gethostname(host, sizeof(host) - 1);
  const std::string prefix = std::string(host) + ".";
  if (!name.starts_with(prefix)) return age_s > kDay;
  const long pid = std::strtol(name.c_str() + prefix.size(), nullptr, 10);
  const bool dead = pid <= 0 || (kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH);
  return age_s > kHour && dead;
}

uint64_t reap_temporary_files(const std::string& folder, int64_t now, bool dry_run) {
  uint64_t count = 0;
  for (const std::string& name : names_in(folder)) {
    const std::string path = folder + "/" + name;
    struct stat status;
    if (lstat(path.c_str(), &status) != 0 || S_ISDIR(status.st_mode)) continue;
    if (!is_abandoned(name, now - status.st_mtim.tv_sec)) continue;
    if (dry_run || unlink(path.c_str()) == 0) ++count;
  }
  return count;
}

/// A lock file is removed while it is held, and try_acquire looks at the name again after it got
/// the lock: nobody ends up with a lock on a file without a name.
void reap_lock_files(const std::string& folder, int64_t now) {
  for (const std::string& shard : names_in(folder)) {
    for (const std::string& name : names_in(folder + "/" + shard)) {
      const std::string path = folder + "/" + shard + "/" + name;
      struct stat status;
      if (lstat(path.c_str(), &status) != 0 || now - status.st_mtim.tv_sec < kHour) continue;
      try {
        if (const auto lock = FileLock::try_acquire(path)) unlink(path.c_str());
      } catch (const FileError& error) {
        log_debug(LogTopic::kCache, error.what());
      }
    }
  }
}

/// Verdicts on kernels that nobody asked for or added to in that time: of other builds or machines.
void drop_old_records(const std::string& folder, int64_t now, int64_t max_age_s) {
  for (const std::string& name : names_in(folder)) {
    const std::string path = folder + "/" + name;
    struct stat status;
    if (max_age_s <= 0 || lstat(path.c_str(), &status) != 0) continue;
    if (now - status.st_mtim.tv_sec > max_age_s) unlink(path.c_str());
  }
}

/// Directories of older schemas, untouched for two weeks.
void drop_old_versions(const std::string& root, int64_t now) {
  const int current = std::atoi(kVersionDirectory + 1);
  for (const std::string& name : names_in(root)) {
    const bool is_version =
        name.size() > 1 && name[0] == 'v' &&
        std::all_of(name.begin() + 1, name.end(), [](char c) { return c >= '0' && c <= '9'; });
    struct stat status;
    const std::string path = root + "/" + name;
    if (!is_version || std::atoi(name.c_str() + 1) >= current) continue;
    if (lstat(path.c_str(), &status) != 0 || now - status.st_mtim.tv_sec < 14 * kDay) continue;
    std::error_code ignored;  // what stays is dropped next time
    std::filesystem::remove_all(path, ignored);
  }
}

/// Removes unless somebody used the entry since it was listed.
bool evict(const ObjectInfo& info) {
  struct stat status;
  if (lstat(info.path.c_str(), &status) != 0 || status.st_ino != info.inode ||
      status.st_mtim.tv_sec != info.used_s) {
    return false;
  }
  return unlink(info.path.c_str()) == 0;
}

/// Oldest first, until what is left is at 80 % of the limit.
class Evictor {
 public:
  Evictor(std::vector<Candidate>& candidates, const GcLimits& limits, int64_t now, GcReport& report)
      : candidates_(candidates), limits_(limits), now_(now), report_(report) {}

  void by_age() {
    if (limits_.max_age_s <= 0) return;
    for (Candidate& candidate : candidates_) {
      if (order_of(candidate.info, now_) < now_ - limits_.max_age_s) remove(candidate);
    }
  }

  void by_size(uint64_t limit) {
    uint64_t total = 0;
    for (const Candidate& candidate : candidates_) total += candidate.info.size;
    if (limit == 0 || total <= limit) return;
    const uint64_t goal = limit / 5 * 4;
    for (Candidate& candidate : candidates_) {
      if (total <= goal) return;
      const uint64_t size = candidate.info.size;
      if (remove(candidate)) total -= size;
    }
  }

 private:
  bool remove(Candidate& candidate) {
    ObjectInfo& info = candidate.info;
    const bool young = info.used_s <= now_ + 60 && now_ - info.used_s < limits_.min_age_s;
    if (info.size == 0 || young) return false;
    if (!limits_.dry_run && !evict(info)) return false;
    report_.removed.push_back(info.name);
    report_.after_bytes -= info.size;
    ++report_.evicted;
    info.size = 0;  // gone: neither counted nor removed again
    return true;
  }

  std::vector<Candidate>& candidates_;
  const GcLimits& limits_;
  const int64_t now_;
  GcReport& report_;
};

}  // namespace

GcLimits CompileCache::default_limits() const {
  GcLimits limits;
  limits.max_bytes = settings_.max_bytes;
  limits.max_age_s = settings_.max_age_s;
  return limits;
}

GcReport CompileCache::collect(const GcLimits& limits) {
  GcReport report;
  if (!local_) return report;
  try {
    const auto lock = FileLock::try_acquire(local_->directory("gc.lock"));
    if (!lock) {
      report.busy = true;
      return report;
    }
    const int64_t now = time(nullptr);
    std::vector<Candidate> candidates;
    for (ObjectInfo& info : local_->objects()) {
      report.before_bytes += info.size;
      candidates.push_back({std::move(info)});
    }
    report.entries = candidates.size();
    report.after_bytes = report.before_bytes;
    std::sort(candidates.begin(), candidates.end(), [now](const Candidate& a, const Candidate& b) {
      return order_of(a.info, now) < order_of(b.info, now);
    });
    Evictor evictor(candidates, limits, now, report);
    evictor.by_age();
    evictor.by_size(limits.max_bytes);
    report.temporary_files = reap_temporary_files(local_->directory("tmp"), now, limits.dry_run);
    if (!limits.dry_run) {
      reap_lock_files(local_->directory("locks"), now);
      drop_old_records(local_->directory("kernels"), now, limits.max_age_s);
      drop_old_versions(local_->root(), now);
      state().counters.add(Counter::kEvicted, report.evicted);
    }
  } catch (const FileError& error) {
    warn_once("collect", error.what());
  }
  return report;
}

std::vector<EntryInfo> CompileCache::entries() const {
  std::vector<EntryInfo> out;
  if (!local_) return out;
  for (const ObjectInfo& object : local_->objects()) {
    if (auto info = read_info(object)) out.push_back(std::move(*info));
  }
  return out;
}

VerifyReport CompileCache::verify(bool remove) {
  VerifyReport report;
  if (!local_) return report;
  for (const ObjectInfo& object : local_->objects()) {
    std::string why;
    try {
      const auto loaded = local_->load(object.path, local_->rules());
      if (!loaded) continue;  // evicted meanwhile
      const Decoded& decoded = loaded->decoded;
      why = decoded.why;
      if (decoded.entry &&
          local_->object_path(decoded.entry->key, decoded.entry->guard_digest) != object.path) {
        why = "filed under another name";
      }
    } catch (const FileError& error) {
      why = error.what();
    }
    if (why.empty()) {
      ++report.sound;
      continue;
    }
    report.bad.emplace_back(object.path, why);
    if (remove) local_->quarantine(object);
  }
  return report;
}

uint64_t CompileCache::clear() {
  state().memory.clear();
  uint64_t count = 0;
  if (!local_) return count;
  for (const ObjectInfo& object : local_->objects()) {
    if (unlink(object.path.c_str()) == 0) ++count;
  }
  const std::string records = local_->directory("kernels");
  for (const std::string& name : names_in(records)) unlink((records + "/" + name).c_str());
  return count;
}

Published CompileCache::import_entry(std::string_view bytes) {
  if (!local_) {
    throw Error(RM_FAILED_PRECONDITION,
                "[cache import] expected a usable cache, got: " + disk_problem_);
  }
  DecodeRules rules = local_->rules();
  rules.require_code = !settings_.secret_file.empty();
  const Decoded decoded = decode_entry(as_byte_span(bytes), nullptr, rules);
  if (decoded.status != DecodeStatus::kOk) {
    throw Error(RM_DATA_LOSS,
                "[cache import] expected a sound entry, got one that is not: " + decoded.why);
  }
  uint64_t written = 0;
  const Published result = local_->publish(*decoded.entry, &written);
  if (result == Published::kCreated) collect_when_due(written);
  return result;
}

std::string CompileCache::last_miss() const {
  if (!local_) return {};
  const std::string path = local_->directory("stats") + "/last_miss";
  const auto file = open_if_exists(path, OpenFor::kReadNoLink);
  if (!file) return {};
  std::string text(static_cast<size_t>(file_status(*file, path).st_size), '\0');
  text.resize(read_at(*file, 0, std::as_writable_bytes(std::span(text)), path));
  return text;
}

}  // namespace rm::cache
