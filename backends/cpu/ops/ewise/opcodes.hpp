// The opcodes of ewise programs by name.
#pragma once

#include "rm/ewise.h"

namespace rm::cpu {

using namespace ewise;

}  // namespace rm::cpu
