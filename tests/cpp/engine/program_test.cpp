// Whole programs through the CPU plugin, compared with the reference evaluation of the same graph.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "engine/program.hpp"

#include <doctest/doctest.h>

#include <thread>

#include "base/error.hpp"
#include "engine/bind_symbols.hpp"
#include "engine_support.hpp"
#include "ir/text.hpp"
#include "passes/quantize.hpp"

using namespace rm;
using namespace rm::engine_test;
using engine::Program;
using ops::HostTensor;

namespace {

// An encoder layer with merged QKV weights (a constant expression), a padding mask and a pooler.
const char* kEncoder =
    "rmir 1\n"
    "sym s0 [1,64]\n"
    "sym s1 [1,64]\n"
    "input %0 \"ids\" : i64[s0,s1]\n"
    "input %1 \"mask\" : i64[s0,s1]\n"
    "weight %2 \"table\" : f32[64,32]\n"
    "weight %3 \"q\" : f32[32,32]\n"
    "weight %4 \"k\" : f32[32,32]\n"
    "weight %5 \"v\" : f32[32,32]\n"
    "weight %6 \"qb\" : f32[96]\n"
    "weight %7 \"g\" : f32[32]\n"
    "weight %8 \"b\" : f32[32]\n"
    "weight %9 \"w1\" : f32[64,32]\n"
    "weight %10 \"b1\" : f32[64]\n"
    "weight %11 \"w2\" : f32[32,64]\n"
    "%12 = embedding(%2, %0) : f32[s0,s1,32]\n"
    "%13 = iota() {start=<0>, step=1} : i64[s1]\n"
    "%14 = embedding(%2, %13) : f32[s1,32]\n"
    "%15 = add(%12, %14) : f32[s0,s1,32]\n"
    "%16 = concat(%3, %4, %5) {axis=0} : f32[96,32]\n"
    "%17 = linear(%15, %16, %6) : f32[s0,s1,96]\n"
    "%18 = reshape(%17) {shape=<s0,s1,3,4,8>} : f32[s0,s1,3,4,8]\n"
    "%19 = permute(%18) {axes=[2,0,3,1,4]} : f32[3,s0,4,s1,8]\n"
    "%20 = slice(%19) {axis=0, start=<0>, step=1, stop=<1>} : f32[1,s0,4,s1,8]\n"
    "%21 = reshape(%20) {shape=<s0,4,s1,8>} : f32[s0,4,s1,8]\n"
    "%22 = slice(%19) {axis=0, start=<1>, step=1, stop=<2>} : f32[1,s0,4,s1,8]\n"
    "%23 = reshape(%22) {shape=<s0,4,s1,8>} : f32[s0,4,s1,8]\n"
    "%24 = slice(%19) {axis=0, start=<2>, step=1, stop=<3>} : f32[1,s0,4,s1,8]\n"
    "%25 = reshape(%24) {shape=<s0,4,s1,8>} : f32[s0,4,s1,8]\n"
    "%26 = cast(%1) : bool[s0,s1]\n"
    "%27 = reshape(%26) {shape=<s0,1,1,s1>} : bool[s0,1,1,s1]\n"
    "%28 = sdpa(%21, %23, %25, %27) {is_causal=0, scale=0x1.6a09e6p-2} : f32[s0,4,s1,8]\n"
    "%29 = permute(%28) {axes=[0,2,1,3]} : f32[s0,s1,4,8]\n"
    "%30 = reshape(%29) {shape=<s0,s1,32>} : f32[s0,s1,32]\n"
    "%31 = add(%30, %15) : f32[s0,s1,32]\n"
    "%32 = layer_norm(%31, %7, %8) {eps=0x1p-20, num_axes=1} : f32[s0,s1,32]\n"
    "%33 = gemm(%32, %9, %10, _) {activation=\"gelu\", alpha=0x1p+0, trans_b=1} : f32[s0,s1,64]\n"
    "%34 = gemm(%33, %11, _, %32) {activation=\"none\", alpha=0x1p+0, trans_b=1} : f32[s0,s1,32]\n"
    "%35 = slice(%34) {axis=1, start=<0>, step=1, stop=<1>} : f32[s0,1,32]\n"
    "%36 = tanh(%35) : f32[s0,1,32]\n"
    "return %34, %36\n";

void check_against_reference(Program& program, const Case& c, std::mt19937& rng, int64_t batch,
                             int64_t length, double tolerance = 2e-4) {
  HostTensor ids = random_tensor(rng, ir::DType::kI64, {batch, length});
  HostTensor mask = random_tensor(rng, ir::DType::kI64, {batch, length}, 2);
  for (int64_t b = 0; b < batch; ++b) {  // at least one real token a row
    int64_t one = 1;
    std::memcpy(mask.at(b * length), &one, sizeof one);
  }
  HostOutputs outputs;
  program.run({view(ids), view(mask)}, outputs);
  std::vector<ir::Layout> layouts{ir::contiguous(ids.type), ir::contiguous(mask.type)};
  ir::Graph fixed = ir::substitute(c.graph, engine::bind_symbols(c.graph, layouts));
  auto want = ops::evaluate(fixed, {ids, mask}, c.weights);
  for (size_t i = 0; i < want.size(); ++i) {
    CHECK(max_difference(outputs.tensors[i], want[i]) < tolerance);
  }
}

}  // namespace

