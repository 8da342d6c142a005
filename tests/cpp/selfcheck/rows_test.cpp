// Every row of the CPU backend passes its own check, on every instruction set the machine offers.
#include <doctest/doctest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>

#include "instruction_sets.hpp"
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

namespace {

/// What RM_TEST_ROWS gets: row, operator, instruction sets, processor, problems run, result.
class Record {
 public:
  void ran(const rm_kernel& kernel, bool passed) {
    Line& line = lines_[text(kernel.name)];
    line.op = text(kernel.op);
    ++line.problems;
    line.failed = line.failed || !passed;
  }
  void not_run(const rm_kernel& kernel, const std::string& why) {
    Line& line = lines_[text(kernel.name)];
    line.op = text(kernel.op);
    if (line.why.empty()) line.why = why;
  }
  void write() const {
    const char* path = std::getenv("RM_TEST_ROWS");
    if (path == nullptr) return;
    const rm_device_info& device = cpu().get_device_info(0);
    std::ofstream out(path, std::ios::app);
    for (const auto& [name, line] : lines_) {
      const std::string result =
          line.failed ? "FAILED" : line.problems > 0 ? "passed" : "not run: " + line.why;
      out << name << '\t' << line.op << '\t' << text(device.arch) << '\t' << processor() << '\t'
          << line.problems << '\t' << result << '\n';
    }
  }

 private:
  struct Line {
    std::string op, why;
    int problems = 0;
    bool failed = false;
  };
  std::map<std::string, Line> lines_;
};

}  // namespace

TEST_CASE("every row was run on hardware, on this machine or another") {
  std::set<std::string> passed;
  std::ifstream file(RM_KERNELS_RUN);
  for (std::string line; std::getline(file, line);) {
    if (line.ends_with("\tpassed")) passed.insert(line.substr(0, line.find('\t')));
  }
  for (const rm_kernel& kernel : cpu().kernels()) {
    CAPTURE(text(kernel.name));  // not there: tests/cpp/run_on_machine.sh, then docs/gen_kernels.py
    CHECK(passed.count(text(kernel.name)) == 1);
  }
}

TEST_CASE("every row passes its self-check") {
  const bool verbose = std::getenv("RM_TEST_TIMES") != nullptr;
  Record record;
  for (const auto& shape : problems()) {
    const auto problem = problem_of(shape);
    for (const rm_kernel& kernel : cpu().kernels()) {
      if (text(kernel.op) != shape.op) continue;
      std::string why_not;
      if (!supports(kernel, shape, &why_not)) {
        record.not_run(kernel, why_not);
        continue;
      }
      const select::Row row{&kernel, &cpu().get_device_info(0), cpu().name()};
      const auto place = selfcheck::place_of(row);
      const selfcheck::Shape small = selfcheck::alike(*problem, kernel);
      CAPTURE(text(kernel.name));
      CAPTURE(problem->str());
      CAPTURE(problem_of(small)->str());
      const auto start = std::chrono::steady_clock::now();
      const std::string fault = selfcheck::check_row(row, 0, small, place.get());
      CHECK(fault == "");
      record.ran(kernel, fault.empty());
      const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
      if (verbose) std::printf("%s %.2f ms: %s\n", text(kernel.name).c_str(), ms, problem_of(small)->str().c_str());
    }
  }
  record.write();
}
