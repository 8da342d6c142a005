// CompileCache: one compile for many, modes, guards, and files that are not what they should be.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "base/error.hpp"
#include "support.hpp"

using namespace cache_test;
using rm::cache::Artefact;
using rm::cache::CompileCache;
using rm::cache::Entry;
using rm::cache::Mode;
using rm::cache::Source;
using rm::cache::Verdict;

namespace {

/// Counts its compiles.
struct Compiler {
  int number;
  std::atomic<int> runs{0};
  std::function<Artefact()> fn() {
    return [this] {
      ++runs;
      return artefact_of(number);
    };
  }
};

}  // namespace

TEST_CASE("the second call hits memory, another cache object the disk, with the same content") {
  const TemporaryFolder folder;
  Compiler compiler{1};
  {
    CompileCache cache(settings(folder));
    CHECK(cache.get_or_compile(key_of(1), compiler.fn()).source == Source::kCompiled);
    CHECK(cache.get_or_compile(key_of(1), compiler.fn()).source == Source::kMemory);
    CHECK(counter(cache, "miss") == 1);
    CHECK(counter(cache, "store") == 1);
  }
  CompileCache cache(settings(folder));
  const auto result = cache.get_or_compile(key_of(1), compiler.fn());
  CHECK(result.source == Source::kDisk);
  CHECK(text_of(*result.entry, "program") == content_of(1));
  CHECK(compiler.runs == 1);
  CHECK(counter(cache, "miss") == 0);
  CHECK(cache.total_counters()["miss"] == 1);
  CHECK(cache.total_counters()["hit_disk"] == 1);
}

TEST_CASE("many threads that ask for one key compile once") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  std::atomic<int> runs{0}, wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&] {
      const auto result = cache.get_or_compile(key_of(1), [&] {
        ++runs;
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        return artefact_of(1);
      });
      if (text_of(*result.entry, "program") != content_of(1)) ++wrong;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(runs == 1);
  CHECK(wrong == 0);
}

TEST_CASE("a failed compile reaches every waiter and the next call compiles again") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  std::atomic<int> runs{0}, failures{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      try {
        cache.get_or_compile(key_of(1), [&]() -> Artefact {
          ++runs;
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
          throw rm::Error(RM_INTERNAL, "[test] expected this");
        });
      } catch (const rm::Error&) {
        ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 4);
  Compiler compiler{1};
  CHECK(cache.get_or_compile(key_of(1), compiler.fn()).source == Source::kCompiled);
  CHECK(counter(cache, "compile_fail") == static_cast<uint64_t>(runs.load()));
}

TEST_CASE("a compile function that asks for its own key is refused instead of waiting for ever") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  CHECK_THROWS_WITH_AS(cache.get_or_compile(key_of(1),
                                            [&]() -> Artefact {
                                              cache.get_or_compile(key_of(1), Compiler{1}.fn());
                                              return {};
                                            }),
                       doctest::Contains("its own key"), rm::Error);
}

TEST_CASE("off compiles every time and stores nothing; read serves hits and stores nothing") {
  const TemporaryFolder folder;
  Compiler compiler{1};
  auto off = settings(folder);
  off.mode = Mode::kOff;
  {
    CompileCache cache(off);
    cache.get_or_compile(key_of(1), compiler.fn());
    cache.get_or_compile(key_of(1), compiler.fn());
    CHECK(compiler.runs == 2);
    CHECK(counter(cache, "bypass{cache off}") == 2);
  }
  CHECK_FALSE(fs::exists(off.directory));
  CompileCache(settings(folder)).get_or_compile(key_of(1), compiler.fn());
  auto read = settings(folder);
  read.mode = Mode::kRead;
  CompileCache cache(read);
  CHECK(cache.get_or_compile(key_of(1), compiler.fn()).source == Source::kDisk);
  Compiler other{2};
  CHECK(cache.get_or_compile(key_of(2), other.fn()).source == Source::kCompiled);
  CHECK_FALSE(fs::exists(object_path(cache, key_of(2))));
}

