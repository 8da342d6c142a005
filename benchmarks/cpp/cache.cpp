// What a hit of the compile cache costs and how hits scale: digests by size, hits from memory and
// from disk with 1..N threads and processes. One JSON object a line; best of the rounds, because
// other work on the machine only ever slows a round down.
//
//   cache_bench [cores] [rounds]
//
// "memory": get_or_compile of entries held in this process. "disk": lookup with an empty memory, so
// each reads the file, verifies all digests and parses the metadata.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "../../tests/cpp/cache/support.hpp"

namespace {
using namespace rm::cache;
using Seconds = std::chrono::duration<double>;
using SteadyClock = std::chrono::steady_clock;

constexpr int kKeys = 64;
constexpr double kRoundSeconds = 0.05;  // short: some rounds then meet nobody else

double best_of(int rounds, const std::function<double()>& measure) {
  double best = 0;
  for (int round = 0; round < rounds; ++round) best = std::max(best, measure());
  return best;
}

void hash_speed(int rounds) {
  const size_t largest = size_t{512} << 20;
  std::vector<std::byte> data(largest);
  for (size_t i = 0; i < largest; ++i) data[i] = static_cast<std::byte>(i * 2654435761u >> 13);
  for (size_t size = size_t{4} << 10; size <= largest; size *= 8) {
    const int repeats = static_cast<int>(std::max<size_t>((size_t{64} << 20) / size, 1));
    const double rate = best_of(std::max(rounds, 8), [&] {
      const auto start = SteadyClock::now();
      for (int i = 0; i < repeats; ++i) rm::hash_bytes(rm::ByteSpan(data).first(size));
      return static_cast<double>(size) * repeats / Seconds(SteadyClock::now() - start).count();
    });
    std::printf("{\"what\": \"hash\", \"algorithm\": \"%s\", \"kib\": %zu, \"gb_s\": %.2f}\n",
                std::string(rm::hash_algorithm()).c_str(), size >> 10, rate / 1e9);
  }
}

/// Calls `work(worker, i)` until the time is over; calls made. A forked process starts with an
/// empty memory, so every key is asked for once before the clock starts.
template <typename Work>
uint64_t hammer(int worker, const Work& work) {
  uint64_t calls = 0;
  for (int i = 0; i < kKeys; ++i) work(worker, i);
  const auto start = SteadyClock::now();
  do {
    for (int i = 0; i < 16; ++i) work(worker, static_cast<int>(calls++ % kKeys));
  } while (Seconds(SteadyClock::now() - start).count() < kRoundSeconds);
  return calls;
}

template <typename Work>
double threads_rate(int count, const Work& work) {
  std::atomic<uint64_t> calls{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t) threads.emplace_back([&, t] { calls += hammer(t, work); });
  for (std::thread& thread : threads) thread.join();
  return static_cast<double>(calls.load()) / kRoundSeconds;
}

template <typename Work>
double processes_rate(int count, const Work& work) {
  void* const page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) std::abort();
  auto* calls = new (page) std::atomic<uint64_t>(0);
  for (int p = 0; p < count; ++p) {
    if (fork() == 0) {
      *calls += hammer(p, work);
      _exit(0);
    }
  }
  while (wait(nullptr) > 0) {
  }
  const double rate = static_cast<double>(calls->load()) / kRoundSeconds;
  munmap(page, 4096);
  return rate;
}

void require(bool right) {
  if (right) return;
  std::fprintf(stderr, "a hit was not what was stored\n");
  std::_Exit(1);
}

/// One line for each way to use `cores` cores: hits a second, and how many times one core's.
template <typename Work>
void scaling(const char* what, size_t bytes, int cores, int rounds, const Work& work) {
  const double one = best_of(rounds, [&] { return threads_rate(1, work); });
  const double threads = best_of(rounds, [&] { return threads_rate(cores, work); });
  const double processes = best_of(rounds, [&] { return processes_rate(cores, work); });
  std::printf(
      "{\"what\": \"%s\", \"entry_kib\": %zu, \"hits_s\": %.0f, \"us\": %.2f, \"cores\": %d, "
      "\"threads_x\": %.2f, \"processes_x\": %.2f}\n",
      what, bytes >> 10, one, 1e6 / one, cores, threads / one, processes / one);
  std::fflush(stdout);
}

void hits(size_t bytes, int cores, int rounds) {
  const cache_test::TemporaryFolder folder;
  Settings settings = cache_test::settings(folder);
  settings.memory_bytes = uint64_t{4} << 30;
  CompileCache cache(settings);
  std::vector<Key> keys;
  for (int i = 0; i < kKeys; ++i) {
    keys.push_back(cache_test::key_of(i));
    cache.publish(keys.back(), cache_test::artefact_of(i, bytes));
  }
  const auto compile = [] { return Artefact{}; };
  scaling("memory", bytes, cores, rounds, [&](int worker, int i) {
    const Result hit = cache.get_or_compile(keys[(i + 7 * worker) % kKeys], compile);
    require(hit.source != Source::kCompiled);
  });
  scaling("memory, one key", bytes, cores, rounds, [&](int, int) {
    require(cache.get_or_compile(keys[0], compile).source != Source::kCompiled);
  });
  settings.memory_bytes = 0;  // nothing fits: every lookup goes to the disk
  CompileCache disk(settings);
  scaling("disk", bytes, cores, rounds, [&](int worker, int i) {
    const EntryPtr entry = disk.lookup(keys[(i + 7 * worker) % kKeys]);
    require(entry != nullptr && entry->section("plan")->bytes.size() == bytes);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int cores =
      argc > 1 ? std::atoi(argv[1]) : static_cast<int>(std::thread::hardware_concurrency());
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 20;
  hash_speed(rounds);
  for (size_t bytes : {size_t{4} << 10, size_t{64} << 10, size_t{2} << 20})
    hits(bytes, cores, rounds);
  return 0;
}
