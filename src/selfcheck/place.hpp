// Where a checked row is launched: memory of its device and a stream of its own. Rows of the host
// need none.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "select/kernel_table.hpp"

namespace rm::selfcheck {

/// One check's; not thread safe. Throws rm::Error for what the device refuses.
class Place {
 public:
  virtual ~Place() = default;
  /// On a boundary of 256 bytes.
  virtual std::shared_ptr<void> allocate(size_t bytes) = 0;
  /// From the host, and back behind everything that was launched on the stream.
  virtual void copy_in(void* to, const void* from, size_t bytes) = 0;
  virtual void copy_out(void* to, const void* from, size_t bytes) = 0;
  virtual rm_stream* stream() = 0;
};

/// Null for rows of the host.
using PlaceOf = std::function<std::unique_ptr<Place>(const select::Row&)>;

/// On the device of the row's backend. Throws rm::Error where no such backend is loaded.
std::unique_ptr<Place> place_of(const select::Row& row);

}  // namespace rm::selfcheck
