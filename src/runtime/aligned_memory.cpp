// Large blocks are mapped one by one: freeing one gives its memory back to the system, whatever else
// was allocated since. Those of 2 MiB and more are aligned to 2 MiB and advised for transparent huge
// pages: fewer TLB misses when weights are streamed. The advice may be ignored, so its result is not
// checked.
#include "runtime/aligned_memory.hpp"

#include <sys/mman.h>

#include <cstdint>

namespace rm::runtime {
namespace {

constexpr size_t kMapped = size_t{128} << 10;
constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kPage = size_t{4} << 10;
constexpr size_t kAlignment = 256;

size_t round_up(size_t bytes, size_t alignment) {
  if (bytes > SIZE_MAX - 2 * kHuge) throw std::bad_alloc();
  return (bytes + alignment - 1) / alignment * alignment;
}

std::byte* map(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(p);
}

std::shared_ptr<void> owned(std::byte* block, size_t bytes) {
  return {block, [bytes](void* p) { munmap(p, bytes); }};
}

std::shared_ptr<void> map_huge(size_t bytes) {
  const size_t rounded = round_up(bytes, kHuge);
  std::byte* start = map(rounded + kHuge);
  const size_t before = (kHuge - reinterpret_cast<uintptr_t>(start) % kHuge) % kHuge;
  if (before != 0) munmap(start, before);
  munmap(start + before + rounded, kHuge - before);
  madvise(start + before, rounded, MADV_HUGEPAGE);
  return owned(start + before, rounded);
}

}  // namespace

std::shared_ptr<void> allocate_host(size_t bytes) {
  if (bytes >= kHuge) return map_huge(bytes);
  if (bytes >= kMapped) {
    const size_t rounded = round_up(bytes, kPage);
    return owned(map(rounded), rounded);
  }
  const size_t rounded = round_up(bytes, kAlignment);
  void* p = std::aligned_alloc(kAlignment, rounded == 0 ? kAlignment : rounded);
  if (p == nullptr) throw std::bad_alloc();
  return {p, std::free};
}

}  // namespace rm::runtime
