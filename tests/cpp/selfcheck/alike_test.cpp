// Which small problem stands for which large one.
#include <doctest/doctest.h>

#include "problems.hpp"

using namespace rm;
using namespace rm::selfcheck_test;
using selfcheck::alike_size;

TEST_CASE("sizes keep their place between the edges, and at most two whole steps") {
  CHECK(alike_size(5, {16}) == 5);
  CHECK(alike_size(32, {16}) == 32);
  CHECK(alike_size(33, {16}) == 33);
  CHECK(alike_size(50257, {16}) == 33);  // 50257 = 3141 * 16 + 1
  CHECK(alike_size(2048, {64, 1024}) == 2048);
  CHECK(alike_size(8192, {64, 1024}) == 2048);
  CHECK(alike_size(8192 + 64 + 3, {64, 1024}) == 2048 + 64 + 3);
  CHECK(alike_size(8192 + 640 + 3, {64, 1024}) == 2048 + 128 + 3);
  CHECK(alike_size(0, {16}) == 0);
  // A step that is no multiple of a smaller one becomes one: both rests are kept.
  CHECK(alike_size(1003, {6, 16}) == 2 * 48 + 1003 % 48 % 6 + 1003 % 48 / 6 * 6 - (1003 % 48 > 12 + 1003 % 6 ? (1003 % 48 / 6 - 2) * 6 : 0));
}

TEST_CASE("what stands for a problem is supported by the same rows") {
  for (const auto& shape : problems()) {
    const auto problem = problem_of(shape);
    for (const rm_kernel& row : cpu().kernels()) {
      if (!supports(row, shape)) continue;
      CAPTURE(problem->str());
      CAPTURE(text(row.name));
      const selfcheck::Shape small = selfcheck::alike(*problem, row);
      CAPTURE(problem_of(small)->str());
      CHECK(supports(row, small));
      // Once reduced, it stands for itself.
      CHECK(problem_of(selfcheck::alike(*problem_of(small), row))->key() == problem_of(small)->key());
    }
  }
}

TEST_CASE("a vocabulary of fifty thousand columns costs what some hundred do") {
  const auto problem = problem_of(gemm(1, 50257, 1280));
  for (const rm_kernel& row : cpu().kernels()) {
    if (text(row.op) != "gemm") continue;
    const selfcheck::Shape small = selfcheck::alike(*problem, row);
    CAPTURE(text(row.name));
    CAPTURE(problem_of(small)->str());
    CHECK(small.outputs[0].layout.dims.back() < 1000);
    CHECK(small.outputs[0].layout.dims.back() % 4 == 50257 % 4);
  }
}

TEST_CASE("channels of an image are kept on both sides of an edge that a row names") {
  selfcheck::Shape conv;
  conv.op = "conv";
  conv.inputs = {dense(ir::DType::kBF16, {8, 1024 + 24, 14, 14}), dense(ir::DType::kBF16, {512, 1048, 1, 1})};
  conv.outputs = {dense(ir::DType::kBF16, {8, 512, 14, 14})};
  const rm_edge edges[] = {{'C', 0, 64}, {'N', 0, 512}};
  rm_kernel row{};
  row.struct_size = sizeof row;
  const auto channels = [&] {
    return selfcheck::alike(*problem_of(conv), row).inputs[1].layout.dims[1];
  };
  CHECK(channels() == 32 + 1048 % 16);
  row.edges = edges, row.num_edges = 2;
  CHECK(channels() == 128 + 24);  // 1048 = 16 * 64 + 24
}
