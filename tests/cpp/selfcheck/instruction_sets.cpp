#include "instruction_sets.hpp"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace rm::selfcheck_test {
namespace {

std::string field(const std::string& name) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, name.size(), name) == 0) return line.substr(line.find(':') + 1);
  }
  return {};
}

bool has(const std::vector<std::string>& wanted) {
  std::istringstream text(field("flags"));
  std::vector<std::string> flags;
  for (std::string flag; text >> flag;) flags.push_back(flag);
  return std::all_of(wanted.begin(), wanted.end(), [&](const std::string& flag) {
    return std::find(flags.begin(), flags.end(), flag) != flags.end();
  });
}

}  // namespace

const std::vector<std::string>& instruction_sets() {
  static const std::vector<std::string> sets = {
      "baseline",    "avx2",        "avx2+avxvnni", "avx512", "avx512+bf16", "avx512+vnni",
      "avx512+amx",  "auto"};
  return sets;
}

bool offered(const std::string& set) {
  std::istringstream parts(set);
  for (std::string part; std::getline(parts, part, '+');) {
    if (part == "avx2" && !has({"avx2", "fma", "bmi2", "f16c"})) return false;
    if (part == "avx512" && !has({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"})) {
      return false;
    }
    if (part == "avxvnni" && !has({"avx_vnni"})) return false;
    if (part == "bf16" && !has({"avx512_bf16"})) return false;
    if (part == "vnni" && !has({"avx512_vnni"})) return false;
    if (part == "amx" && !has({"amx_tile", "amx_bf16", "amx_int8"})) return false;
  }
  return true;
}

std::string processor() {
  const std::string name = field("model name");
  return name.substr(std::min(name.find_first_not_of(' '), name.size()));
}

}  // namespace rm::selfcheck_test
