// Lookup, publish and the one-compile protocol. The order of steps is docs/cache.md's.
#include "cache/compile_cache.hpp"

#include <pwd.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/error.hpp"
#include "base/log.hpp"
#include "cache/identity.hpp"
#include "cache/state.hpp"

namespace rm::cache {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

std::string short_name(const Key& key) {
  return std::string(kind_name(key.kind)) + " " + key.digest.hex().substr(0, 12);
}

bool same_content(const Entry& a, const Entry& b) {
  return a.metadata.guards == b.metadata.guards && a.metadata.compat == b.metadata.compat &&
         std::equal(a.sections.begin(), a.sections.end(), b.sections.begin(), b.sections.end(),
                    [](const Section& x, const Section& y) {
                      return x.name == y.name && x.bytes.size() == y.bytes.size() &&
                             (x.bytes.empty() ||
                              std::memcmp(x.bytes.data(), y.bytes.data(), x.bytes.size()) == 0);
                    });
}

}  // namespace

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
    throw Error(RM_NOT_FOUND, "[cache] expected a home directory, got none; try RM_CACHE_DIR");
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
  out.derived_max_bytes = static_cast<uint64_t>(options.integer("cache_derived_max_size"));
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
    warn_once("directory", disk_problem_ + "; nothing is kept on disk");
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

// ---- lookup ----

bool CompileCache::accepted(const EntryPtr& entry, const CheckFn& check, const Store* store,
                            const ObjectInfo* info) {
  if (!check) return true;
  Counters& counters = state().counters;
  try {
    switch (check(*entry)) {
      case Verdict::kAccept:
        return true;
      case Verdict::kGuardMiss:
        counters.add(Counter::kGuardMiss);
        return false;
      case Verdict::kIncompatible:
        counters.add(Counter::kIncompatible);
        if (store != nullptr) store->remove(*info);
        break;
    }
  } catch (const Error& error) {
    counters.add(Counter::kCorrupt);
    log_warn(LogTopic::kCache, "entry " + entry->key.hex() + " did not load: " + error.what());
    if (store != nullptr) store->quarantine(*info);
  }
  state().memory.erase(entry->key, entry->guard_digest);
  return false;
}

EntryPtr CompileCache::find_in_memory(const Key& key, const CheckFn& check) {
  for (EntryPtr& entry : state().memory.find(key.digest)) {
    if (!check && entry->guard_digest != Digest{}) continue;
    if (accepted(entry, check, nullptr, nullptr)) return std::move(entry);
  }
  return nullptr;
}

EntryPtr CompileCache::load_from(const Store& store, const std::string& path, const Key& key,
                                 const CheckFn& check, bool guarded) {
  Counters& counters = state().counters;
  DecodeRules rules = store.rules();
  const Digest no_guards;
  rules.key = &key.digest;
  if (!guarded) rules.guard_digest = &no_guards;
  const auto loaded = store.load(path, rules);
  if (!loaded) return nullptr;
  const auto& [decoded, info] = *loaded;
  switch (decoded.status) {
    case DecodeStatus::kOk:
      if (decoded.entry->kind != key.kind ||
          store.object_path(key.digest, decoded.entry->guard_digest) != path) {
        break;  // sound, but filed under a name that is not its own
      }
      counters.add(Counter::kBytesRead, info.size);
      if (!accepted(decoded.entry, check, &store, &info)) return nullptr;
      if (store.writable()) store.touch(info);
      return decoded.entry;
    case DecodeStatus::kIncompatible:
      counters.add(Counter::kIncompatible);
      store.remove(info);
      return nullptr;
    case DecodeStatus::kUntrusted:
      counters.add(Counter::kUntrusted);
      warn_once("untrusted", "'" + path + "' is not used: " + decoded.why);
      store.quarantine(info);
      return nullptr;
    case DecodeStatus::kCorrupt:
      break;
  }
  counters.add(Counter::kCorrupt);
  log_warn(LogTopic::kCache, "'" + path + "' is corrupt and not used: " +
                                 (decoded.why.empty() ? "misplaced" : decoded.why));
  store.quarantine(info);
  return nullptr;
}

EntryPtr CompileCache::find_on_disk(const Key& key, const CheckFn& check, bool* shared) {
  for (const Store* store : {local_.get(), shared_.get()}) {
    if (store == nullptr) continue;
    *shared = store == shared_.get();
    try {
      if (EntryPtr entry =
              load_from(*store, store->object_path(key.digest, {}), key, check, false)) {
        return entry;
      }
      if (!check) continue;
      for (const ObjectInfo& info : store->guarded(key.digest)) {
        if (EntryPtr entry = load_from(*store, info.path, key, check, true)) return entry;
      }
    } catch (const FileError& error) {
      warn_once("lookup", error.what());
    }
  }
  return nullptr;
}