TEST_CASE("an encoder layer equals its reference at every shape") {
  std::mt19937 rng(21);
  Case c = load(kEncoder, rng);
  Program program(c.graph, cpu_kernels());
  program.set_weights(c.weight_tensors());
  for (auto [batch, length] : {std::pair{1, 1}, {1, 7}, {3, 5}, {2, 16}, {4, 33}, {1, 7}}) {
    check_against_reference(program, c, rng, batch, length);
  }
  CHECK(program.report().instances == 5);
  CHECK(program.report().native_nodes == program.report().nodes);
}

TEST_CASE("a program that may not pack weights keeps no packed copy and is as right") {
  std::mt19937 rng(25);
  Case c = load(kEncoder, rng);
  Program packs(c.graph, cpu_kernels()), reads(c.graph, cpu_kernels(), {}, engine::Packing::kNever);
  for (Program* program : {&packs, &reads}) {
    program->set_weights(c.weight_tensors());
    check_against_reference(*program, c, rng, 1, 1);
    check_against_reference(*program, c, rng, 4, 64);
  }
  CHECK(packs.report().packed_bytes > 0);
  CHECK(reads.report().packed_bytes == 0);
}

TEST_CASE("a quantised program equals its reference and holds the weights once, in few bits") {
  std::mt19937 rng(26);
  for (int64_t bits : {8, 4}) {
    for (auto [symmetric, x_bits] : {std::pair{true, 16}, {false, 16}, {true, 8}}) {
      Case c = load(kEncoder, rng);
      passes::QuantizeOptions options;
      options.bits = bits, options.symmetric = symmetric, options.least_elements = 1;
      options.activation_bits = x_bits;
      CHECK(passes::quantize_linears(c.graph, options) == 3);
      Program program(c.graph, cpu_kernels());
      program.set_weights(c.weight_tensors());
      for (auto [batch, length] : {std::pair{1, 1}, {2, 3}, {4, 33}}) {
        // The kernel rounds activations to 16 bits a block, up to eight rows of them to 8 if asked
        // to; the layers here amplify that (results are of size 1).
        const bool coarse = x_bits == 8 && batch * length <= 8;
        check_against_reference(program, c, rng, batch, length, coarse ? 0.4 : 2e-3);
      }
      CHECK(program.report().packed_bytes == 0);
      CHECK(program.report().native_nodes == program.report().nodes);
    }
  }
}

TEST_CASE("programs that share what derives from their weights hold it once, while one lives") {
  std::mt19937 rng(27);
  Case c = load(kEncoder, rng);
  passes::QuantizeOptions options;
  options.least_elements = 1;
  passes::quantize_linears(c.graph, options);
  auto shared = std::make_shared<runtime::SharedConstants>();
  int64_t held = 0;
  {
    Program first(c.graph, cpu_kernels()), second(c.graph, cpu_kernels());
    for (Program* program : {&first, &second}) {
      program->set_weights(c.weight_tensors(), shared);
      check_against_reference(*program, c, rng, 2, 3, 2e-3);
      if (held == 0) held = shared->bytes();
      CHECK(shared->bytes() == held);
      CHECK(program->report().derived_bytes >= held);
    }
    CHECK(held > 0);
  }
  CHECK(shared->bytes() == 0);
}

TEST_CASE("new weights change the result") {
  std::mt19937 rng(22);
  Case c = load(kEncoder, rng);
  Program program(c.graph, cpu_kernels());
  program.set_weights(c.weight_tensors());
  check_against_reference(program, c, rng, 2, 4);
  for (auto& [name, t] : c.weights) t = random_tensor(rng, t.type.dtype, t.type.dims);
  program.set_weights(c.weight_tensors());
  check_against_reference(program, c, rng, 2, 4);
}

