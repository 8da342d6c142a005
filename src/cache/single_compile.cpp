// One compile for many: threads meet at a future, processes at a lock file. The lock only saves
// work; what is served is right without it.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/error.hpp"
#include "base/log.hpp"
#include "cache/compile_cache.hpp"
#include "cache/state.hpp"

namespace rm::cache {
namespace {

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

}  // namespace rm::cache