TEST_CASE("refresh compiles and reports, and never replaces an entry") {
  const TemporaryFolder folder;
  CompileCache(settings(folder)).get_or_compile(key_of(1), [] { return artefact_of(1); });
  auto refresh = settings(folder);
  refresh.mode = Mode::kRefresh;
  {
    CompileCache cache(refresh);
    CHECK(cache.get_or_compile(key_of(1), [] { return artefact_of(1); }).source ==
          Source::kCompiled);
    CHECK(counter(cache, "check_same") == 1);
  }
  CompileCache cache(refresh);
  const std::string before = read_file(object_path(cache, key_of(1)));
  cache.get_or_compile(key_of(1), [] { return artefact_of(7); });
  CHECK(counter(cache, "check_differ") == 1);
  CHECK(read_file(object_path(cache, key_of(1))) == before);
}

TEST_CASE("check compares what is stored with a fresh compile") {
  const TemporaryFolder folder;
  CompileCache(settings(folder)).get_or_compile(key_of(1), [] { return artefact_of(1); });
  auto check = settings(folder);
  check.mode = Mode::kCheck;
  CompileCache same(check), differs(check);
  same.get_or_compile(key_of(1), [] { return artefact_of(1); });
  CHECK(counter(same, "check_same") == 1);
  const auto result = differs.get_or_compile(key_of(1), [] { return artefact_of(2); });
  CHECK(counter(differs, "check_differ") == 1);
  CHECK(text_of(*result.entry, "program") == content_of(2));
}

TEST_CASE("a key that could not be hashed bypasses the cache with its reason") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  Compiler compiler{1};
  const auto key =
      rm::cache::KeyBuilder(rm::cache::ArtefactKind::kProgram).bypass("lambda in config").finish();
  cache.get_or_compile(key, compiler.fn());
  cache.get_or_compile(key, compiler.fn());
  CHECK(cache.lookup(key) == nullptr);
  CHECK(compiler.runs == 2);
  CHECK(counter(cache, "bypass{lambda in config}") == 3);
  CHECK(cache.entries().empty());
}

TEST_CASE("several entries of a key are told apart by guards, from memory and from disk") {
  const TemporaryFolder folder;
  const auto wants = [](std::string guards) {
    return [guards = std::move(guards)](const Entry& entry) {
      return entry.metadata.guards == guards ? Verdict::kAccept : Verdict::kGuardMiss;
    };
  };
  const auto compile = [](int number, const std::string& guards) {
    return [=] { return artefact_of(number, 5000, guards); };
  };
  {
    CompileCache cache(settings(folder));
    cache.get_or_compile(key_of(1), compile(1, "rank 1"), wants("rank 1"));
    const auto second = cache.get_or_compile(key_of(1), compile(2, "rank 2"), wants("rank 2"));
    CHECK(second.source == Source::kCompiled);
    CHECK(counter(cache, "guard_miss") >= 1);
  }
  CompileCache cache(settings(folder));
  CHECK(text_of(*cache.lookup(key_of(1), wants("rank 1")), "program") == content_of(1));
  CHECK(text_of(*cache.lookup(key_of(1), wants("rank 2")), "program") == content_of(2));
  CHECK(cache.lookup(key_of(1), wants("rank 3")) == nullptr);
  CHECK(cache.lookup(key_of(1)) == nullptr);  // who does not check gets no guarded entry
  CHECK(cache.entries().size() == 2);
}

TEST_CASE("an entry whose content does not load is quarantined and compiled again") {
  const TemporaryFolder folder;
  CompileCache(settings(folder)).get_or_compile(key_of(1), [] { return artefact_of(7); });
  CompileCache cache(settings(folder));
  const auto result = cache.get_or_compile(
      key_of(1), [] { return artefact_of(1); },
      [](const Entry& entry) -> Verdict {
        if (text_of(entry, "program") != content_of(1))
          throw rm::Error(RM_DATA_LOSS, "[test] no plan");
        return Verdict::kAccept;
      });
  CHECK(text_of(*result.entry, "program") == content_of(1));
  CHECK(counter(cache, "corrupt") == 1);
  CHECK(fs::exists(object_path(cache, key_of(1))));
}

