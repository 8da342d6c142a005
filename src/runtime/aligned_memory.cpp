// Blocks of 2 MiB and more are aligned to 2 MiB and advised for transparent huge pages: fewer TLB
// misses when weights are streamed. The advice may be ignored, so its result is not checked.
#include "runtime/aligned_memory.hpp"

#include <sys/mman.h>

namespace rm::runtime {

std::shared_ptr<void> allocate_host(size_t bytes) {
  constexpr size_t kHuge = size_t{2} << 20;
  size_t alignment = bytes >= kHuge ? kHuge : 256;
  size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* p = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (p == nullptr) throw std::bad_alloc();
  if (alignment == kHuge) madvise(p, rounded, MADV_HUGEPAGE);
  return {p, std::free};
}

}  // namespace rm::runtime
