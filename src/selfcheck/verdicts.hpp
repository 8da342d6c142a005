// Verdicts on kernel rows, kept by the compile cache's folder for all processes of a machine.
//
// One text file a machine, a line a verdict: 64 hexadecimal digits that name row, problem and
// machine, then "ok" or "bad" and why. Lines are appended whole; what is no such line is skipped, so
// a damaged file costs checks, never a wrong kernel.
#pragma once

#include <optional>
#include <string>
#include <unordered_map>

#include "base/hash.hpp"

namespace rm::selfcheck {

/// Not thread safe.
class Verdicts {
 public:
  /// `path` is the file; empty keeps verdicts in this process only. Never throws for its content.
  Verdicts(std::string path, bool writable);

  /// Why the row was refused, empty when it passed; nullopt when it was never checked.
  std::optional<std::string> find(const Digest& key) const;
  void add(const Digest& key, const std::string& refusal);

 private:
  void append(const std::string& line);

  std::string path_;
  bool writable_;
  std::unordered_map<Digest, std::string> known_;
};

}  // namespace rm::selfcheck
