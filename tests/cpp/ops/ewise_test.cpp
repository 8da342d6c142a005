// Elementwise operators and programs: the same arithmetic whether written as nodes or as a program.
#include <limits>
#include <random>

#include "ops/ewise_opcodes.hpp"
#include "support.hpp"

using namespace rm;
using namespace rm::test;

TEST_CASE("names and numbers of instructions agree and are unique") {
  for (const auto& row : ops::ewise_opcodes()) {
    CAPTURE(row.name);
    CHECK(ops::find_opcode(row.name) == &row);
    CHECK(ops::find_opcode(row.opcode) == &row);
  }
}

TEST_CASE("float instructions agree with the C library") {
  CHECK(ops::apply_float(15, 1.0, 0, 0) == doctest::Approx(0.841191990608276));
  CHECK(ops::apply_float(14, 1.0, 0, 0) == doctest::Approx(0.841344746068543));
  CHECK(ops::apply_float(16, 1.0, 0, 0) == doctest::Approx(0.731058578630005));
  CHECK(ops::apply_float(21, 2.5, 0, 0) == 2.0);
  CHECK(ops::apply_float(48, -7.0, 3.0, 0) == 2.0);
  CHECK(ops::apply_float(47, -7.0, 2.0, 0) == -4.0);
  double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK(std::isnan(ops::apply_float(45, nan, 1.0, 0)));
  CHECK(std::isnan(ops::apply_float(46, 1.0, nan, 0)));
  CHECK(std::isnan(ops::apply_float(13, nan, 0, 0)));
}

TEST_CASE("integer instructions keep all 64 bits") {
  int64_t big = (int64_t{1} << 62) + 1;
  CHECK(ops::apply_int(40, big, 1, 0) == big + 1);
  CHECK(ops::apply_int(47, -7, 2, 0) == -4);
  CHECK(ops::apply_int(48, -7, 3, 0) == 2);
  CHECK(ops::apply_int(44, 3, 4, 0) == 81);
  CHECK(ops::apply_int(40, INT64_MAX, 1, 0) == INT64_MIN);
  CHECK_THROWS_AS(ops::apply_int(47, 1, 0, 0), Error);
  auto x =
      run("%0 = iota() {start=<4611686018427387905>, step=1} : i64[1]\n%1 = add(%0, %0) : "
          "i64[1]\nreturn %0, %1\n",
          {});
  CHECK(ops::to_ints(x[0])[0] == big);
}

TEST_CASE("a program of one instruction equals the operator of that name") {
  std::mt19937 rng(3);
  std::normal_distribution<double> normal;
  for (const auto& row : ops::ewise_opcodes()) {
    if (ops::find(row.name) == nullptr || row.name == "where") continue;
    bool ints = ewise::operands_of(row.opcode) == ewise::Operands::kInteger;
    std::vector<double> a, b;
    for (int i = 0; i < 16; ++i) {
      a.push_back(ints ? i % 5 : normal(rng));
      b.push_back(ints ? i % 3 : normal(rng));
    }
    std::string dtype = ints ? "i64" : "f32", out = row.is_logical ? "bool" : dtype;
    auto type = ints ? ir::DType::kI64 : ir::DType::kF32;
    std::string in = "input %0 \"a\" : " + dtype + "[16]\ninput %1 \"b\" : " + dtype + "[16]\n";
    std::string args = row.arity == 1 ? "(%0)" : "(%0, %1)";
    std::string second = row.arity == 1 ? "-1" : "1";
    auto got =
        run(in + "%2 = " + std::string(row.name) + args + " : " + out + "[16]\n" + "%3 = ewise" +
                args + " {code=[" + std::to_string(row.opcode) + (ints ? ",2,0," : ",0,0,") +
                second + ",-1], imm=f[]} : " + out + "[16]\n" + "return %2, %3\n",
            {tensor(type, {16}, a), tensor(type, {16}, b)});
    CAPTURE(row.name);
    check_close(got[1], ops::to_doubles(got[0]), 0);
  }
}

TEST_CASE("where, const and fma work in programs with broadcast operands") {
  auto c = tensor(ir::DType::kBool, {2, 1}, {1, 0});
  auto x = f32({3}, {1, 2, 3});
  auto out = run(
      "input %0 \"c\" : bool[2,1]\ninput %1 \"x\" : f32[3]\n"
      "%2 = ewise(%0, %1) {code=[0,0,0,-1,-1,71,0,1,2,2,70,0,0,3,1], imm=f[0x1p+1]} : f32[2,3]\n"
      "return %2\n",
      {c, x});
  check_close(out[0], {4, 6, 8, 1, 2, 3});
}

TEST_CASE("casts truncate, round to even and test for zero") {
  auto x = f32({4}, {-1.7, 0.5, 2.5, 0});
  std::string in = "input %0 \"x\" : f32[4]\n";
  check_close(run(in + "%1 = cast(%0) : i64[4]\nreturn %1\n", {x})[0], {-1, 0, 2, 0});
  check_close(run(in + "%1 = cast(%0) : bool[4]\nreturn %1\n", {x})[0], {1, 1, 1, 0});
  auto third = f32({1}, {1.0 / 3});
  check_close(run("input %0 \"x\" : f32[1]\n%1 = cast(%0) : bf16[1]\nreturn %1\n", {third})[0],
              {0.333984375}, 0);
}

TEST_CASE("unsigned integers keep what they hold, and wrap") {
  auto cast = [](const ops::HostTensor& x, const std::string& to) {
    const std::string from(ir::name(x.type.dtype));
    return run("input %0 \"x\" : " + from + "[3]\n%1 = cast(%0) : " + to + "[3]\nreturn %1\n",
               {x})[0];
  };
  const double top = 0x1p63 + 2048;  // a double, and no i64
  auto large = tensor(ir::DType::kU64, {3}, {top, 7, 0});
  check_close(cast(large, "f64"), {top, 7, 0}, 0);
  check_close(cast(cast(large, "f64"), "u64"), {top, 7, 0}, 0);
  check_close(cast(large, "i64"), {top - 0x1p64, 7, 0}, 0);
  check_close(cast(tensor(ir::DType::kI32, {3}, {-1, 65536 + 3, 9}), "u16"), {65535, 3, 9}, 0);
  check_close(cast(tensor(ir::DType::kI64, {3}, {-1, 0x1p32 + 3, 9}), "u32"), {4294967295.0, 3, 9},
              0);
  auto small = tensor(ir::DType::kU16, {3}, {65535, 2, 5});
  check_close(run("input %0 \"x\" : u16[3]\n%1 = add(%0, %0) : u16[3]\nreturn %1\n", {small})[0],
              {65534, 4, 10}, 0);
  // A program reads u64 as a number where it computes in floats: 1 = copy, class 1 = f64.
  check_close(run("input %0 \"x\" : u64[3]\n%1 = ewise(%0) {code=[1,1,0,-1,-1], imm=f[]} : f64[3]\n"
                  "return %1\n",
                  {large})[0],
              {top, 7, 0}, 0);
}

TEST_CASE("bits are read as another type") {
  auto x = f32({3}, {1, -2, 0});
  std::string in = "input %0 \"x\" : f32[3]\n%1 = bitcast(%0) : ";
  check_close(run(in + "u32[3]\nreturn %1\n", {x})[0], {0x3f800000, 3221225472.0, 0}, 0);
  check_close(run(in + "i32[3]\n%2 = bitcast(%1) : f32[3]\nreturn %2\n", {x})[0], {1, -2, 0}, 0);
}
