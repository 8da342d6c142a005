#include "selfcheck/verdicts.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/log.hpp"

namespace rm::selfcheck {
namespace {

constexpr size_t kMostBytes = size_t{4} << 20;  // some 50 000 verdicts; then the file starts anew
constexpr size_t kHex = 2 * Digest::kBytes;

std::string read_whole(const std::string& path) {
  const auto file = open_if_exists(path, OpenFor::kReadNoLink);
  if (!file) return {};
  std::string text(std::min(static_cast<size_t>(file_status(*file, path).st_size), kMostBytes), '\0');
  text.resize(read_at(*file, 0, std::as_writable_bytes(std::span(text)), path));
  return text;
}

}  // namespace

Verdicts::Verdicts(std::string path, bool writable) : path_(std::move(path)), writable_(writable) {
  if (path_.empty()) return;
  if (writable_) ::utimensat(AT_FDCWD, path_.c_str(), nullptr, 0);  // in use: not collected
  try {
    const std::string text = read_whole(path_);
    for (size_t at = 0; at < text.size();) {
      const size_t end = text.find('\n', at);
      if (end == std::string::npos) break;  // torn: the writer died, or still writes
      const std::string_view line(text.data() + at, end - at);
      at = end + 1;
      if (line.size() < kHex + 3 || line[kHex] != ' ') continue;
      const std::string_view verdict = line.substr(kHex + 1);
      const bool passed = verdict == "ok";
      if (!passed && !verdict.starts_with("bad ")) continue;
      try {
        std::string& known = known_[Digest::from_hex(line.substr(0, kHex))];
        if (known.empty() && !passed) known = verdict.substr(4);  // bad once is bad
      } catch (const Error&) {
        continue;
      }
    }
  } catch (const FileError& error) {
    log_debug(LogTopic::kSelect, error.what());
  }
}

std::optional<std::string> Verdicts::find(const Digest& key) const {
  const auto it = known_.find(key);
  return it == known_.end() ? std::nullopt : std::optional<std::string>(it->second);
}

void Verdicts::add(const Digest& key, const std::string& refusal) {
  known_[key] = refusal;
  if (path_.empty() || !writable_) return;
  std::string why = refusal;
  std::replace(why.begin(), why.end(), '\n', ' ');
  append(key.hex() + (refusal.empty() ? " ok\n" : " bad " + why + "\n"));
}

void Verdicts::append(const std::string& line) {
  const Fd file(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0600));
  bool written = static_cast<bool>(file);
  if (written && ::lseek(file.get(), 0, SEEK_END) > static_cast<off_t>(kMostBytes)) {
    written = ::ftruncate(file.get(), 0) == 0;
  }
  // One write: lines of several processes do not mix. What is lost is checked again.
  written = written && ::write(file.get(), line.data(), line.size()) == static_cast<ssize_t>(line.size());
  if (!written) log_debug(LogTopic::kSelect, "[self_check] a verdict was not stored in " + path_);
}

}  // namespace rm::selfcheck
