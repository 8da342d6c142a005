// The instruction sets that rows are written for, as the option cpu_isa names them.
#pragma once

#include <string>
#include <vector>

namespace rm::selfcheck_test {

/// Every set that tests run on, the smallest first.
const std::vector<std::string>& instruction_sets();
/// Whether this machine has it.
bool offered(const std::string& set);
/// "model name", of the first core.
std::string processor();

}  // namespace rm::selfcheck_test