EntryPtr CompileCache::count_hit(EntryPtr entry, bool shared, double load_ms) {
  State& own = state();
  own.counters.add(shared ? Counter::kHitShared : Counter::kHitDisk);
  const double saved = entry->metadata.compile_ms - load_ms;
  if (saved > 0) own.counters.add(Counter::kSavedMs, static_cast<uint64_t>(saved));
  own.memory.insert(entry);
  if (own.memory.dropped() > 2 * std::max<size_t>(own.memory.size(), 16)) {
    warn_once("thrash",
              "entries are dropped from memory faster than they are used; try a larger "
              "RM_CACHE_MEMORY_SIZE");
  }
  return entry;
}

EntryPtr CompileCache::lookup(const Key& key, const CheckFn& check) {
  State& own = state();
  if (!key.bypass.empty()) {
    own.counters.add("bypass", key.bypass);
    return nullptr;
  }
  if (settings_.mode == Mode::kOff) return nullptr;
  if (EntryPtr entry = find_in_memory(key, check)) {
    own.counters.add(Counter::kHitMemory);
    return entry;
  }
  if (settings_.mode == Mode::kRefresh) return nullptr;
  const auto start = Clock::now();
  bool shared = false;
  if (EntryPtr entry = find_on_disk(key, check, &shared)) {
    return count_hit(std::move(entry), shared, ms_since(start));
  }
  own.counters.add(Counter::kMiss);
  return nullptr;
}

void CompileCache::reject(const Entry& entry, std::string_view why) {
  State& own = state();
  own.counters.add(Counter::kCorrupt);
  own.memory.erase(entry.key, entry.guard_digest);
  log_warn(LogTopic::kCache, "entry " + entry.key.hex() + " is rejected: " + std::string(why));
  if (!local_) return;
  try {
    const std::string path = local_->object_path(entry.key, entry.guard_digest);
    if (const auto loaded = local_->load(path, {})) local_->quarantine(loaded->info);
  } catch (const FileError& error) {
    warn_once("reject", error.what());
  }
}

// ---- publish ----

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
  store(entry);
  state().memory.insert(entry);
  return entry;
}

// ---- one compile for many ----

EntryPtr CompileCache::run_compile(const Key& key, const CompileFn& compile) {
  Counters& counters = state().counters;
  counters.add(Counter::kCompile);
  const auto start = Clock::now();
  try {
    Artefact artefact = compile();
    const double elapsed_ms = ms_since(start);
    counters.add(Counter::kCompileMs, static_cast<uint64_t>(elapsed_ms));
    return make_entry(key, std::move(artefact), elapsed_ms);
  } catch (...) {
    counters.add(Counter::kCompileFail);
    throw;
  }
}

void CompileCache::compare(const Key& key, const Entry& stored, const Entry& compiled) {
  const bool same = same_content(stored, compiled);
  state().counters.add(same ? Counter::kCheckSame : Counter::kCheckDiffer);
  if (same) return;
  log_error(LogTopic::kCache, "two compiles of " + short_name(key) +
                                  " differ: the key misses an input, or the compiler is not "
                                  "deterministic");
}

std::optional<FileLock> CompileCache::wait_for_lock(const Key& key, bool wake_on_object) {
  if (!local_ || !local_->locks_work()) return std::nullopt;
  Counters& counters = state().counters;
  const std::string path = local_->lock_path(key.digest);
  const std::string object = local_->object_path(key.digest, {});
  const auto start = Clock::now();
  auto pause = std::chrono::milliseconds(1);
  double said_ms = 0;
  try {
    make_directories(path.substr(0, path.rfind('/')));
    for (;;) {
      if (auto lock = FileLock::try_acquire(path)) {
        counters.add(Counter::kLockWaitMs, static_cast<uint64_t>(ms_since(start)));
        return lock;
      }
      if (wake_on_object && path_status(object)) break;
      const double waited_ms = ms_since(start);
      if (waited_ms > settings_.lock_timeout_s * 1e3) {
        counters.add(Counter::kLockTimeout);
        log_warn(LogTopic::kCache, "another process has been compiling " + short_name(key) +
                                       " for too long; compiling it here too");
        break;
      }
      if (waited_ms - said_ms > 30e3) {
        said_ms = waited_ms;
        log_warn(LogTopic::kCache, "waiting for another process that compiles " + short_name(key));
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::milliseconds(50));
    }
  } catch (const FileError& error) {  // the lock saves work; correctness does not need it
    warn_once("lock", std::string(error.what()) + "; processes may compile the same artefact");
  }
  counters.add(Counter::kLockWaitMs, static_cast<uint64_t>(ms_since(start)));
  return std::nullopt;
}