TEST_CASE("inputs that do not fit are refused before anything runs") {
  std::mt19937 rng(23);
  Case c = load(kEncoder, rng);
  Program program(c.graph, cpu_kernels());
  program.set_weights(c.weight_tensors());
  HostOutputs outputs;
  HostTensor ids = random_tensor(rng, ir::DType::kI64, {2, 3});
  HostTensor longer = random_tensor(rng, ir::DType::kI64, {2, 4});
  HostTensor narrow = random_tensor(rng, ir::DType::kI32, {2, 3});
  HostTensor beyond = random_tensor(rng, ir::DType::kI64, {2, 65});
  CHECK_THROWS_WITH_AS(program.run({view(ids), view(longer)}, outputs), doctest::Contains("mask"),
                       Error);
  CHECK_THROWS_WITH_AS(program.run({view(ids), view(narrow)}, outputs), doctest::Contains("i32"),
                       Error);
  CHECK_THROWS_WITH_AS(program.run({view(beyond), view(beyond)}, outputs), doctest::Contains("s1"),
                       Error);
  CHECK_THROWS_AS(program.run({view(ids)}, outputs), Error);
  ids = ops::from_ints(ids.type, {0, 1, 2, 3, 4, 64});  // outside the table
  HostTensor mask = ops::from_ints(ids.type, {1, 1, 1, 1, 1, 1});
  CHECK_THROWS_AS(program.run({view(ids), view(mask)}, outputs), Error);
  CHECK_THROWS_WITH_AS(program.set_weights({}), doctest::Contains("expected a tensor"), Error);
}

TEST_CASE("threads running one program at many shapes get the right numbers") {
  std::mt19937 rng(24);
  Case c = load(kEncoder, rng);
  Program program(c.graph, cpu_kernels());
  program.set_weights(c.weight_tensors());
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 local(100 + t);
      for (int round = 0; round < 6; ++round) {
        check_against_reference(program, c, local, 1 + (t + round) % 3, 3 + round);
      }
    });
  }
  for (auto& t : threads) t.join();
}

TEST_CASE("sizes that differ although the program took them for equal are refused") {
  std::mt19937 rng(25);
  Case c = load(
      "rmir 1\nsym s0 [1,64]\nsym s1 [1,64]\n"
      "input %0 \"a\" : f32[s0,4]\ninput %1 \"b\" : f32[s1,4]\n"
      "%2 = add(%0, %1) : f32[s0,4]\nreturn %2\n",
      rng);
  Program program(c.graph, cpu_kernels());
  program.set_weights({});
  HostOutputs outputs;
  HostTensor two = random_tensor(rng, ir::DType::kF32, {2, 4});
  HostTensor three = random_tensor(rng, ir::DType::kF32, {3, 4});
  program.run({view(two), view(two)}, outputs);
  CHECK_THROWS_AS(program.run({view(two), view(three)}, outputs), Error);
}

TEST_CASE("symbols are solved through expressions") {
  ir::Graph g = ir::parse(
      "rmir 1\nsym s0 [0,100]\nsym s1 [0,100]\n"
      "input %0 \"a\" : f32[s0,2*s1+1]\ninput %1 \"b\" : f32[s0+s1]\nreturn %0\n");
  auto f32 = [](ir::Ints dims) { return ir::contiguous(ir::DType::kF32, std::move(dims)); };
  auto b = engine::bind_symbols(g, {f32({3, 9}), f32({7})});
  CHECK(b["s0"] == 3);
  CHECK(b["s1"] == 4);
  CHECK_THROWS_AS(engine::bind_symbols(g, {f32({3, 8}), f32({7})}), Error);
  CHECK_THROWS_AS(engine::bind_symbols(g, {f32({3, 9}), f32({8})}), Error);
}

