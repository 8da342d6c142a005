// Program text comes from cache files and worker processes: whatever it says, it is refused with an
// rm::Error or compiled and run, never a crash. Valid programs are changed token by token, mostly to
// the largest and smallest numbers, and go all the way to their kernels while they stay small.
#include <doctest/doctest.h>

#include <cstdlib>
#include <cstring>

#include "base/error.hpp"
#include "engine_support.hpp"
#include "ir/text.hpp"
#include "ir/verify.hpp"
#include "ops/registry.hpp"
#include "passes/pass.hpp"

using namespace rm;
using namespace rm::engine_test;

namespace {

// Together they use every operator and every kind of attribute.
const std::vector<std::string> kPrograms = {
    "rmir 1\nsym s0 [1,16]\ninput %0 \"x\" : f32[s0,8]\nweight %1 \"w\" : f32[4,8]\n"
    "weight %2 \"b\" : f32[4]\nliteral %3 : f32[4] = 0000803f0000003f000080be00000000\n"
    "%4 = linear(%0, %1, %2) : f32[s0,4]\n%5 = mul(%4, %3) : f32[s0,4]\n"
    "%6 = softmax(%5) {axis=1, log=0} : f32[s0,4]\n"
    "%7 = reduce(%6) {axes=[1], keepdim=0, kind=\"sum\"} : f32[s0]\n"
    "%8 = cumsum(%7) {axis=0} : f32[s0]\nreturn %8, %5\n",
    "rmir 1\nsym s0 [1,16]\nsym s1 [1,16]\ninput %0 \"x\" : f32[s0,6]\ninput %1 \"i\" : i64[s1]\n"
    "where s0<=2*s1+16\nwhere mod(s0,1)==0\n"
    "%2 = iota() {start=<0>, step=1} : i64[s0]\n%3 = index_copy(%0, %2, %0) {axis=0} : f32[s0,6]\n"
    "%4 = slice(%3) {axis=1, start=<1>, step=2, stop=<6>} : f32[s0,3]\n"
    "%5 = concat(%4, %4) {axis=0} : f32[2*s0,3]\n%6 = reshape(%5) {shape=<s0,2,3>} : f32[s0,2,3]\n"
    "%7 = permute(%6) {axes=[2,0,1]} : f32[3,s0,2]\n"
    "%8 = expand(%7) {shape=<4,3,s0,2>} : f32[4,3,s0,2]\n"
    "%9 = full() {value=0x1p+0} : f32[4,3,s0,2]\n%10 = add(%8, %9) : f32[4,3,s0,2]\n"
    "%11 = embedding(%0, %1) : f32[s1,6]\n%12 = dim_value() {value=<s0+floordiv(s1,2)>} : i64[]\n"
    "return %10, %11, %12\n",
    "rmir 1\nsym s0 [1,16]\ninput %0 \"x\" : f32[s0,4]\ninput %1 \"i\" : i64[s0,4]\n"
    "%2 = gather(%0, %1) {axis=1} : f32[s0,4]\n%3 = scatter(%0, %1, %2) {axis=1, kind=\"add\"} : "
    "f32[s0,4]\n%4, %5 = sort(%3) {axis=1, descending=1} : f32[s0,4], i64[s0,4]\n"
    "%6 = index(%4, %1) {axes=[0]} : f32[s0,4,4]\n%7 = cast(%6) : bf16[s0,4,4]\n"
    "%8 = cast(%7) : f32[s0,4,4]\n%9 = matmul(%8, %8) : f32[s0,4,4]\nreturn %9, %5\n",
    "rmir 1\nsym s0 [1,16]\ninput %0 \"q\" : f32[1,2,s0,8]\ninput %1 \"m\" : bool[1,1,s0,s0]\n"
    "weight %2 \"g\" : f32[8]\n%3 = sdpa(%0, %0, %0, %1) {is_causal=0, scale=0x1p-1} : "
    "f32[1,2,s0,8]\n%4 = layer_norm(%3, %2, %2) {eps=0x1p-20, num_axes=1} : f32[1,2,s0,8]\n"
    "%5 = rms_norm(%4, %2) {eps=0x1p-20, num_axes=1} : f32[1,2,s0,8]\n"
    "%6 = rope(%5, %5, %5) {interleaved=0} : f32[1,2,s0,8]\n"
    "%7 = gelu(%6) : f32[1,2,s0,8]\nreturn %7\n",
};

std::string pick(std::mt19937& rng, const std::vector<std::string>& from) {
  return from[rng() % from.size()];
}

std::string number(std::mt19937& rng) {
  return pick(rng, {"0", "1", "2", "3", "5", "8", "-1", "-2", "64", "65", "4096", "65536",
                    "2147483647", "2147483648", "4294967296", "4611686018427387904",
                    "9223372036854775807", "-9223372036854775807", "-9223372036854775808",
                    "9223372036854775808", "s0", "s1", "2*s0", "s0-9223372036854775807",
                    "floordiv(s0,-1)", "mod(s0,0)", "floordiv(-9223372036854775807-1,-1)",
                    "max(s0,4611686018427387904)", "4611686018427387904*s0",
                    "(s0+s1)*(s0+s1)*(s0+s1)"});
}

// One token of the text is replaced: a number, a name of an operator or a type, or a whole list.
std::string mutated(std::mt19937& rng, const std::string& base) {
  std::string text = base;
  const size_t at = text.find_first_of("0123456789", rng() % text.size());
  switch (rng() % 8) {
    case 0: {  // another operator
      const size_t open = text.find('(', rng() % text.size());
      if (open == std::string::npos) return text;
      const size_t name = text.rfind(' ', open) + 1;
      return text.replace(name, open - name,
                          pick(rng, {"add", "reshape", "gather", "scatter", "sdpa", "gemm", "index",
                                     "concat", "cumsum", "sort", "where", "ewise", "quant_linear",
                                     "quantize", "rope", "embedding", "aten.x.y", "iota"}));
    }
    case 1: {  // another element type
      const std::string type = pick(rng, {"f32[", "i64[", "bool[", "bf16[", "f64[", "u8[", "i32["});
      const size_t open = text.find('[', rng() % text.size());
      const size_t name = open == std::string::npos ? open : text.rfind(' ', open);
      if (name == std::string::npos) return text;
      return text.replace(name + 1, open - name, type);
    }
    case 2: {  // an empty list, or one of other sizes
      const size_t open = text.find_first_of("[<", rng() % text.size());
      const size_t close = open == std::string::npos ? open : text.find_first_of("]>", open);
      if (close == std::string::npos) return text;
      std::string items;
      for (size_t n = rng() % 4; n > 0; --n) items += (items.empty() ? "" : ",") + number(rng);
      return text.replace(open + 1, close - open - 1, items);
    }
    case 3: {  // an attribute less
      const size_t open = text.find('{', rng() % text.size());
      const size_t close = open == std::string::npos ? open : text.find('}', open);
      if (close == std::string::npos) return text;
      return text.erase(open - 1, close - open + 2);
    }
    default: {  // another number
      if (at == std::string::npos) return text;
      const size_t end = text.find_first_not_of("0123456789", at);
      return text.replace(at, end - at, number(rng));
    }
  }
}

bool is_small(const ir::Graph& graph) {
  int64_t total = 0;
  for (size_t v = 0; v < graph.num_values(); ++v) {
    const ir::TensorType& type = graph.type(static_cast<ir::ValueId>(v));
    if (!type.is_static()) return false;
    total += type.num_bytes();
    if (total > (int64_t{1} << 20)) return false;
  }
  return true;
}

// Returns true when the program has run.
bool compile_and_run(const std::string& text) {
  ir::Graph graph = ir::parse(text);
  ir::verify(graph);
  ops::infer_and_check(graph);
  passes::run_pipeline(graph, passes::inference_pipeline(), {});
  ir::Bindings bindings;
  for (const auto& [name, range] : graph.symbols) bindings[name] = 3;
  const ir::Graph fixed = ir::substitute(graph, bindings);
  ops::infer_and_check(fixed);
  if (!is_small(fixed)) return false;
  std::vector<ops::HostTensor> inputs;
  for (ir::ValueId v : fixed.inputs()) inputs.push_back(ops::zeros(fixed.type(v)));
  std::map<std::string, engine::OwnedTensor> weights;
  for (ir::ValueId v : fixed.weights()) {
    weights[fixed.value(v).name] = owned(ops::zeros(fixed.type(v)));
  }
  engine::Program program(graph, cpu_kernels());
  program.set_weights(weights);
  std::vector<engine::TensorView> views;
  for (const auto& t : inputs) views.push_back(view(t));
  HostOutputs outputs;
  program.run(views, outputs);
  return true;
}

}  // namespace

