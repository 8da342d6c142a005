// Memory of many shapes: bounded by what the shapes that are kept need, not by how many there were.
#include <doctest/doctest.h>

#include <cstring>

#include "engine_support.hpp"
#include "runtime/arena_pool.hpp"

using namespace rm;
using namespace rm::engine_test;
using engine::Program;
using ops::HostTensor;
using runtime::Arena;
using runtime::ArenaPool;

namespace {

// A causal mask and a position bias: constants of s0 x s0 elements for every length.
const char* kPositions =
    "rmir 1\nsym s0 [1,4096]\ninput %0 \"x\" : f32[s0,s0]\n"
    "%1 = iota() {start=<0>, step=1} : i64[s0]\n"
    "%2 = reshape(%1) {shape=<s0,1>} : i64[s0,1]\n"
    "%3 = sub(%1, %2) : i64[s0,s0]\n"
    "%4 = cast(%3) : f32[s0,s0]\n"
    "%5 = add(%0, %4) : f32[s0,s0]\nreturn %5\n";

void run(Program& program, int64_t size) {
  HostTensor x = ops::zeros({ir::DType::kF32, {size, size}});
  HostOutputs outputs;
  program.run({view(x)}, outputs);
  float second = 0;  // x is 0, so it is the distance of the second column
  std::memcpy(&second, outputs.tensors[0].at(1), sizeof second);
  CHECK(second == 1);
}

}  // namespace

TEST_CASE("constants of shapes that are not kept any more are freed") {
  std::mt19937 rng(4);
  Program program(load(kPositions, rng).graph, cpu_kernels());
  program.set_weights({});
  const int64_t mebi = int64_t{1} << 20;
  int64_t most = 0, total = 0;
  for (int64_t size = 601; size < 1001; size += 8) {
    run(program, size);
    total += size * size * 4;
    most = std::max(most, program.report().derived_bytes);
  }
  CHECK(total > 100 * mebi);
  CHECK(most < 40 * mebi);
  CHECK(program.report().instances > 5);
  CHECK(program.report().instances <= 64);
}

TEST_CASE("two large shapes in turn are both kept") {
  std::mt19937 rng(5);
  Program program(load(kPositions, rng).graph, cpu_kernels());
  program.set_weights({});
  for (int64_t size : {64, 3600, 3500}) run(program, size);  // 52 and 49 MB of constants
  const double made = program.report().last_instantiate_ms;
  for (int64_t size : {3600, 3500, 3600, 3500}) run(program, size);
  CHECK(program.report().last_instantiate_ms == made);  // no instance was made
}

TEST_CASE("one arena serves all shapes of a program") {
  std::mt19937 rng(6);
  Case c = load(
      "rmir 1\nsym s0 [1,8192]\ninput %0 \"x\" : f32[s0,256]\nweight %1 \"w\" : f32[512,256]\n"
      "weight %2 \"v\" : f32[8,512]\n%3 = linear(%0, %1) : f32[s0,512]\n%4 = relu(%3) : f32[s0,512]\n"
      "%5 = linear(%4, %2) : f32[s0,8]\nreturn %5\n",
      rng);
  Program program(c.graph, cpu_kernels());
  program.set_weights(c.weight_tensors());
  for (int64_t size = 1; size < 60; ++size) {
    HostTensor x = random_tensor(rng, ir::DType::kF32, {size, 256});
    HostOutputs outputs;
    program.run({view(x)}, outputs);
    const engine::ProgramReport r = program.report();
    CHECK(r.arena_bytes > 0);
    CHECK(r.free_arena_bytes >= r.arena_bytes);
    CHECK(r.free_arena_bytes <= std::max<int64_t>(4096, r.arena_bytes * 5 / 4 + 1));
  }
}

TEST_CASE("an arena pool keeps what is used, and gives up what is too large or never needed") {
  ArenaPool pool;
  CHECK(pool.acquire(100).bytes == 0);
  CHECK(pool.release(runtime::make_arena(100'000), 100'000).empty());
  Arena arena = pool.acquire(50'000);
  CHECK(arena.bytes >= 100'000);
  CHECK(pool.release(std::move(arena), 1'000).size() == 1);  // the large shape is gone
  CHECK(pool.free_bytes() == 0);
  // Three runs at once leave three arenas; runs one by one need one of them.
  for (int i = 0; i < 3; ++i) CHECK(pool.release(runtime::make_arena(5'000), 5'000).empty());
  CHECK(pool.free_bytes() >= 15'000);
  size_t dropped = 0;
  for (int i = 0; i < 3000; ++i) {
    Arena one = pool.acquire(5'000);
    CHECK(one.bytes >= 5'000);
    dropped += pool.release(std::move(one), 5'000).size();
  }
  CHECK(dropped == 2);
}
