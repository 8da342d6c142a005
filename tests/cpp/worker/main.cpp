// The tests, or with --serve [N] the worker they start, which runs N programs at once, or with
// --traceable a process that waits.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "service.hpp"

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--serve") == 0) {
    rm::test::serve_for_tests(3, argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 1);
    return 0;
  }
  if (argc > 1 && std::strcmp(argv[1], "--traceable") == 0) {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    std::puts("ready");
    std::fflush(stdout);
    pause();
    return 0;
  }
  return doctest::Context(argc, argv).run();
}