TEST_CASE("hostile text is refused or runs, never a crash") {
  const bool heavy = std::getenv("RM_HEAVY") != nullptr && std::strcmp(std::getenv("RM_HEAVY"), "1") == 0;
  const uint32_t seed = std::getenv("RM_SEED") != nullptr
                            ? static_cast<uint32_t>(std::strtoul(std::getenv("RM_SEED"), nullptr, 10))
                            : 20'261'123u;
  MESSAGE("seed " << seed);
  std::mt19937 rng(seed);
  for (const std::string& text : kPrograms) {
    CAPTURE(text);
    CHECK(compile_and_run(text));
  }
  int ran = 0, refused = 0;
  for (int round = 0; round < (heavy ? 30'000 : 3'000); ++round) {
    std::string text = kPrograms[rng() % kPrograms.size()];
    for (uint32_t n = 1 + rng() % 2; n > 0; --n) text = mutated(rng, text);
    try {
      ran += compile_and_run(text) ? 1 : 0;
    } catch (const Error&) {
      ++refused;
    } catch (const std::exception& other) {
      FAIL_CHECK("expected an rm::Error, got " << other.what() << " from\n" << text);
    }
  }
  CHECK(ran > 100);
  CHECK(refused > 1000);
}

TEST_CASE("sizes whose product overflows are refused by name") {
  auto refused = [](const std::string& text) {
    CHECK_THROWS_WITH_AS(compile_and_run("rmir 1\n" + text), doctest::Contains("2^47 bytes"), Error);
  };
  // 2^62 elements of 4 bytes are 0 bytes modulo 2^64.
  refused("literal %0 : f32[4611686018427387904] = \n%1 = exp(%0) : f32[4611686018427387904]\n"
          "return %1\n");
  refused("literal %0 : f32[4294967296,1073741824] = \n"
          "%1 = reduce(%0) {axes=[0], keepdim=0, kind=\"sum\"} : f32[1073741824]\nreturn %1\n");
}

TEST_CASE("a sum over shapes that only broadcasting makes huge is refused before memory is asked") {
  std::mt19937 rng(1);
  Case c = load(
      "rmir 1\nsym s0 [1,4611686018427387904]\ninput %0 \"x\" : f32[s0,1]\n"
      "input %1 \"y\" : f32[1,s0]\n%2 = expand(%0) {shape=<s0,s0>} : f32[s0,s0]\n"
      "%3 = expand(%1) {shape=<s0,s0>} : f32[s0,s0]\n%4 = add(%2, %3) : f32[s0,s0]\n"
      "%5 = reduce(%4) {axes=[0,1], keepdim=0, kind=\"sum\"} : f32[]\nreturn %5\n",
      rng);
  engine::Program program(c.graph, cpu_kernels());
  program.set_weights({});
  float one = 1;
  const int64_t huge = int64_t{1} << 31;
  const engine::TensorView x{&one, {ir::DType::kF32, {huge, 1}, {0, 0}, 0}};
  const engine::TensorView y{&one, {ir::DType::kF32, {1, huge}, {0, 0}, 0}};
  HostOutputs outputs;
  CHECK_THROWS_WITH_AS(program.run({x, y}, outputs), doctest::Contains("2^47 bytes"), Error);
}
