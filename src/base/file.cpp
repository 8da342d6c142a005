// System calls behind base/file.hpp. EINTR is retried everywhere; other failures are reported.
#include "base/file.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <new>
#include <system_error>

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE (1 << 0)
#endif

namespace rm {
namespace {

rm_code code_of(int errno_value) {
  switch (errno_value) {
    case ENOENT:
      return RM_NOT_FOUND;
    case EEXIST:
      return RM_ALREADY_EXISTS;
    case EACCES:
    case EPERM:
    case EROFS:
      return RM_PERMISSION_DENIED;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return RM_RESOURCE_EXHAUSTED;
    default:
      return RM_UNAVAILABLE;
  }
}

template <typename Call>
auto retry(Call call) {
  decltype(call()) result;
  do {
    result = call();
  } while (result == -1 && errno == EINTR);
  return result;
}

int flags_of(OpenFor purpose) {
  switch (purpose) {
    case OpenFor::kRead:
      return O_RDONLY | O_CLOEXEC;
    case OpenFor::kReadNoLink:
      return O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    case OpenFor::kLock:
      return O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
    case OpenFor::kDirectory:
      return O_RDONLY | O_CLOEXEC | O_DIRECTORY;
  }
  return O_RDONLY | O_CLOEXEC;
}

std::string directory_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

/// "<host>.<pid>.<random>": the reaper reads host and pid back to tell dead writers from live ones.
std::string temporary_name() {
  char host[256] = "localhost";
  gethostname(host, sizeof(host) - 1);
  uint64_t random = 0;
  if (getrandom(&random, sizeof(random), 0) != sizeof(random)) {
    random = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(&random)) ^
             static_cast<uint64_t>(clock());
  }
  char name[320];
  snprintf(name, sizeof(name), "%s.%d.%016llx", host, static_cast<int>(getpid()),
           static_cast<unsigned long long>(random));
  return name;
}

/// Turns "file size limit exceeded" into EFBIG: the signal's default action would end the process.
class BlockFileSizeSignal {
 public:
  BlockFileSizeSignal() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~BlockFileSizeSignal() {
    const timespec no_wait{0, 0};
    while (sigtimedwait(&signal_, nullptr, &no_wait) > 0) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t signal_, before_;
};

void write_pieces(const Fd& file, std::span<const ByteSpan> pieces, const std::string& path) {
  const BlockFileSizeSignal blocked;
  for (ByteSpan piece : pieces) write_all(file, piece, path);
  if (fchmod(file.get(), 0400) != 0) throw FileError("fchmod", path, errno);
  sync_file(file, path);
}

/// errno of the link, 0 when it was made.
int link_unnamed(const Fd& file, const std::string& path) {
  const std::string source = "/proc/self/fd/" + std::to_string(file.get());
  return linkat(AT_FDCWD, source.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0 ? 0
                                                                                          : errno;
}

/// For file systems without O_TMPFILE, or a process without /proc.
Published publish_named(const std::string& temp_directory, const std::string& path,
                        std::span<const ByteSpan> pieces) {
  const std::string temporary = temp_directory + "/" + temporary_name();
  Fd file(retry([&] {
    return open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  }));
  if (!file) throw FileError("create", temporary, errno);
  int failure = 0;
  try {
    write_pieces(file, pieces, temporary);
    if (link(temporary.c_str(), path.c_str()) != 0) failure = errno;
    if (failure == EPERM || failure == EOPNOTSUPP || failure == EMLINK) {  // no hard links here
      failure = syscall(SYS_renameat2, AT_FDCWD, temporary.c_str(), AT_FDCWD, path.c_str(),
                        RENAME_NOREPLACE) == 0
                    ? 0
                    : errno;
    }
  } catch (...) {
    unlink(temporary.c_str());
    throw;
  }
  unlink(temporary.c_str());
  if (failure == EEXIST) return Published::kExists;
  if (failure != 0) throw FileError("link", path, failure);
  return Published::kCreated;
}

}  // namespace

FileError::FileError(const std::string& what, const std::string& path, int errno_value)
    : Error(code_of(errno_value), "[file] expected " + what + " of '" + path +
                                      "' to succeed, got " +
                                      std::generic_category().message(errno_value)),
      errno_value_(errno_value) {}

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void Fd::reset() noexcept {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

Fd open_file(const std::string& path, OpenFor purpose) {
  Fd file(retry([&] { return open(path.c_str(), flags_of(purpose), 0600); }));
  if (!file) throw FileError("open", path, errno);
  return file;
}

std::optional<Fd> open_if_exists(const std::string& path, OpenFor purpose) {
  Fd file(retry([&] { return open(path.c_str(), flags_of(purpose), 0600); }));
  if (file) return file;
  if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
  throw FileError("open", path, errno);
}

struct stat file_status(const Fd& file, const std::string& path) {
  struct stat status;
  if (fstat(file.get(), &status) != 0) throw FileError("fstat", path, errno);
  return status;
}

std::optional<struct stat> path_status(const std::string& path) {
  struct stat status;
  if (lstat(path.c_str(), &status) == 0) return status;
  if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
  throw FileError("stat", path, errno);
}

size_t read_at(const Fd& file, uint64_t offset, std::span<std::byte> out, const std::string& path) {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t got = retry([&] {
      return pread(file.get(), out.data() + done, out.size() - done,
                   static_cast<off_t>(offset + done));
    });
    if (got < 0) throw FileError("read", path, errno);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

void write_all(const Fd& file, ByteSpan data, const std::string& path) {
  while (!data.empty()) {
    const ssize_t put = retry([&] { return write(file.get(), data.data(), data.size()); });
    if (put < 0) throw FileError("write", path, errno);
    data = data.subspan(static_cast<size_t>(put));
  }
}

void sync_file(const Fd& file, const std::string& path) {
  if (retry([&] { return fsync(file.get()); }) != 0) throw FileError("fsync", path, errno);
}

void sync_directory(const std::string& path) {
  const Fd directory = open_file(path, OpenFor::kDirectory);
  // Some network file systems cannot sync a directory; there is nothing to make durable then.
  if (retry([&] { return fsync(directory.get()); }) != 0 && errno != EINVAL && errno != EROFS) {
    throw FileError("fsync", path, errno);
  }
}

void make_directories(const std::string& path) {
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string part = path.substr(0, end);
    if (mkdir(part.c_str(), 0700) != 0 && errno != EEXIST) {
      // Above the first missing part mkdir may fail with EACCES or EROFS though the part exists.
      const int failure = errno;
      struct stat status;
      if (stat(part.c_str(), &status) != 0) throw FileError("mkdir", part, failure);
    }
    if (end == std::string::npos) break;
  }
  struct stat status;
  if (stat(path.c_str(), &status) != 0) throw FileError("mkdir", path, errno);
  if (!S_ISDIR(status.st_mode)) throw FileError("mkdir", path, ENOTDIR);
}

FileBytes::FileBytes(const Fd& file, size_t size, const std::string& path) : size_(size) {
  if (size == 0) return;
  if (size >= kMapFromBytes) {
    void* address = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
    if (address == MAP_FAILED) throw FileError("mmap", path, errno);
    data_ = static_cast<std::byte*>(address);
    mapped_ = true;
    return;
  }
  constexpr size_t kPage = 4096;
  data_ = static_cast<std::byte*>(std::aligned_alloc(kPage, (size + kPage - 1) / kPage * kPage));
  if (data_ == nullptr) throw std::bad_alloc();
  bool whole = false;
  try {
    whole = read_at(file, 0, {data_, size}, path) == size;
  } catch (...) {
    std::free(data_);
    throw;
  }
  if (!whole) {
    std::free(data_);
    throw FileError("read", path, EIO);
  }
}

FileBytes::~FileBytes() {
  if (mapped_) {
    munmap(data_, size_);
  } else {
    std::free(data_);
  }
}

Published publish_file(const std::string& temp_directory, const std::string& path,
                       std::span<const ByteSpan> pieces) {
  Published result = Published::kCreated;
  Fd file(
      retry([&] { return open(temp_directory.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600); }));
  int failure = file ? 0 : errno;
  if (file) {
    write_pieces(file, pieces, path);
    failure = link_unnamed(file, path);
  }
  if (failure == EEXIST) {
    result = Published::kExists;
  } else if (failure == EOPNOTSUPP || failure == EISDIR || failure == EINVAL ||
             (failure == ENOENT && access("/proc/self/fd", F_OK) != 0)) {
    file.reset();
    result = publish_named(temp_directory, path, pieces);
  } else if (failure != 0) {
    throw FileError("publish", path, failure);
  }
  if (result == Published::kCreated) sync_directory(directory_of(path));
  return result;
}

void replace_file(const std::string& temp_directory, const std::string& path,
                  std::string_view text) {
  const std::string temporary = temp_directory + "/" + temporary_name();
  Fd file(retry([&] {
    return open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  }));
  if (!file) throw FileError("create", temporary, errno);
  try {
    const BlockFileSizeSignal blocked;
    write_all(file, as_byte_span(text), temporary);
    if (rename(temporary.c_str(), path.c_str()) != 0) throw FileError("rename", path, errno);
  } catch (...) {
    unlink(temporary.c_str());
    throw;
  }
}

std::optional<FileLock> FileLock::try_acquire(const std::string& path) {
  for (;;) {
    Fd file = open_file(path, OpenFor::kLock);
    if (retry([&] { return flock(file.get(), LOCK_EX | LOCK_NB); }) != 0) {
      if (errno == EWOULDBLOCK) return std::nullopt;
      throw FileError("flock", path, errno);
    }
    // The file may have been removed between open and flock: a lock on it would exclude nobody.
    const struct stat held = file_status(file, path);
    const std::optional<struct stat> named = path_status(path);
    if (named && named->st_ino == held.st_ino && named->st_dev == held.st_dev) {
      return FileLock(std::move(file));
    }
  }
}

FileLock& FileLock::operator=(FileLock&& other) noexcept {
  if (this != &other) {
    release();
    file_ = std::move(other.file_);
  }
  return *this;
}

FileLock::~FileLock() { release(); }

void FileLock::release() noexcept {
  if (file_) flock(file_.get(), LOCK_UN);
  file_.reset();
}

}  // namespace rm
