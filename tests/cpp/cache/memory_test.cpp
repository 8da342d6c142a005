// The memory tier: several entries a key, least recently used first out.
#include "cache/memory.hpp"

#include <doctest/doctest.h>

#include <thread>

#include "support.hpp"

using namespace cache_test;
using rm::cache::make_entry;
using rm::cache::MemoryTier;

TEST_CASE("entries of one key with different guards live side by side") {
  MemoryTier memory(1 << 20);
  memory.insert(make_entry(key_of(1), artefact_of(1, 10, "a"), 0));
  memory.insert(make_entry(key_of(1), artefact_of(1, 10, "b"), 0));
  memory.insert(make_entry(key_of(1), artefact_of(1, 20, "b"), 0));
  CHECK(memory.find(key_of(1).digest).size() == 2);
  CHECK(memory.size() == 2);
  CHECK(memory.find(key_of(2).digest).empty());
  memory.clear();
  CHECK(memory.bytes() == 0);
}

TEST_CASE("the least recently used entry goes first and the size is kept") {
  MemoryTier memory(10'000);
  for (int i = 0; i < 3; ++i) memory.insert(make_entry(key_of(i), artefact_of(i, 3000), 0));
  memory.find(key_of(0).digest);
  memory.insert(make_entry(key_of(3), artefact_of(3, 3000), 0));
  CHECK(memory.find(key_of(1).digest).empty());
  CHECK_FALSE(memory.find(key_of(0).digest).empty());
  CHECK(memory.bytes() <= 10'000);
  memory.insert(make_entry(key_of(4), artefact_of(4, 20'000), 0));  // larger than all of it
  CHECK(memory.find(key_of(4).digest).empty());
  CHECK(memory.size() == 3);
}

TEST_CASE("threads that insert, find and erase leave consistent totals") {
  MemoryTier memory(50'000);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&memory, t] {
      for (int i = 0; i < 2000; ++i) {
        const int number = (i * 7 + t) % 40;
        memory.insert(make_entry(key_of(number), artefact_of(number, 2000), 0));
        for (const auto& entry : memory.find(key_of(number).digest)) {
          CHECK(text_of(*entry, "log") == "made " + std::to_string(number));
        }
        if (i % 5 == 0) memory.erase(key_of(number).digest, {});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(memory.bytes() <= 50'000);
  memory.clear();
  CHECK(memory.bytes() == 0);
  CHECK(memory.size() == 0);
}
