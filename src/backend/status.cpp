// rm_status and the host table.  status_create never fails: out of memory gives a shared constant.
#include "backend/status.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <new>
#include <string>

#include "base/error.hpp"
#include "base/log.hpp"

struct rm_status {
  rm_code code = RM_UNKNOWN;
  std::string message;
  bool shared = false;
};

namespace rm::backend {
namespace {

rm_status* out_of_memory_status() noexcept {
  static rm_status status{RM_RESOURCE_EXHAUSTED, "out of memory", true};  // fits the small buffer
  return &status;
}

rm_status* status_create(rm_code code, rm_str message, const char* file, int line) {
  try {
    auto status = std::make_unique<rm_status>();
    status->code = code == RM_OK ? RM_UNKNOWN : code;  // OK is NULL, never an object
    status->message = std::string(view(message));
    if (file != nullptr && code == RM_INTERNAL) {
      status->message += " (" + std::string(file) + ":" + std::to_string(line) + ")";
    }
    return status.release();
  } catch (...) {
    return out_of_memory_status();
  }
}

void status_release(rm_status* status) {
  if (status != nullptr && !status->shared) delete status;
}

rm_code status_code(const rm_status* status) { return status == nullptr ? RM_OK : status->code; }

rm_str status_message(const rm_status* status) {
  return status == nullptr ? rm_str{nullptr, 0} : to_rm_str(status->message);
}

// Severities are syslog's order turned round: 0 trace, 1 debug, 2 info, 3 warning, 4 error.
void log_from_plugin(int severity, rm_str message) {
  const int level = std::clamp(severity, 0, static_cast<int>(LogLevel::kError));
  log_line(LogTopic::kBackend, static_cast<LogLevel>(level), view(message));
}

std::map<std::string, const void*, std::less<>>& extensions() {
  static std::map<std::string, const void*, std::less<>> tables;
  return tables;
}

const void* host_extension(rm_str name) {
  const auto at = extensions().find(view(name));
  return at == extensions().end() ? nullptr : at->second;
}

}  // namespace

const rm_host_api* host_api() noexcept {
  static const rm_host_api table = {sizeof(rm_host_api), RM_ABI_VERSION,  0,
                                    &status_create,      &status_release, &status_code,
                                    &status_message,     &log_from_plugin, &host_extension};
  return &table;
}

void offer_host_extension(std::string_view name, const void* table) {
  extensions().insert_or_assign(std::string(name), table);
}

void check(rm_status* status, std::string_view where) {
  if (status == nullptr) return;
  const rm_code code = status->code;
  std::string message = "[" + std::string(where) + "] " + status->message;
  status_release(status);
  throw Error(code, message);
}

rm_code consume(rm_status* status) noexcept {
  const rm_code code = status_code(status);
  status_release(status);
  return code;
}

}  // namespace rm::backend
