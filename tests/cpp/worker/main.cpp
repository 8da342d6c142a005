// The tests, or with --serve the worker they start.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstring>

#include "service.hpp"

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--serve") == 0) {
    rm::test::serve_for_tests(3);
    return 0;
  }
  return doctest::Context(argc, argv).run();
}
