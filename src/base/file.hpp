// POSIX files with owners: descriptors, mappings, advisory locks, and publishing a file whole or
// not at all. Every failure is a FileError that carries errno.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/error.hpp"
#include "base/hash.hpp"

namespace rm {

/// A failed system call: `errno_value()` says why, the message says on what.
class FileError : public Error {
 public:
  FileError(const std::string& what, const std::string& path, int errno_value);
  int errno_value() const noexcept { return errno_value_; }

 private:
  int errno_value_;
};

/// Owns one descriptor; closes it, never throws from there.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { reset(); }

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  void reset() noexcept;

 private:
  int fd_ = -1;
};

enum class OpenFor {
  kRead,        // must exist; final symbolic links are followed
  kReadNoLink,  // as kRead, but ELOOP on a symbolic link
  kLock,        // read-write, created 0600, no symbolic link
  kDirectory,
};
Fd open_file(const std::string& path, OpenFor purpose);
/// As open_file, but nullopt when the file does not exist.
std::optional<Fd> open_if_exists(const std::string& path, OpenFor purpose);

struct stat file_status(const Fd& file, const std::string& path);
/// nullopt when there is no such file; symbolic links are not followed.
std::optional<struct stat> path_status(const std::string& path);

/// Fills `out` from `offset`; the count is short only at the end of the file.
size_t read_at(const Fd& file, uint64_t offset, std::span<std::byte> out, const std::string& path);
void write_all(const Fd& file, ByteSpan data, const std::string& path);
void sync_file(const Fd& file, const std::string& path);
/// Makes a link or rename inside `path` durable.
void sync_directory(const std::string& path);
/// mkdir -p with mode 0700 for what is created.
void make_directories(const std::string& path);

/// A file's bytes, read-only, for as long as the object lives. Small files are read (a truncation
/// under us is then a short read), large ones mapped; data() is aligned to 4096 either way.
class FileBytes {
 public:
  static constexpr size_t kMapFromBytes = size_t{4} << 20;
  /// Throws FileError(EIO) when fewer than `size` bytes can be had.
  FileBytes(const Fd& file, size_t size, const std::string& path);
  FileBytes(const FileBytes&) = delete;
  FileBytes& operator=(const FileBytes&) = delete;
  ~FileBytes();

  ByteSpan bytes() const noexcept { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  bool mapped_ = false;
};

enum class Published { kCreated, kExists };
/// Writes the pieces to an unnamed file in `temp_directory`, syncs it and links it to `path`:
/// readers see all of it or nothing, and an existing file is never touched (kExists).
/// The file's mode is 0400. Throws FileError; no temporary is left then.
Published publish_file(const std::string& temp_directory, const std::string& path,
                       std::span<const ByteSpan> pieces);

/// Writes the text and renames it over `path`, unsynced: for records that may change and may be
/// lost with the power, never for entries.
void replace_file(const std::string& temp_directory, const std::string& path,
                  std::string_view text);

/// An advisory flock that the kernel drops with the process.
class FileLock {
 public:
  /// nullopt when another open file description holds it.
  static std::optional<FileLock> try_acquire(const std::string& path);
  FileLock(FileLock&&) noexcept = default;
  FileLock& operator=(FileLock&& other) noexcept;
  /// Unlocks by name, so that a child which inherited the descriptor does not keep the lock.
  ~FileLock();

  const Fd& file() const noexcept { return file_; }

 private:
  explicit FileLock(Fd file) : file_(std::move(file)) {}
  void release() noexcept;
  Fd file_;
};

}  // namespace rm
