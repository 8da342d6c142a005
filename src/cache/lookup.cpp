// Finding an entry: memory, then this machine's directory, then the shared tier. Whatever is not a
// sound entry of exactly the asked key is put away and counted, never served.
#include <algorithm>

#include "base/error.hpp"
#include "base/log.hpp"
#include "cache/compile_cache.hpp"
#include "cache/state.hpp"

namespace rm::cache {

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
  // The time comes from a file: what does not fit an integer is not a time.
  if (saved > 0 && saved < 1e15) {
    own.counters.add(Counter::kSavedMs, static_cast<uint64_t>(saved));
  }
  own.memory.insert(entry);
  if (own.memory.dropped() > 2 * std::max<size_t>(own.memory.size(), 16)) {
    warn_once("thrash",
              "entries are dropped from memory faster than they are used; try a larger "
              "RM_CACHE_MEMORY_SIZE");
  }
  return entry;
}

EntryPtr CompileCache::lookup(const Key& key, const CheckFn& check, bool counted) {
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
  if (counted) own.counters.add(Counter::kMiss);
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

}  // namespace rm::cache
