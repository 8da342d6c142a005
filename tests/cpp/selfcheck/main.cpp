// The test runner. It also lists the instruction sets there are, and whether this machine has them:
//   selfcheck_test --list-instruction-sets
// With RM_CPU_ISA set to one that the machine lacks it says so and ends with 77, "skipped" to ctest.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "instruction_sets.hpp"

int main(int argc, char** argv) {
  using namespace rm::selfcheck_test;
  if (argc == 2 && std::string_view(argv[1]) == "--list-instruction-sets") {
    for (const std::string& set : instruction_sets()) {
      std::printf("%s %s\n", set.c_str(), offered(set) ? "offered" : "missing");
    }
    return 0;
  }
  if (const char* set = std::getenv("RM_CPU_ISA"); set != nullptr && !offered(set)) {
    std::printf("not run: this machine has no %s\n", set);
    return 77;
  }
  return doctest::Context(argc, argv).run();
}
