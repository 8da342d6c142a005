// memfd_create and mmap.
#include "worker/shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace rm::worker {

SharedMemory::SharedMemory(size_t bytes) : size_(bytes == 0 ? 1 : bytes) {
  file_ = Fd(memfd_create("rm_abstract", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file_) throw FileError("memfd_create", "memory", errno);
  if (ftruncate(file_.get(), static_cast<off_t>(size_)) != 0) {
    throw FileError("ftruncate", "memory", errno);
  }
  // The other side can neither shrink it under us (SIGBUS) nor grow it.
  fcntl(file_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  map(true);
}

SharedMemory::SharedMemory(Fd file, bool writable) : file_(std::move(file)) {
  const int seals = fcntl(file_.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw Error(RM_DATA_LOSS,
                "[worker] expected memory that is sealed against shrinking, got a descriptor of "
                "another kind; the worker's environment needs the same rm_abstract",
                "RM303");
  }
  const struct stat status = file_status(file_, "shared memory");
  size_ = static_cast<size_t>(status.st_size);
  if (size_ == 0) throw FileError("map", "shared memory of no bytes", EINVAL);
  map(writable);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : file_(std::move(other.file_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, size_);
}

bool SharedMemory::is_frozen() const noexcept {
  const int seals = fcntl(file_.get(), F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_WRITE) != 0;
}

bool SharedMemory::freeze() {
  munmap(data_, size_);  // a mapping for writing would stand in the way
  data_ = nullptr;
  const bool done = fcntl(file_.get(), F_ADD_SEALS, F_SEAL_WRITE) == 0;
  map(!done);
  return done;
}

MappedPart::MappedPart(const Fd& file, uint64_t offset, uint64_t bytes) : bytes_(bytes) {
  const struct stat status = file_status(file, "an artefact");
  const auto size = static_cast<uint64_t>(status.st_size);
  if (bytes == 0 || offset > size || bytes > size - offset) {
    throw Error(RM_DATA_LOSS, "[worker] expected an artefact inside its file, got one beyond it",
                "RM303");
  }
  skip_ = offset % static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  at_ = mmap(nullptr, bytes_ + skip_, PROT_READ, MAP_SHARED, file.get(),
             static_cast<off_t>(offset - skip_));
  if (at_ == MAP_FAILED) throw FileError("mmap", "an artefact", errno);
}

MappedPart::~MappedPart() { munmap(at_, bytes_ + skip_); }

void SharedMemory::map(bool writable) {
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* at = mmap(nullptr, size_, protection, MAP_SHARED, file_.get(), 0);
  if (at == MAP_FAILED) throw FileError("mmap", "shared memory", errno);
  data_ = static_cast<std::byte*>(at);
}

}  // namespace rm::worker
