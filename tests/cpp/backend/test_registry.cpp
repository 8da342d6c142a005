// The registry: order, double loads, failures that are kept.
#include <doctest/doctest.h>

#include <thread>
#include <vector>

#include "backend/registry.hpp"
#include "support.hpp"

using rm::backend::Registry;
using rm::test::failure_of;
using rm::test::odd_plugin;
namespace fs = std::filesystem;

TEST_CASE("loading a file twice, also through a link, gives the same backend") {
  Registry registry;
  rm::Backend& first = registry.load(RM_NULL_PLUGIN);
  CHECK(&registry.load(RM_NULL_PLUGIN) == &first);
  const fs::path link = fs::temp_directory_path() / "rm_backend_null_link.so";
  fs::remove(link);
  fs::create_symlink(RM_NULL_PLUGIN, link);
  CHECK(&registry.load(link) == &first);
  CHECK(registry.backends().size() == 1);
  CHECK(registry.failures().empty());
  fs::remove(link);
}

TEST_CASE("a second plugin of the same name is refused and the first stays") {
  Registry registry;
  rm::Backend& first = registry.load(RM_NULL_PLUGIN);
  const fs::path copy = fs::temp_directory_path() / "rm_backend_null_copy.so";
  fs::copy_file(RM_NULL_PLUGIN, copy, fs::copy_options::overwrite_existing);
  const auto failure = failure_of([&] { registry.load(copy); });
  CHECK(failure.code == RM_ALREADY_EXISTS);
  CHECK(failure.says(RM_NULL_PLUGIN));
  CHECK(registry.find("null") == &first);
  REQUIRE(registry.failures().size() == 1);
  CHECK(registry.failures()[0].reason == "RM405");
  fs::remove(copy);
}

TEST_CASE("broken plugins in a search path are recorded and the rest loads") {
  Registry registry;
  const std::string path = odd_plugin(9).string() + ":relative/folder::/nonexistent.so:" +
                           fs::path(RM_NULL_PLUGIN).parent_path().string();
  registry.load_search_path(path);
  REQUIRE(registry.backends().size() == 1);
  CHECK(registry.find("null") != nullptr);
  CHECK(registry.find("odd") == nullptr);
  const auto failures = registry.failures();
  REQUIRE(failures.size() == 4);  // wrong major, relative, the empty entry, missing
  CHECK(failures[0].reason == "RM403");
  for (const auto& failure : failures) CHECK_FALSE(failure.message.empty());
  registry.load_search_path(path);
  CHECK(registry.failures().size() == 4);  // told once
}

TEST_CASE("a relative folder is a recorded failure") {
  Registry registry;
  registry.load_folder("backends");
  CHECK(registry.failures().size() == 1);
}

TEST_CASE("many threads loading the same plugin get one backend") {
  Registry registry;
  std::vector<rm::Backend*> seen(8);
  std::vector<std::thread> threads;
  for (auto& slot : seen) {
    threads.emplace_back([&] {
      slot = &registry.load(RM_NULL_PLUGIN);
      slot->get_device_info(0);
    });
  }
  for (auto& thread : threads) thread.join();
  for (rm::Backend* backend : seen) CHECK(backend == seen[0]);
}