void CompileCache::note_miss(const Key& key) {
  if (!local_ || settings_.mode == Mode::kRead) return;
  nlohmann::json json = {{"key", key.digest.hex()},
                         {"kind", kind_name(key.kind)},
                         {"pid", getpid()},
                         {"time", time(nullptr)}};
  for (const FieldDigest& field : key.fields) json["fields"][field.field] = field.digest.hex();
  try {
    replace_file(local_->directory("tmp"), local_->directory("stats") + "/last_miss", json.dump());
  } catch (const FileError& error) {  // only `explain --last-miss` needs it
    warn_once("last_miss", error.what());
  }
}

EntryPtr CompileCache::compile_once(const Key& key, const CompileFn& compile, const CheckFn& check,
                                    Source* source) {
  State& own = state();
  const bool reads = settings_.mode != Mode::kRefresh;
  const auto start = Clock::now();
  bool shared = false;
  EntryPtr found = reads ? find_on_disk(key, check, &shared) : nullptr;
  std::optional<FileLock> lock;
  double waited_ms = 0;
  if (!found && settings_.mode == Mode::kReadWrite) {
    const auto wait_start = Clock::now();
    lock = wait_for_lock(key, !check);
    waited_ms = ms_since(wait_start);
    found = find_on_disk(key, check, &shared);  // whoever held the lock may have published
  }
  if (found && settings_.mode != Mode::kCheck) {
    *source = shared ? Source::kShared : Source::kDisk;
    return count_hit(std::move(found), shared, ms_since(start) - waited_ms);
  }
  *source = Source::kCompiled;
  if (!found) {
    own.counters.add(Counter::kMiss);
    note_miss(key);
  }
  EntryPtr compiled = run_compile(key, compile);
  if (settings_.mode == Mode::kRefresh) {
    // A reader of its own: entries are compared, never replaced.
    found = find_on_disk(
        key,
        [&](const Entry& entry) {
          return entry.guard_digest == compiled->guard_digest ? Verdict::kAccept
                                                              : Verdict::kGuardMiss;
        },
        &shared);
  }
  if (found) {
    compare(key, *found, *compiled);
  } else {
    store(compiled);
  }
  own.memory.insert(compiled);
  return compiled;
}

Result CompileCache::get_or_compile(const Key& key, const CompileFn& compile,
                                    const CheckFn& check) {
  State& own = state();
  if (!key.bypass.empty() || settings_.mode == Mode::kOff) {
    own.counters.add("bypass", key.bypass.empty() ? "cache off" : key.bypass);
    return {run_compile(key, compile), Source::kCompiled};
  }
  for (;;) {
    if (EntryPtr entry = find_in_memory(key, check)) {
      own.counters.add(Counter::kHitMemory);
      return {std::move(entry), Source::kMemory};
    }
    std::promise<EntryPtr> promise;
    auto mine = std::make_shared<Flight>();
    std::shared_ptr<Flight> flight;
    {
      const std::lock_guard guard(own.mutex);
      flight = own.flights.try_emplace(key.digest, mine).first->second;
      if (flight == mine) {
        mine->result = promise.get_future().share();
        mine->compiler = std::this_thread::get_id();
      }
    }
    if (flight != mine) {
      if (flight->compiler == std::this_thread::get_id()) {
        throw Error(RM_FAILED_PRECONDITION, "[cache] expected the compile function of " +
                                                short_name(key) +
                                                " not to ask for its own key, got that");
      }
      EntryPtr entry = flight->result.get();
      if (accepted(entry, check, nullptr, nullptr)) return {entry, Source::kOtherThread};
      continue;  // made for other guards: look again, and compile if nobody else does
    }
    const auto finish = [&] {
      const std::lock_guard guard(own.mutex);
      own.flights.erase(key.digest);
    };
    try {
      Source source{};
      EntryPtr entry = compile_once(key, compile, check, &source);
      finish();
      promise.set_value(entry);
      return {std::move(entry), source};
    } catch (...) {
      finish();
      promise.set_exception(std::current_exception());
      throw;
    }
  }
}

// ---- counters ----

CounterMap CompileCache::counters() const { return state().counters.values(); }

void CompileCache::flush_counters() const {
  if (local_) state().counters.flush(local_->directory("stats"));
}

CounterMap CompileCache::total_counters() const {
  flush_counters();
  return local_ ? Counters::read(local_->directory("stats")) : counters();
}

}  // namespace rm::cache
