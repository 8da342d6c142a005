// The process's backends, in the order they were loaded.  One of the two allowed globals: a plugin
// is never unloaded, so neither is the list.  What failed to load is kept with its reason.
#pragma once

#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.hpp"
#include "backend/plugin_loader.hpp"

namespace rm::backend {

struct LoadFailure {
  std::string path;
  std::string reason;  ///< "RM405"
  std::string message;
  std::string name = {};  ///< of the plugin; empty: as the file is called

  std::string plugin_name() const;
};

class Registry {
 public:
  /// Loads one plugin.  The same file again gives the backend it gave before; another file with a
  /// name that is taken is an error.  A failure is recorded and thrown.
  Backend& load(const std::filesystem::path& path, Options options = {});
  /// Loads every plugin of a folder; failures are recorded, the rest is loaded.
  void load_folder(const std::filesystem::path& folder);
  /// Colon-separated absolute files and folders (RM_BACKEND_PATH); a relative or missing entry is a
  /// recorded failure.
  void load_search_path(std::string_view search_path);
  /// A backend that is part of this process.
  Backend& add(std::unique_ptr<Backend> backend);

  /// Lists a plugin that something else than load() failed to load.
  void add_failure(LoadFailure failure);

  Backend* find(std::string_view name) const;
  std::vector<Backend*> backends() const;
  std::vector<LoadFailure> failures() const;

 private:
  Backend& insert(std::unique_ptr<Backend> backend);  // under mutex_
  void record(const std::filesystem::path& path, const Error& error);

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Backend>> backends_;
  std::vector<LoadFailure> failures_;
};

/// The process's registry.
Registry& registry();

}  // namespace rm::backend