TEST_CASE("merged weights are made after the second call, and until then their products run one by one") {
  std::mt19937 rng(10);
  Case c = load(
      "rmir 1\nsym s0 [1,64]\ninput %0 \"x\" : f32[s0,32]\nweight %1 \"q\" : f32[48,32]\nweight %2 \"k\" : f32[16,32]\n"
      "weight %3 \"qb\" : f32[48]\nweight %4 \"kb\" : f32[16]\n%5 = concat(%1, %2) {axis=0} : f32[64,32]\n"
      "%6 = concat(%3, %4) {axis=0} : f32[64]\n"
      "%7 = gemm(%0, %5, %6, _) {activation=\"none\", trans_b=1} : f32[s0,64]\n"
      "%8 = slice(%7) {axis=1, start=<0>, step=1, stop=<48>} : f32[s0,48]\n"
      "%9 = slice(%7) {axis=1, start=<48>, step=1, stop=<64>} : f32[s0,16]\nreturn %8, %9\n",
      rng);
  for (auto packing : {engine::Packing::kLater, engine::Packing::kSpare}) {
    Program later(c.graph, cpu_kernels(), {}, packing), at_once(c.graph, cpu_kernels(), {}, engine::Packing::kNever);
    const auto products = [](Program& p) {
      int64_t count = 0;
      for (const auto& [name, times] : p.report().kernels) count += name.find("gemm") != name.npos ? times : 0;
      return count;
    };
    later.set_weights(c.weight_tensors()), at_once.set_weights(c.weight_tensors());
    for (int64_t call = 1; call <= 4; ++call) {
      HostTensor x = ops::zeros({ir::DType::kF32, {7, 32}});
      std::vector<double> values(static_cast<size_t>(x.size()));
      for (double& v : values) v = std::normal_distribution<double>()(rng);
      x = ops::from_doubles(x.type, values);
      HostOutputs mine, wanted;
      later.run({view(x)}, mine), at_once.run({view(x)}, wanted);
      for (size_t i = 0; i < 2; ++i) {
        const auto a = ops::to_doubles(mine.tensors[i]), b = ops::to_doubles(wanted.tensors[i]);
        REQUIRE(a.size() == b.size());
        for (size_t k = 0; k < a.size(); ++k) CHECK(std::fabs(a[k] - b[k]) <= 1e-5 * (1 + std::fabs(b[k])));
      }
      if (call == 2) later.wait_for_packing();
      CHECK((later.report().derived_bytes > 0) == (call >= 2));
      CHECK(products(later) == (call >= 2 ? 1 : 2));
    }
    CHECK(at_once.report().derived_bytes > 0);
  }
}

TEST_CASE("weights packed after the second call give what unpacked weights give") {
  std::mt19937 rng(9);
  Case c = load(kEncoder, rng);
  for (auto packing : {engine::Packing::kNever, engine::Packing::kFirst, engine::Packing::kLater}) {
    Program program(c.graph, cpu_kernels(), {}, packing);
    program.set_weights(c.weight_tensors());
    const bool later = packing == engine::Packing::kLater;
    const bool first = packing == engine::Packing::kFirst;
    CHECK(program.report().packed_bytes == 0);
    check_against_reference(program, c, rng, 4, 60);
    CHECK((program.report().packed_bytes > 0) == first);
    check_against_reference(program, c, rng, 4, 60);
    program.wait_for_packing();
    CHECK((program.report().packed_bytes > 0) == (first || later));
    check_against_reference(program, c, rng, 4, 60);  // the same shape, packed
    check_against_reference(program, c, rng, 3, 64);  // a new one
    program.set_weights(c.weight_tensors());
    CHECK(program.report().packed_bytes == 0);
    check_against_reference(program, c, rng, 4, 60);
  }
}

TEST_CASE("packing in progress stops when weights change or the program ends") {
  std::mt19937 rng(10);
  Case c = load(kEncoder, rng);
  for (int round = 0; round < 20; ++round) {
    Program program(c.graph, cpu_kernels(), {}, engine::Packing::kLater);
    program.set_weights(c.weight_tensors());
    check_against_reference(program, c, rng, 4, 60);
    check_against_reference(program, c, rng, 4, 60);
    if (round % 2 == 0) program.set_weights(c.weight_tensors());
  }
}

TEST_CASE("spare packing copies transposed weights and no others") {
  std::mt19937 rng(12);
  // So large that no row reads the transposed one as it is.
  const char* text =
      "rmir 1\n"
      "sym s0 [1,64]\n"
      "input %0 \"x\" : f32[s0,512]\n"
      "weight %1 \"across\" : f32[512,300]\n"
      "weight %2 \"rows\" : f32[128,300]\n"
      "%3 = gemm(%0, %1) {trans_b=0} : f32[s0,300]\n"
      "%4 = gemm(%3, %2) {trans_b=1} : f32[s0,128]\n"
      "return %4\n";
  Case c = load(text, rng);
  Program program(c.graph, cpu_kernels(), {}, engine::Packing::kSpare);
  program.set_weights(c.weight_tensors());
  for (int round = 0; round < 3; ++round) {
    HostTensor x = random_tensor(rng, ir::DType::kF32, {5, 512});
    HostOutputs outputs;
    program.run({view(x)}, outputs);
    std::vector<ir::Layout> layouts{ir::contiguous(x.type)};
    ir::Graph fixed = ir::substitute(c.graph, engine::bind_symbols(c.graph, layouts));
    auto want = ops::evaluate(fixed, {x}, c.weights);
    CHECK(max_difference(outputs.tensors[0], want[0]) < 1e-3);
    if (round == 0) CHECK(program.report().packed_bytes == 0);
    program.wait_for_packing();
  }
  const int64_t across = 512 * 300 * 4, rows = 128 * 300 * 4;
  CHECK(program.report().packed_bytes >= across);
  CHECK(program.report().packed_bytes < across + rows);
}
