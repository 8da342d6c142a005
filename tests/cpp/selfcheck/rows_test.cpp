// Every row of the CPU backend passes its own check, on every instruction set the machine offers.
#include <doctest/doctest.h>

#include <chrono>
#include <cstdlib>
#include <set>

#include "problems.hpp"
#include "selfcheck/row_check.hpp"

using namespace rm;
using namespace rm::selfcheck_test;

TEST_CASE("every operator with rows has a problem here") {
  std::set<std::string> known;
  for (const auto& shape : problems()) known.insert(shape.op);
  for (const std::string& op : operators()) {
    CAPTURE(op);
    CHECK(known.count(op) == 1);
  }
}

TEST_CASE("every row passes its self-check") {
  const bool verbose = std::getenv("RM_TEST_TIMES") != nullptr;
  for (const auto& shape : problems()) {
    const auto problem = problem_of(shape);
    for (const rm_kernel& kernel : cpu().kernels()) {
      if (!supports(kernel, shape)) continue;
      const select::Row row{&kernel, &cpu().get_device_info(0), "cpu"};
      const selfcheck::Shape small = selfcheck::alike(*problem, kernel);
      CAPTURE(text(kernel.name));
      CAPTURE(problem->str());
      CAPTURE(problem_of(small)->str());
      const auto start = std::chrono::steady_clock::now();
      CHECK(selfcheck::check_row(row, 0, small) == "");
      const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
      if (verbose) MESSAGE(text(kernel.name) << " " << ms << " ms: " << problem_of(small)->str());
    }
  }
}
