// Registry.
#include "backend/registry.hpp"

#include "base/error.hpp"

namespace rm::backend {

namespace fs = std::filesystem;

std::string LoadFailure::plugin_name() const {
  if (!name.empty()) return name;
  const std::string stem = fs::path(path).stem().string();
  return stem.starts_with("rm_backend_") ? stem.substr(11) : stem;
}

Backend& Registry::load(const fs::path& path, Options options) {
  const std::lock_guard lock(mutex_);
  try {
    std::error_code error;
    const fs::path real = path.is_absolute() ? fs::canonical(path, error) : path;
    const fs::path& file = error ? path : real;
    for (const auto& backend : backends_) {
      if (backend->path() == file.string()) return *backend;
    }
    return insert(load_plugin(file, std::move(options)));
  } catch (const Error& error) {
    record(path, error);
    throw;
  }
}

void Registry::load_folder(const fs::path& folder) {
  std::vector<fs::path> files;
  try {
    files = plugin_files(folder);
  } catch (const Error& error) {
    const std::lock_guard lock(mutex_);
    record(folder, error);
    return;
  }
  for (const fs::path& file : files) {
    try {
      load(file);
    } catch (const Error&) {  // recorded by load(): one broken plugin must not hide the others
    }
  }
}

void Registry::load_search_path(std::string_view search_path) {
  while (!search_path.empty()) {
    const size_t colon = search_path.find(':');
    const fs::path entry(search_path.substr(0, colon));
    search_path.remove_prefix(colon == std::string_view::npos ? search_path.size() : colon + 1);
    if (entry.is_absolute() && fs::is_directory(entry)) {
      load_folder(entry);
      continue;
    }
    try {
      load(entry);
    } catch (const Error&) {  // recorded by load()
    }
  }
}

Backend& Registry::add(std::unique_ptr<Backend> backend) {
  const std::lock_guard lock(mutex_);
  return insert(std::move(backend));
}

Backend& Registry::insert(std::unique_ptr<Backend> backend) {
  for (const auto& other : backends_) {
    if (other->name() == backend->name()) {
      throw Error(RM_ALREADY_EXISTS,
                  "[plugin " + backend->path() + "] expected a new name, got '" + backend->name() +
                      "', which " + (other->path().empty() ? "this process" : other->path()) +
                      " already provides",
                  "RM405");
    }
  }
  backends_.push_back(std::move(backend));
  return *backends_.back();
}

void Registry::record(const fs::path& path, const Error& error) {
  const std::string reason = error.reason().empty() ? "RM405" : error.reason();
  for (const LoadFailure& known : failures_) {
    if (known.path == path.string() && known.message == error.what()) return;
  }
  failures_.push_back({path.string(), reason, error.what(), {}});
}

void Registry::add_failure(LoadFailure failure) {
  const std::lock_guard lock(mutex_);
  failures_.push_back(std::move(failure));
}

Backend* Registry::find(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  for (const auto& backend : backends_) {
    if (backend->name() == name) return backend.get();
  }
  return nullptr;
}

std::vector<Backend*> Registry::backends() const {
  const std::lock_guard lock(mutex_);
  std::vector<Backend*> out;
  for (const auto& backend : backends_) out.push_back(backend.get());
  return out;
}

std::vector<LoadFailure> Registry::failures() const {
  const std::lock_guard lock(mutex_);
  return failures_;
}

Registry& registry() {
  // Never destroyed: threads may still run kernels while static destructors run.
  static Registry* const instance = new Registry();
  return *instance;
}

}  // namespace rm::backend
