// The compile cache: one compile for many, across threads and processes, and never a wrong answer.
// A failure of the cache itself is counted and logged once, and never fails the caller.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/options.hpp"
#include "cache/counters.hpp"
#include "cache/key.hpp"
#include "cache/memory.hpp"
#include "cache/store.hpp"
#include "cache/types.hpp"

namespace rm::cache {

enum class Mode {
  kOff,
  kRead,  // serve hits, store nothing
  kReadWrite,
  kRefresh,  // compile although there is an entry; report whether it would have been the same
  kCheck     // compile on every disk hit and compare: finds what is missing in keys
};

struct Settings {
  std::string directory;  // empty: default_directory()
  Mode mode = Mode::kReadWrite;
  std::string shared_directory;  // a second tier, only read
  std::string secret_file;
  std::string salt;
  bool trust = false;
  uint64_t max_bytes = uint64_t{10} << 30;
  int64_t max_age_s = 30 * 86400;
  uint64_t memory_bytes = uint64_t{256} << 20;
  double lock_timeout_s = 600;
};
Settings settings_from(const Options& options);
/// $XDG_CACHE_HOME/rm_abstract, else ~/.rm_abstract/cache. Throws rm::Error without a home.
std::string default_directory();

enum class Source { kMemory, kDisk, kShared, kCompiled, kOtherThread };
std::string_view source_name(Source source);

struct Result {
  EntryPtr entry;
  Source source{};
};

struct EntryInfo {
  ObjectInfo object;
  EntryHeader header;
  Metadata metadata;
};

struct GcLimits {
  uint64_t max_bytes = 0;  // 0: no limit
  int64_t max_age_s = 0;
  int64_t min_age_s = 60;  // younger entries stay: their writer may be about to open them
  bool dry_run = false;
};
struct GcReport {
  uint64_t before_bytes = 0, after_bytes = 0, entries = 0, evicted = 0, temporary_files = 0;
  bool busy = false;  // another process collects
  std::vector<std::string> removed;
};
struct VerifyReport {
  uint64_t sound = 0;
  std::vector<std::pair<std::string, std::string>> bad;  // path, why
};

class CompileCache {
 public:
  using CompileFn = std::function<Artefact()>;

  /// Never throws for an unusable directory: the cache then works in memory only, says so once,
  /// and disk_problem() tells why.
  explicit CompileCache(Settings settings);
  CompileCache(const CompileCache&) = delete;
  CompileCache& operator=(const CompileCache&) = delete;
  ~CompileCache();

  const Settings& settings() const { return settings_; }
  /// The directory in use, or that would have been.
  const std::string& directory() const { return settings_.directory; }
  const std::string& disk_problem() const { return disk_problem_; }
  /// A folder for records beside the entries; empty where nothing is kept on disk.
  std::string folder(std::string_view name) const {
    return local_ ? local_->directory(name) : std::string();
  }

  /// A builder with the salt and the digest of the core library set.
  KeyBuilder new_key(ArtefactKind kind) const;

  /// Memory, then disk, then the shared tier; nullptr on a miss. Only with a check are entries
  /// that carry guards considered.
  /// `counted`: a miss goes into the statistics; not for questions that are usually answered no.
  EntryPtr lookup(const Key& key, const CheckFn& check = {}, bool counted = true);
  /// Stores what was made elsewhere; the returned entry serves whether or not that succeeded.
  EntryPtr publish(const Key& key, Artefact artefact, double compile_ms = 0);
  /// A hit, or what `compile` returns: it runs once however many threads and processes ask.
  /// What it throws reaches every caller that waited for it, and the next call compiles again.
  Result get_or_compile(const Key& key, const CompileFn& compile, const CheckFn& check = {});
  /// The entry turned out to be wrong (it did not load, or failed a parity check): it is moved to
  /// quarantine and forgotten.
  void reject(const Entry& entry, std::string_view why);

  /// Digest of a file's content, remembered by the file's identity (device, inode, size, times).
  Digest file_digest(const std::string& path);

  // ---- management (manage.cpp) ----
  std::vector<EntryInfo> entries() const;
  /// Reads every entry whole. With `remove` bad ones go to quarantine.
  VerifyReport verify(bool remove);
  GcReport collect(const GcLimits& limits);
  GcLimits default_limits() const;
  /// Unlinks every entry; readers keep what they have open. Returns how many.
  uint64_t clear();
  /// Stores the bytes of an .rmc file from elsewhere if they are sound. Throws rm::Error if not.
  Published import_entry(std::string_view bytes);

  /// Of this process.
  CounterMap counters() const;
  /// Of all processes that used the directory, this one included.
  CounterMap total_counters() const;
  void flush_counters() const;
  /// Key, kind and fields of the last miss of any process as JSON text; empty when none is known.
  std::string last_miss() const;

 private:
  struct State;

  State& state() const;
  EntryPtr find_in_memory(const Key& key, const CheckFn& check);
  EntryPtr find_on_disk(const Key& key, const CheckFn& check, bool* shared);
  EntryPtr load_from(const Store& store, const std::string& path, const Key& key,
                     const CheckFn& check, bool guarded);
  bool accepted(const EntryPtr& entry, const CheckFn& check, const Store* store,
                const ObjectInfo* info);
  EntryPtr count_hit(EntryPtr entry, bool shared, double load_ms);
  EntryPtr compile_once(const Key& key, const CompileFn& compile, const CheckFn& check,
                        Source* source);
  EntryPtr run_compile(const Key& key, const CompileFn& compile);
  void compare(const Key& key, const Entry& stored, const Entry& compiled);
  std::optional<FileLock> wait_for_lock(const Key& key, bool wake_on_object);
  void store(const EntryPtr& entry);
  void note_miss(const Key& key);
  void warn_once(std::string_view topic, const std::string& message) const;
  void collect_when_due(uint64_t written_bytes);

  Settings settings_;
  std::string disk_problem_;
  std::unique_ptr<Store> local_, shared_;
  /// What a fork must not share with its parent; see state().
  mutable std::atomic<State*> state_;
};

}  // namespace rm::cache
