// Shared by the cache tests: a folder that goes away, keys and artefacts by number.
#pragma once

#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "cache/compile_cache.hpp"

namespace cache_test {

namespace fs = std::filesystem;

struct TemporaryFolder {
  TemporaryFolder() {
    std::string name = (fs::temp_directory_path() / "rm_cache_XXXXXX").string();
    path = mkdtemp(name.data());
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  std::string path;
};

inline rm::cache::Settings settings(const TemporaryFolder& folder) {
  rm::cache::Settings out;
  out.directory = folder.path + "/cache";
  return out;
}

inline rm::cache::Key key_of(int number,
                             rm::cache::ArtefactKind kind = rm::cache::ArtefactKind::kProgram) {
  return rm::cache::KeyBuilder(kind)
      .set(rm::cache::KeyField::kProgram, "program " + std::to_string(number))
      .finish();
}

/// What the program with this number compiles to: any other content is a wrong hit.
inline std::string content_of(int number, size_t size = 5000) {
  std::string out;
  while (out.size() < size) out += "content " + std::to_string(number) + " ";
  out.resize(size);
  return out;
}

inline rm::cache::Artefact artefact_of(int number, size_t size = 5000, std::string guards = {}) {
  return {{{"program", content_of(number, size)}, {"log", "made " + std::to_string(number)}},
          std::move(guards),
          "test",
          "any"};
}

inline std::string text_of(const rm::cache::Entry& entry, std::string_view section) {
  const rm::cache::Section* found = entry.section(section);
  if (found == nullptr) return "no such section";
  return {reinterpret_cast<const char*>(found->bytes.data()), found->bytes.size()};
}

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Replaces a published file, as a bad disk would: same name, mode of its own.
inline void overwrite(const std::string& path, const std::string& bytes) {
  fs::remove(path);
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string object_path(const rm::cache::CompileCache& cache, const rm::cache::Key& key) {
  const std::string hex = key.digest.hex();
  return cache.directory() + "/v1/objects/" + hex.substr(0, 2) + "/" + hex + ".rmc";
}

inline uint64_t counter(const rm::cache::CompileCache& cache, const std::string& name) {
  const auto counters = cache.counters();
  const auto found = counters.find(name);
  return found == counters.end() ? 0 : found->second;
}

}  // namespace cache_test