TEST_CASE("an incompatible entry is removed and compiled again") {
  const TemporaryFolder folder;
  CompileCache(settings(folder)).get_or_compile(key_of(1), [] { return artefact_of(7); });
  CompileCache cache(settings(folder));
  CHECK(cache.lookup(key_of(1), [](const Entry&) { return Verdict::kIncompatible; }) == nullptr);
  CHECK(counter(cache, "incompatible") == 1);
  CHECK_FALSE(fs::exists(object_path(cache, key_of(1))));
}

TEST_CASE("a rejected entry is gone from memory and disk") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  const auto result = cache.get_or_compile(key_of(1), [] { return artefact_of(1); });
  cache.reject(*result.entry, "parity failed");
  CHECK(cache.lookup(key_of(1)) == nullptr);
  CHECK(text_of(*result.entry, "program") == content_of(1));  // who holds it keeps it
}

TEST_CASE("files that are not sound entries of the key are never served") {
  const TemporaryFolder folder;
  CompileCache writer(settings(folder));
  writer.get_or_compile(key_of(1), [] { return artefact_of(1); });
  writer.get_or_compile(key_of(2), [] { return artefact_of(2); });
  const std::string path = object_path(writer, key_of(1));
  const std::string good = read_file(path);
  std::string flipped = good;
  flipped[flipped.size() / 2] ^= 1;
  const std::string bad[] = {"",
                             "RMC1",
                             good.substr(0, 160),
                             good.substr(0, good.size() - 1),
                             good + "x",
                             flipped,
                             read_file(object_path(writer, key_of(2))),
                             std::string(good.size(), '\0')};
  for (const std::string& bytes : bad) {
    overwrite(path, bytes);
    CompileCache cache(settings(folder));
    CHECK(cache.lookup(key_of(1)) == nullptr);
    CHECK(counter(cache, "corrupt") == 1);
    CHECK_FALSE(fs::exists(path));
    Compiler compiler{1};
    CHECK(text_of(*cache.get_or_compile(key_of(1), compiler.fn()).entry, "program") == content_of(1));
    CHECK(read_file(path).size() == good.size());
  }
  CHECK(std::distance(fs::directory_iterator(folder.path + "/cache/v1/quarantine"),
                      fs::directory_iterator()) <= 16);
}

TEST_CASE("a symbolic link or a folder under an entry's name is not read") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  cache.publish(key_of(1), artefact_of(1));
  CompileCache reader(settings(folder));
  const std::string path = object_path(cache, key_of(1));
  fs::rename(path, folder.path + "/elsewhere");
  fs::create_symlink(folder.path + "/elsewhere", path);
  CHECK(reader.lookup(key_of(1)) == nullptr);
  fs::create_directories(path);
  CHECK(reader.lookup(key_of(1)) == nullptr);
  CHECK(counter(reader, "corrupt") == 2);
}

TEST_CASE("a directory that others can write to is not used unless trusted") {
  const TemporaryFolder folder;
  auto here = settings(folder);
  CompileCache(here).publish(key_of(1), artefact_of(1));
  for (const char* sub : {"", "/v1", "/v1/objects", "/v1/tmp"}) {
    const std::string path = here.directory + sub;
    chmod(path.c_str(), 0770);
    CompileCache cache(here);
    CHECK(cache.disk_problem().find(path) != std::string::npos);
    CHECK(cache.lookup(key_of(1)) == nullptr);
    here.trust = true;
    CHECK(CompileCache(here).lookup(key_of(1)));
    here.trust = false;
    chmod(path.c_str(), 0700);
  }
  CHECK(CompileCache(here).lookup(key_of(1)));
}

