// Publishing whole or not at all, locks that exclude, and errors that carry errno.
#include "base/file.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

struct TemporaryFolder {
  TemporaryFolder() {
    std::string name = (fs::temp_directory_path() / "rm_base_XXXXXX").string();
    path = mkdtemp(name.data());
  }
  ~TemporaryFolder() { fs::remove_all(path); }
  std::string path;
};

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

rm::Published publish(const TemporaryFolder& folder, const std::string& name,
                      std::string_view text) {
  const rm::ByteSpan pieces[] = {rm::as_byte_span(text.substr(0, 1)),
                                 rm::as_byte_span(text.substr(1))};
  return rm::publish_file(folder.path, folder.path + "/" + name, pieces);
}

}  // namespace

TEST_CASE("a published file is whole, read-only, and the first one stays") {
  const TemporaryFolder folder;
  CHECK(publish(folder, "a", "first") == rm::Published::kCreated);
  CHECK(publish(folder, "a", "second") == rm::Published::kExists);
  CHECK(text_of(folder.path + "/a") == "first");
  CHECK((rm::path_status(folder.path + "/a")->st_mode & 0777) == 0400);
  CHECK(std::distance(fs::directory_iterator(folder.path), fs::directory_iterator()) == 1);
}

TEST_CASE("a file size limit is an error with EFBIG and leaves nothing behind") {
  const TemporaryFolder folder;
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{1000, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  int failure = 0;
  try {
    publish(folder, "a", std::string(5000, 'x'));
  } catch (const rm::FileError& error) {
    failure = error.errno_value();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  CHECK(failure == EFBIG);
  CHECK(fs::is_empty(folder.path));
}

TEST_CASE("bytes are read or mapped with the same content") {
  const TemporaryFolder folder;
  for (size_t size : {size_t{0}, size_t{1}, size_t{5000}, rm::FileBytes::kMapFromBytes + 3}) {
    const std::string name = "f" + std::to_string(size);
    const std::string text(size, 'q');
    const rm::ByteSpan pieces[] = {rm::as_byte_span(text)};
    rm::publish_file(folder.path, folder.path + "/" + name, pieces);
    const rm::Fd file = rm::open_file(folder.path + "/" + name, rm::OpenFor::kRead);
    const rm::FileBytes bytes(file, size, name);
    CHECK(rm::hash_bytes(bytes.bytes()) == rm::hash_bytes(text));
    CHECK(rm::hash_file(folder.path + "/" + name) == rm::hash_bytes(text));
  }
}

TEST_CASE("a file shorter than expected is an error, not fewer bytes") {
  const TemporaryFolder folder;
  publish(folder, "a", "12345");
  const rm::Fd file = rm::open_file(folder.path + "/a", rm::OpenFor::kRead);
  CHECK_THROWS_AS(rm::FileBytes(file, 6, "a"), rm::FileError);
}

TEST_CASE("a lock excludes another description until it is released") {
  const TemporaryFolder folder;
  const std::string path = folder.path + "/lock";
  {
    const auto held = rm::FileLock::try_acquire(path);
    REQUIRE(held);
    CHECK_FALSE(rm::FileLock::try_acquire(path));
  }
  CHECK(rm::FileLock::try_acquire(path));
}

TEST_CASE("a symbolic link is not followed where the cache opens") {
  const TemporaryFolder folder;
  publish(folder, "target", "secret");
  fs::create_symlink(folder.path + "/target", folder.path + "/link");
  CHECK_THROWS_AS(rm::open_file(folder.path + "/link", rm::OpenFor::kReadNoLink), rm::FileError);
  CHECK_THROWS_AS(rm::FileLock::try_acquire(folder.path + "/link"), rm::FileError);
}

TEST_CASE("directories are made private, and a file in the way is an error") {
  const TemporaryFolder folder;
  rm::make_directories(folder.path + "/a/b/c");
  CHECK((rm::path_status(folder.path + "/a/b")->st_mode & 0777) == 0700);
  publish(folder, "file", "x");
  CHECK_THROWS_AS(rm::make_directories(folder.path + "/file"), rm::FileError);
  CHECK_THROWS_AS(rm::make_directories(folder.path + "/file/x"), rm::FileError);
}
