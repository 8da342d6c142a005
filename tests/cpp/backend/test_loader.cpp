// Loading plugin files: what is refused, with which reason, and that nothing else breaks.
#include <dlfcn.h>
#include <doctest/doctest.h>

#include <fstream>

#include "backend/plugin_loader.hpp"
#include "base/hash.hpp"
#include "support.hpp"

using rm::backend::load_plugin;
using rm::test::failure_of;
using rm::test::odd_plugin;
namespace fs = std::filesystem;

namespace {

const fs::path kFolder = RM_ODD_FOLDER;

rm::test::Failure load_failure(const fs::path& path) {
  return failure_of([&] { load_plugin(path); });
}

fs::path write_file(const char* name, const char* content) {
  const fs::path path = fs::temp_directory_path() / name;
  std::ofstream(path) << content;
  return path;
}

}  // namespace

TEST_CASE("a legal plugin loads and its build id is the digest of its bytes") {
  const auto backend = load_plugin(RM_NULL_PLUGIN);
  CHECK(backend->name() == "null");
  CHECK(backend->version() == "1");
  CHECK(backend->path() == RM_NULL_PLUGIN);
  CHECK(backend->build_id() == rm::hash_file(RM_NULL_PLUGIN).hex());
  CHECK(backend->probe_score() == 1);
  CHECK(backend->is_available(nullptr));
}

TEST_CASE("a relative path is refused, so the working directory is never searched") {
  const fs::path before = fs::current_path();
  fs::current_path(fs::path(RM_NULL_PLUGIN).parent_path());
  const auto failure = load_failure("rm_backend_null.so");
  fs::current_path(before);
  CHECK(failure.code == RM_INVALID_ARGUMENT);
  CHECK(failure.says("absolute"));
}

TEST_CASE("a missing file, a text file and an empty file are named as what they are") {
  CHECK(load_failure("/nonexistent/rm_backend_x.so").code == RM_NOT_FOUND);
  CHECK(load_failure(write_file("rm_text.so", "int main;")).says("ELF"));
  CHECK(load_failure(write_file("rm_empty.so", "")).says("ELF"));
  CHECK(load_failure(write_file("rm_short.so", "\177ELF")).says("dlopen"));
}

TEST_CASE("a library without the entry symbol is not a plugin") {
  const auto failure = load_failure(kFolder / "no_plugin.so");
  CHECK(failure.reason == "RM405");
  CHECK(failure.says("rm_backend_query"));
}

TEST_CASE("a plugin whose vendor library is missing says which, as RM401") {
  const auto failure = load_failure(kFolder / "needs_vendor.so");
  CHECK(failure.reason == "RM401");
  CHECK(failure.code == RM_UNAVAILABLE);
  CHECK(failure.says("libmissing_vendor.so"));
}

TEST_CASE("a plugin built with a sanitizer this process does not run is refused before dlopen") {
  const auto failure = load_failure(kFolder / "sanitized_plugin.so");
  if (dlsym(RTLD_DEFAULT, "__asan_init") != nullptr) {
    CHECK_FALSE(failure.failed);  // this test program itself runs under the sanitizer
  } else {
    CHECK(failure.reason == "RM405");
    CHECK(failure.says("address sanitizer"));
  }
}

TEST_CASE("a plugin of another ABI major is RM403, whether it refuses or not") {
  CHECK(load_failure(odd_plugin(9)).reason == "RM403");
  CHECK(load_failure(odd_plugin(10)).reason == "RM403");
}

TEST_CASE("a plugin that throws out of its entry symbol is an error of ours") {
  const auto failure = load_failure(odd_plugin(3));
  CHECK(failure.code == RM_INTERNAL);
  CHECK(failure.says("threw"));
}

TEST_CASE("tables that lie about their size are refused") {
  CHECK(load_failure(odd_plugin(7)).says("struct_size 120"));
  CHECK(load_failure(odd_plugin(8)).says("struct_size"));
}

TEST_CASE("a folder lists its plugins sorted and nothing else") {
  const auto files = rm::backend::plugin_files(fs::path(RM_NULL_PLUGIN).parent_path());
  REQUIRE(files.size() == 1);
  CHECK(files[0] == RM_NULL_PLUGIN);
  CHECK(rm::backend::plugin_files("/nonexistent").empty());
  CHECK(failure_of([] { rm::backend::plugin_files("backends"); }).failed);
}
