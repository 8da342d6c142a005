// Aligned host memory with shared ownership.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace rm::runtime {

/// `bytes` of memory aligned to 256; large blocks ask for huge pages, which GEMV streams need.
std::shared_ptr<void> allocate_host(size_t bytes);

}  // namespace rm::runtime
