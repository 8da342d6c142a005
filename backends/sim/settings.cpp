// The environment, read on every call.
#include "settings.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>

namespace rm::sim {
namespace {

std::string text(const char* name, const char* otherwise) {
  const char* found = std::getenv(name);
  return found == nullptr || *found == '\0' ? otherwise : found;
}

std::vector<std::string> list(const char* name) {
  std::vector<std::string> out(1);
  for (const char c : text(name, "")) {
    if (c == ',') {
      out.emplace_back();
    } else {
      out.back().push_back(c);
    }
  }
  return out;
}

}  // namespace

Settings settings() {
  Settings out;
  out.devices = std::strtoul(text("RM_SIM_DEVICES", "1").c_str(), nullptr, 10);
  out.target = text("RM_SIM_TARGET", "sim-1");
  out.compiler = text("RM_SIM_COMPILER", "1.0");
  out.compile_seconds = std::strtod(text("RM_SIM_COMPILE_S", "0.3").c_str(), nullptr);
  out.memory_bytes = std::strtoull(text("RM_SIM_MEMORY", "2147483648").c_str(), nullptr, 10);
  out.bf16 = text("RM_SIM_NUMERICS", "fp32") == "bf16";
  out.embed = text("RM_SIM_EMBED", "0") == "1";
  out.unsupported = list("RM_SIM_UNSUPPORTED");
  return out;
}

bool fault(std::string_view name) {
  bool on = false;
  for (const std::string& one : list("RM_SIM_FAULT")) on = on || one == name;
  if (!on) return false;
  const std::string once = text("RM_SIM_FAULT_ONCE", "");
  if (once.empty()) return true;
  const int file = open(once.c_str(), O_CREAT | O_EXCL | O_CLOEXEC | O_WRONLY, 0600);
  if (file < 0) return false;
  close(file);
  return true;
}

}  // namespace rm::sim
