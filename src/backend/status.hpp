// The host's half of the C line: the table plugins are given, and the one place where an rm_status
// becomes an rm::Error.  Every status is created and freed here, whoever reports it.
#pragma once

#include <string_view>

#include "rm/backend.h"

namespace rm::backend {

/// The table handed to every plugin; lives as long as the process.
const rm_host_api* host_api() noexcept;

/// Offers a service to plugins by name (rm_host_api.extension); `table` lives as long as the
/// process. Called while the process starts, before any plugin is loaded.
void offer_host_extension(std::string_view name, const void* table);

/// Does nothing for NULL; otherwise frees `status` and throws its content as rm::Error, the text
/// led by "[where] ".
void check(rm_status* status, std::string_view where);

/// For code that may not throw: the code of `status`, which is freed.  RM_OK for NULL.
rm_code consume(rm_status* status) noexcept;

inline std::string_view view(rm_str s) noexcept {
  return s.data == nullptr ? std::string_view() : std::string_view(s.data, s.size);
}
inline rm_str to_rm_str(std::string_view s) noexcept { return rm_str{s.data(), s.size()}; }

}  // namespace rm::backend
