// The one exception type of the core and the reason codes every decision is reported with.
//
// Message form: "[where] expected ..., got ...; try ...".  Codes are the canonical gRPC ones
// (rm_code in include/rm/backend.h); a reason is an RMxyz code of docs/reason_codes.md.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "rm/backend.h"

namespace rm {

class Error : public std::runtime_error {
 public:
  Error(rm_code code, const std::string& message, std::string reason = {})
      : std::runtime_error(message), code_(code), reason_(std::move(reason)) {}

  rm_code code() const noexcept { return code_; }
  /// "RM301", or empty when the failure has no reason code of its own.
  const std::string& reason() const noexcept { return reason_; }

 private:
  rm_code code_;
  std::string reason_;
};

[[noreturn]] inline void throw_invalid(const std::string& message) {
  throw Error(RM_INVALID_ARGUMENT, message);
}

}  // namespace rm
