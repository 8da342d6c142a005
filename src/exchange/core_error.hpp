// rm::Error as a Python exception: _core.CoreError with .code (an int of rm_code) and .reason
// ("RM105" or "").
#pragma once

#include <pybind11/pybind11.h>

#include <string_view>

#include "base/error.hpp"

namespace rm::exchange {

/// Text of a vendor's, which may be any bytes or cut off anywhere: what is no UTF-8 is replaced.
pybind11::str readable(std::string_view text);

/// Sets Python's error indicator; `type` is _core.CoreError.
void set_core_error(pybind11::handle type, const Error& error);

}  // namespace rm::exchange
