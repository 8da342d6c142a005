// Settings, opening the tiers, what belongs to a process, storing, counters.
#include "cache/compile_cache.hpp"

#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/error.hpp"
#include "base/log.hpp"
#include "cache/identity.hpp"
#include "cache/state.hpp"

namespace rm::cache {

std::string_view source_name(Source source) {
  constexpr std::string_view kNames[] = {"memory", "disk", "shared", "compiled", "other thread"};
  return kNames[static_cast<size_t>(source)];
}

std::string default_directory() {
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg != nullptr && xdg[0] == '/') {
    return std::string(xdg) + "/rm_abstract";
  }
  const char* home = std::getenv("HOME");
  if (home == nullptr || home[0] != '/') {
    const passwd* user = getpwuid(getuid());
    home = user != nullptr ? user->pw_dir : nullptr;
  }
  if (home == nullptr || home[0] != '/') {
    throw Error(RM_FAILED_PRECONDITION,
                "[cache] expected a home directory, got none; try RM_CACHE_DIR");
  }
  return std::string(home) + "/.rm_abstract/cache";
}

Settings settings_from(const Options& options) {
  constexpr std::string_view kModes[] = {"off", "read", "readwrite", "refresh", "check"};
  const auto mode = std::find(std::begin(kModes), std::end(kModes), options.text("cache_mode"));
  Settings out;
  out.directory = options.text("cache_dir");
  out.mode = static_cast<Mode>(mode - std::begin(kModes));
  out.shared_directory = options.text("cache_shared_dir");
  out.secret_file = options.text("cache_secret_file");
  out.salt = options.text("cache_salt");
  out.trust = options.flag("cache_trust");
  out.max_bytes = static_cast<uint64_t>(options.integer("cache_max_size"));
  out.max_age_s = options.integer("cache_max_age");
  out.memory_bytes = static_cast<uint64_t>(options.integer("cache_memory_size"));
  out.lock_timeout_s = static_cast<double>(options.integer("cache_lock_timeout"));
  return out;
}

CompileCache::CompileCache(Settings settings)
    : settings_(std::move(settings)), state_(new State(settings_.memory_bytes)) {
  if (settings_.mode == Mode::kOff) {
    disk_problem_ = "cache_mode is off";
    return;
  }
  std::optional<Digest> secret;
  try {
    if (settings_.directory.empty()) settings_.directory = default_directory();
    if (!settings_.secret_file.empty()) secret = read_secret(settings_.secret_file);
    local_ = std::make_unique<Store>(Store::Settings{
        settings_.directory, settings_.mode != Mode::kRead, false, settings_.trust, secret});
  } catch (const Error& error) {
    disk_problem_ = error.what();
    // Nothing to read yet is no problem worth a warning; everything else is.
    const bool empty = settings_.mode == Mode::kRead && error.code() == RM_NOT_FOUND;
    if (!empty) warn_once("directory", disk_problem_ + "; nothing is kept on disk");
  }
  if (settings_.shared_directory.empty()) return;
  try {
    // An unreadable secret must not turn the shared tier into one that needs no code.
    if (!settings_.secret_file.empty() && !secret) return;
    shared_ = std::make_unique<Store>(
        Store::Settings{settings_.shared_directory, false, true, settings_.trust, secret});
  } catch (const Error& error) {
    warn_once("shared", std::string(error.what()) + "; the shared tier is not used");
  }
}

CompileCache::~CompileCache() {
  State* mine = state_.load();
  if (mine->pid != getpid()) return;  // the parent's: its locks may be held for ever here
  flush_counters();
  delete mine;
}

CompileCache::State& CompileCache::state() const {
  State* current = state_.load(std::memory_order_acquire);
  if (current->pid == getpid()) return *current;
  auto fresh = std::make_unique<State>(settings_.memory_bytes);
  // The parent's state is left alone, and leaked: see state.hpp.
  if (state_.compare_exchange_strong(current, fresh.get())) return *fresh.release();
  return *current;
}

KeyBuilder CompileCache::new_key(ArtefactKind kind) const {
  KeyBuilder builder(kind);
  builder.set(KeyField::kSalt, settings_.salt);
  builder.set(KeyField::kCore, core_digest().hex());
  return builder;
}

void CompileCache::warn_once(std::string_view topic, const std::string& message) const {
  State& own = state();
  {
    const std::lock_guard guard(own.mutex);
    if (!own.warned.emplace(topic).second) return;
  }
  log_warn(LogTopic::kCache, message);
}

void CompileCache::store(const EntryPtr& entry) {
  const bool writes = settings_.mode != Mode::kRead && settings_.mode != Mode::kOff;
  if (!local_ || !writes) return;
  Counters& counters = state().counters;
  uint64_t written = 0;
  try {
    if (local_->publish(*entry, &written) == Published::kExists) {
      counters.add(Counter::kStoreLost);
      return;
    }
    counters.add(Counter::kStore);
    counters.add(Counter::kBytesWritten, written);
  } catch (const FileError& error) {
    const char* name = strerrorname_np(error.errno_value());
    counters.add("store_fail", name != nullptr ? name : "unknown");
    warn_once("store", std::string(error.what()) + "; the artefact is used but not kept");
    return;
  }
  collect_when_due(written);
}

void CompileCache::collect_when_due(uint64_t written_bytes) {
  State& own = state();
  {
    const std::lock_guard guard(own.mutex);
    own.written_since_collect += written_bytes;
    const uint64_t often = std::max<uint64_t>(settings_.max_bytes / 16, 1 << 20);
    if (own.collected && own.written_since_collect < often) return;
    own.collected = true;
    own.written_since_collect = 0;
  }
  flush_counters();
  collect(default_limits());
}

EntryPtr CompileCache::publish(const Key& key, Artefact artefact, double compile_ms) {
  EntryPtr entry = make_entry(key, std::move(artefact), compile_ms);
  if (!key.bypass.empty()) {
    state().counters.add("bypass", key.bypass);
    return entry;
  }
  if (settings_.mode == Mode::kOff) return entry;
  state().counters.add(Counter::kCompileMs, static_cast<uint64_t>(std::max(compile_ms, 0.0)));
  store(entry);
  state().memory.insert(entry);
  return entry;
}

CounterMap CompileCache::counters() const { return state().counters.values(); }

void CompileCache::flush_counters() const {
  if (local_) state().counters.flush(local_->directory("stats"));
}

CounterMap CompileCache::total_counters() const {
  flush_counters();
  return local_ ? Counters::read(local_->directory("stats")) : counters();
}

}  // namespace rm::cache