TEST_CASE("a directory that cannot be made leaves a cache in memory") {
  const TemporaryFolder folder;
  auto here = settings(folder);
  std::ofstream(here.directory) << "a file is in the way";
  CompileCache cache(here);
  Compiler compiler{1};
  CHECK_FALSE(cache.disk_problem().empty());
  CHECK(cache.get_or_compile(key_of(1), compiler.fn()).source == Source::kCompiled);
  CHECK(cache.get_or_compile(key_of(1), compiler.fn()).source == Source::kMemory);
}

TEST_CASE("a directory deleted while running is made again by the next store") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  cache.publish(key_of(1), artefact_of(1));
  fs::remove_all(settings(folder).directory);
  CHECK(cache.get_or_compile(key_of(2), [] { return artefact_of(2); }).entry);
  CHECK(CompileCache(settings(folder)).lookup(key_of(2)));
  CHECK(counter(cache, "store") == 2);
}

TEST_CASE("a shared tier serves what the local one lacks, and is never written") {
  const TemporaryFolder shared, local;
  CompileCache(settings(shared)).publish(key_of(1), artefact_of(1));
  auto here = settings(local);
  here.shared_directory = settings(shared).directory;
  CompileCache cache(here);
  const auto hit = cache.get_or_compile(key_of(1), [] { return artefact_of(9); });
  CHECK(hit.source == Source::kShared);
  CHECK(text_of(*hit.entry, "program") == content_of(1));
  cache.get_or_compile(key_of(2), [] { return artefact_of(2); });
  CHECK(CompileCache(settings(shared)).lookup(key_of(2)) == nullptr);
}

TEST_CASE("with a secret the shared tier serves only entries that carry its code") {
  const TemporaryFolder shared, local;
  const std::string secret = local.path + "/secret";
  std::ofstream(secret) << "0123456789abcdef0123456789abcdef";
  chmod(secret.c_str(), 0600);
  auto with_secret = settings(shared);
  with_secret.secret_file = secret;
  CompileCache(with_secret).publish(key_of(1), artefact_of(1));
  CompileCache(settings(shared)).publish(key_of(2), artefact_of(2));
  chmod(with_secret.directory.c_str(), 0777);  // the code, not the folder, is believed

  auto here = settings(local);
  here.shared_directory = with_secret.directory;
  here.secret_file = secret;
  CompileCache cache(here);
  CHECK(cache.lookup(key_of(1)));
  CHECK(cache.lookup(key_of(2)) == nullptr);
  CHECK(counter(cache, "untrusted") == 1);

  chmod(secret.c_str(), 0644);  // a secret that others can read is none, and nothing is believed
  CompileCache careless(here);
  CHECK(careless.lookup(key_of(1)) == nullptr);
}

TEST_CASE("a child of fork has a cache of its own and does not wait for the parent's threads") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  std::atomic<bool> compiling{false}, finish{false};
  std::thread compiler([&] {
    cache.get_or_compile(key_of(1), [&] {
      compiling = true;
      while (!finish) std::this_thread::yield();
      return artefact_of(1);
    });
  });
  while (!compiling) std::this_thread::yield();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    const auto result = cache.get_or_compile(key_of(2), [] { return artefact_of(2); });
    _exit(text_of(*result.entry, "program") == content_of(2) && counter(cache, "compile") == 1 ? 0
                                                                                            : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  finish = true;
  compiler.join();
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("the digest of a file is remembered by its identity and follows its content") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  const std::string path = folder.path + "/weights";
  std::ofstream(path) << "first";
  CHECK(cache.file_digest(path) == rm::hash_bytes("first"));
  CHECK(cache.entries().empty());  // too young: its times could not tell a second write
  std::ofstream(path) << "other";
  CHECK(cache.file_digest(path) == rm::hash_bytes("other"));
  std::this_thread::sleep_for(std::chrono::milliseconds(3200));
  CHECK(cache.file_digest(path) == rm::hash_bytes("other"));
  CHECK(cache.entries().size() == 1);
  CompileCache second(settings(folder));
  CHECK(second.file_digest(path) == rm::hash_bytes("other"));
  CHECK(counter(second, "hit_disk") == 1);
}
