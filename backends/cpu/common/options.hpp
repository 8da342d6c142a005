// The options the host gave initialize(), kept for operators (such as onednn_path of gemm).
#pragma once

#include <string>
#include <string_view>

#include "rm/backend.h"

namespace rm::cpu {

/// Called once, by initialize(), before any row is used.
void set_plugin_options(rm_options options);

/// The value of an option, "" when the host did not give it.
std::string plugin_option(std::string_view key);

}  // namespace rm::cpu
