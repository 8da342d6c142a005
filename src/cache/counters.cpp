#include "cache/counters.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/file.hpp"

namespace rm::cache {
namespace {

constexpr std::string_view kNames[] = {
    "hit_mem",       "hit_disk",     "hit_shared",   "miss",       "store",        "store_lost",
    "corrupt",       "incompatible", "untrusted",    "guard_miss", "evicted",      "compile",
    "compile_fail",  "lock_timeout", "lock_wait_ms", "check_same", "check_differ", "bytes_read",
    "bytes_written", "compile_ms",   "saved_ms"};
static_assert(std::size(kNames) == static_cast<size_t>(Counter::kCount));

constexpr int kFiles = 16;  // processes spread over them, so that they seldom meet at a lock
constexpr size_t kMaxFileBytes = 1 << 16;

std::string file_path(const std::string& directory, int index) {
  constexpr char kDigits[] = "0123456789abcdef";
  return directory + "/" + kDigits[index % kFiles];
}

CounterMap parse(const std::string& text) {
  CounterMap out;
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return out;  // torn by a killed writer: its counts are lost
  for (const auto& [name, value] : json.items()) {
    if (value.is_number_unsigned()) out[name] = value.get<uint64_t>();
  }
  return out;
}

std::string read_text(const Fd& file, const std::string& path) {
  std::string text(kMaxFileBytes, '\0');
  text.resize(read_at(file, 0, std::as_writable_bytes(std::span(text)), path));
  return text;
}

}  // namespace

std::string_view counter_name(Counter counter) { return kNames[static_cast<size_t>(counter)]; }

void Counters::add(std::string_view name, std::string_view reason) {
  const std::lock_guard guard(mutex_);
  ++reasons_[std::string(name) + "{" + std::string(reason) + "}"];
}

CounterMap Counters::values() const {
  const std::lock_guard guard(mutex_);
  CounterMap out = reasons_;
  for (size_t i = 0; i < std::size(kNames); ++i) {
    uint64_t& sum = out[std::string(kNames[i])];
    for (const Shard& shard : shards_) sum += shard.values[i].load(std::memory_order_relaxed);
  }
  return out;
}

bool Counters::flush(const std::string& directory) noexcept {
  try {
    const CounterMap now = values();
    const std::lock_guard guard(mutex_);
    CounterMap delta;
    for (const auto& [name, value] : now) {
      const uint64_t more = value - flushed_[name];
      if (more != 0) delta[name] = more;
    }
    if (delta.empty()) return true;
    const std::string path = file_path(directory, static_cast<int>(getpid()));
    const auto lock = FileLock::try_acquire(path);
    if (!lock) return false;
    CounterMap total = parse(read_text(lock->file(), path));
    for (const auto& [name, value] : delta) total[name] += value;
    const std::string text = nlohmann::json(total).dump();
    if (text.size() > kMaxFileBytes || ftruncate(lock->file().get(), 0) != 0) return false;
    write_all(lock->file(), as_byte_span(text), path);
    flushed_ = now;
    return true;
  } catch (const std::exception&) {  // statistics are never a reason to fail
    return false;
  }
}

CounterMap Counters::read(const std::string& directory) noexcept {
  CounterMap sum;
  for (int i = 0; i < kFiles; ++i) {
    try {
      const std::string path = file_path(directory, i);
      const auto file = open_if_exists(path, OpenFor::kReadNoLink);
      if (!file) continue;
      for (const auto& [name, value] : parse(read_text(*file, path))) sum[name] += value;
    } catch (const std::exception&) {
      continue;
    }
  }
  return sum;
}

}  // namespace rm::cache
