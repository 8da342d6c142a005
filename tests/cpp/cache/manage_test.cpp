// Listing, verifying, eviction, clearing and importing.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <ctime>

#include "base/error.hpp"
#include "support.hpp"

using namespace cache_test;
using rm::cache::ArtefactKind;
using rm::cache::CompileCache;
using rm::cache::GcLimits;

namespace {

/// Marks an entry as used `age_s` ago; negative ages lie in the future.
void set_age(const std::string& path, int64_t age_s) {
  const timespec mark{time(nullptr) - age_s, 0};
  const timespec both[] = {mark, mark};
  REQUIRE(utimensat(AT_FDCWD, path.c_str(), both, 0) == 0);
}

}  // namespace

TEST_CASE("a listing shows kind, size, fields and what it cost") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  cache.publish(key_of(1), artefact_of(1), 250);
  cache.publish(key_of(2, ArtefactKind::kVerdict), artefact_of(2, 10, "g"));
  const auto entries = cache.entries();
  REQUIRE(entries.size() == 2);
  for (const auto& entry : entries) {
    const bool plan = entry.header.kind == ArtefactKind::kProgram;
    CHECK(entry.header.key ==
          key_of(plan ? 1 : 2, plan ? ArtefactKind::kProgram : ArtefactKind::kVerdict).digest);
    CHECK(entry.metadata.compile_ms == (plan ? 250 : 0));
    CHECK(entry.metadata.fields == key_of(plan ? 1 : 2, entry.header.kind).fields);
  }
}

TEST_CASE("verify finds what is not sound and puts it away when asked") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  for (int i = 0; i < 3; ++i) cache.publish(key_of(i), artefact_of(i));
  std::string bytes = read_file(object_path(cache, key_of(0)));
  bytes.back() ^= 1;
  overwrite(object_path(cache, key_of(0)), bytes);
  overwrite(object_path(cache, key_of(1)), read_file(object_path(cache, key_of(2))));
  CHECK(cache.verify(false).bad.size() == 2);
  CHECK(cache.verify(true).sound == 1);
  CHECK(cache.verify(true).bad.empty());
}

TEST_CASE("eviction takes the least recently used down to four fifths of the limit") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  uint64_t total = 0;
  for (int i = 0; i < 10; ++i) {
    cache.publish(key_of(i), artefact_of(i, 10'000));
    set_age(object_path(cache, key_of(i)), 1000 - i);
  }
  for (const auto& entry : cache.entries()) total += entry.object.size;
  GcLimits limits;
  limits.max_bytes = total / 2;
  limits.dry_run = true;
  CHECK(cache.collect(limits).evicted == 6);
  CHECK(cache.entries().size() == 10);
  limits.dry_run = false;
  const auto report = cache.collect(limits);
  CHECK(report.evicted == 6);
  CHECK(report.after_bytes <= limits.max_bytes / 5 * 4);
  CHECK_FALSE(fs::exists(object_path(cache, key_of(0))));
  CHECK(fs::exists(object_path(cache, key_of(9))));
}

TEST_CASE("young entries stay, idle ones go, and marks in the future are not believed") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  for (int i = 0; i < 3; ++i) cache.publish(key_of(i), artefact_of(i));
  set_age(object_path(cache, key_of(1)), 40 * 86400);
  set_age(object_path(cache, key_of(2)), -1000 * 86400);
  GcLimits limits;
  limits.max_age_s = 30 * 86400;
  limits.max_bytes = 1;
  cache.collect(limits);
  CHECK(fs::exists(object_path(cache, key_of(0))));
  CHECK_FALSE(fs::exists(object_path(cache, key_of(1))));
  CHECK_FALSE(fs::exists(object_path(cache, key_of(2))));
}

TEST_CASE("an entry in use keeps its bytes when it is evicted, cleared and stored again") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  const size_t size = 6'000'000;  // large enough to be mapped
  cache.publish(key_of(1), artefact_of(1, size));
  CompileCache reader(settings(folder));
  const auto held = reader.lookup(key_of(1));
  REQUIRE(held);
  CHECK(cache.clear() == 1);
  cache.publish(key_of(1), artefact_of(2, size));
  CHECK(text_of(*held, "program") == content_of(1, size));
}

TEST_CASE(
    "the temporary files of dead writers are reaped after an hour, those of living ones are not") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  char host[256];
  gethostname(host, sizeof(host));
  const std::string tmp = cache.directory() + "/v1/tmp/";
  const std::string dead = tmp + host + ".999999999.00",
                    live = tmp + host + "." + std::to_string(getpid()) + ".00",
                    young = tmp + host + ".999999998.00", strange = tmp + "otherhost.1.00";
  for (const std::string& path : {dead, live, young, strange}) {
    std::ofstream(path) << "x";
    set_age(path, path == young ? 10 : 7200);
  }
  CHECK(cache.collect({}).temporary_files == 1);
  CHECK_FALSE(fs::exists(dead));
  CHECK(fs::exists(live));
  CHECK(fs::exists(young));
  CHECK(fs::exists(strange));
  set_age(strange, 2 * 86400);
  CHECK(cache.collect({}).temporary_files == 1);
}

TEST_CASE("a symbolic link among temporary files is removed, its target is not") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  const std::string target = folder.path + "/target";
  std::ofstream(target) << "precious";
  const std::string link = cache.directory() + "/v1/tmp/other.1.00";
  fs::create_symlink(target, link);
  const timespec old[] = {{1000, 0}, {1000, 0}};
  utimensat(AT_FDCWD, link.c_str(), old, AT_SYMLINK_NOFOLLOW);
  CHECK(cache.collect({}).temporary_files == 1);
  CHECK(read_file(target) == "precious");
}

TEST_CASE("bytes from elsewhere are imported only when they are a sound entry") {
  const TemporaryFolder from, to;
  CompileCache source(settings(from)), target(settings(to));
  source.publish(key_of(1), artefact_of(1), 77);
  std::string bytes = read_file(object_path(source, key_of(1)));
  CHECK(target.import_entry(bytes) == rm::Published::kCreated);
  CHECK(target.import_entry(bytes) == rm::Published::kExists);
  const auto entry = target.lookup(key_of(1));
  REQUIRE(entry);
  CHECK(entry->metadata.compile_ms == 77);
  bytes[200] ^= 1;
  CHECK_THROWS_AS(target.import_entry(bytes), rm::Error);
}

TEST_CASE("the last miss says which key was asked for") {
  const TemporaryFolder folder;
  CompileCache cache(settings(folder));
  CHECK(cache.last_miss().empty());
  cache.get_or_compile(key_of(5), [] { return artefact_of(5); });
  CHECK(cache.last_miss().find(key_of(5).digest.hex()) != std::string::npos);
}

TEST_CASE("counters that were torn on disk count as zero and are written again") {
  const TemporaryFolder folder;
  {
    CompileCache cache(settings(folder));
    cache.publish(key_of(1), artefact_of(1));
  }
  for (const auto& file : fs::directory_iterator(settings(folder).directory + "/v1/stats")) {
    std::ofstream(file.path()) << R"({"store": 12, "mi)";
  }
  CompileCache cache(settings(folder));
  CHECK(cache.lookup(key_of(1)));
  CHECK(cache.total_counters()["hit_disk"] == 1);
}
