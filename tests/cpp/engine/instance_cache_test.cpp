// What makes two calls the same shape: dtypes, ranks, sizes and strides of all inputs.
#include <doctest/doctest.h>

#include "base/error.hpp"
#include "engine_support.hpp"
#include "ops/host_tensor.hpp"

using namespace rm;
using namespace rm::engine_test;
using engine::Program;
using engine::TensorView;
using ops::HostTensor;

namespace {

struct NoOutputs : engine::OutputAllocator {
  int asked = 0;
  void* allocate(size_t, const ir::Layout&) override {
    ++asked;
    return nullptr;
  }
  void reuse(size_t, size_t) override { ++asked; }
};

void refuses(Program& program, const std::vector<TensorView>& inputs) {
  NoOutputs outputs;
  try {
    program.run(inputs, outputs);
    FAIL("expected an error");
  } catch (const Error& error) {
    CHECK(error.code() == RM_INVALID_ARGUMENT);
    CHECK(std::string(error.reason()) == "RM105");
  }
  CHECK(outputs.asked == 0);
}

}  // namespace

TEST_CASE("a program that has run refuses other dtypes, ranks and numbers of inputs") {
  std::mt19937 rng(2);
  Case c = load(
      "rmir 1\nsym s0 [1,64]\ninput %0 \"x\" : f32[s0,2]\ninput %1 \"scale\" : f32[]\n"
      "%2 = mul(%0, %1) : f32[s0,2]\nreturn %2\n",
      rng);
  Program program(c.graph, cpu_kernels());
  program.set_weights({});
  HostTensor x = random_tensor(rng, ir::DType::kF32, {4, 2});
  HostTensor scale = ops::from_doubles({ir::DType::kF32, {}}, {2});
  HostOutputs outputs;
  program.run({view(x), view(scale)}, outputs);
  HostTensor wide = random_tensor(rng, ir::DType::kF64, {4, 2});
  HostTensor whole = random_tensor(rng, ir::DType::kI32, {4, 2});
  HostTensor flat = random_tensor(rng, ir::DType::kF32, {4, 2, 1});
  HostTensor one = random_tensor(rng, ir::DType::kF32, {1});
  refuses(program, {view(wide), view(scale)});
  refuses(program, {view(whole), view(scale)});
  refuses(program, {view(x)});
  refuses(program, {view(x), view(scale), view(scale)});
  refuses(program, {view(x), view(one)});
  refuses(program, {view(flat), view(scale)});
  refuses(program, {});
  CHECK(program.report().instances == 1);
}

TEST_CASE("sizes that move from one input to the next are another shape") {
  std::mt19937 rng(3);
  Case c = load(
      "rmir 1\nsym s0 [0,64]\nsym s1 [0,64]\ninput %0 \"a\" : f32[s0]\ninput %1 \"b\" : f32[s1]\n"
      "%2 = concat(%0, %1) {axis=0} : f32[s0+s1]\nreturn %2\n",
      rng);
  Program program(c.graph, cpu_kernels());
  program.set_weights({});
  for (auto [m, n] : {std::pair{4, 1}, {1, 4}, {5, 0}, {0, 5}, {4, 1}}) {
    HostTensor a = random_tensor(rng, ir::DType::kF32, {m});
    HostTensor b = random_tensor(rng, ir::DType::kF32, {n});
    HostOutputs outputs;
    program.run({view(a), view(b)}, outputs);
    std::vector<double> want = ops::to_doubles(a), more = ops::to_doubles(b);
    want.insert(want.end(), more.begin(), more.end());
    CHECK(ops::to_doubles(outputs.tensors[0]) == want);
  }
  CHECK(program.report().instances == 4);
}
