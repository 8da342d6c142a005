// Small elementwise steps that become part of those that read them: fewer steps, the same bits.
#include <doctest/doctest.h>

#include <random>
#include <sstream>

#include "backend/registry.hpp"
#include "engine_support.hpp"

using namespace rm;
using namespace rm::engine;
using namespace rm::engine_test;
using ops::HostTensor;

namespace {

/// The CPU's kernels, of a device where another launch costs something.
std::shared_ptr<const select::KernelTable> fusing() {
  auto table = std::make_shared<select::KernelTable>();
  Backend& cpu = backend::registry().load(RM_CPU_PLUGIN);
  for (const rm_kernel& k : cpu.kernels()) table->add("cpu", &k, &cpu_that_launches());
  return table;
}

struct Ran {
  std::vector<HostTensor> results;
  int64_t steps = 0;
};

Ran run(const Case& c, const std::shared_ptr<const select::KernelTable>& kernels,
        const std::vector<HostTensor>& inputs) {
  Program program(c.graph, kernels);
  program.set_weights(c.weight_tensors());
  std::vector<engine::TensorView> views;
  for (const HostTensor& t : inputs) views.push_back(view(t));
  HostOutputs outputs;
  program.run(views, outputs);
  Ran out{outputs.tensors, 0};
  for (const auto& [name, steps] : program.report().kernels) out.steps += steps;
  return out;
}

/// Steps of the fused plan; its results are the other's, bit by bit.
int64_t compare(const std::string& text, std::mt19937& rng, const std::vector<HostTensor>& inputs,
                int64_t* before = nullptr) {
  const Case c = load(text, rng);
  const Ran apart = run(c, cpu_kernels(), inputs), fused = run(c, fusing(), inputs);
  REQUIRE(apart.results.size() == fused.results.size());
  for (size_t i = 0; i < apart.results.size(); ++i) CHECK(apart.results[i].bytes == fused.results[i].bytes);
  if (before != nullptr) *before = apart.steps;
  return fused.steps;
}

const std::string kAngles =
    "rmir 1\ninput %0 \"position\" : i64[1,1]\ninput %1 \"inv\" : f32[32]\n"
    "%2 = reshape(%0) {shape=<1,1,1>} : i64[1,1,1]\n%3 = cast(%2) : f32[1,1,1]\n"
    "%4 = mul(%3, %1) : f32[1,1,32]\n%5 = reshape(%4) {shape=<1,1,1,32>} : f32[1,1,1,32]\n"
    "%6 = expand(%5) {shape=<1,1,2,32>} : f32[1,1,2,32]\n%7 = cos(%6) : f32[1,1,2,32]\n"
    "%8 = sin(%6) : f32[1,1,2,32]\n%9 = reshape(%7) {shape=<1,1,64>} : f32[1,1,64]\n"
    "%10 = reshape(%8) {shape=<1,1,64>} : f32[1,1,64]\n";

}  // namespace

TEST_CASE("the angles of a position are two steps") {
  std::mt19937 rng(1);
  for (const double position : {0.0, 1.0, 511.0, 100000.0}) {
    const std::vector<HostTensor> inputs{ops::from_doubles({ir::DType::kI64, {1, 1}}, {position}),
                                         random_tensor(rng, ir::DType::kF32, {32})};
    int64_t before = 0;
    CHECK(compare(kAngles + "return %9, %10\n", rng, inputs, &before) == 2);
    CHECK(before == 4);
    // The product is a result itself: it stays, and its reader computes the cast with it.
    CHECK(compare(kAngles + "return %9, %10, %4\n", rng, inputs) == 3);
  }
}

TEST_CASE("steps that are large, rounded or read by others stay") {
  std::mt19937 rng(2);
  const std::string of = "rmir 1\ninput %0 \"x\" : ";
  const auto given = [&](ir::DType t, ir::Dims dims) {
    return std::vector<HostTensor>{random_tensor(rng, t, std::move(dims))};
  };
  // Two readers of 8,192 elements.
  CHECK(compare(of + "f32[64,128]\n%1 = exp(%0) : f32[64,128]\n%2 = neg(%1) : f32[64,128]\n"
                     "%3 = abs(%1) : f32[64,128]\nreturn %2, %3\n",
                rng, given(ir::DType::kF32, {64, 128})) == 3);
  CHECK(compare(of + "bf16[64]\n%1 = exp(%0) : bf16[64]\n%2 = neg(%1) : bf16[64]\n"
                     "%3 = abs(%1) : bf16[64]\nreturn %2, %3\n",
                rng, given(ir::DType::kBF16, {64})) == 3);
  CHECK(compare(of + "f32[8,8]\n%1 = exp(%0) : f32[8,8]\n%2 = neg(%1) : f32[8,8]\n"
                     "%3 = softmax(%1) {axis=1} : f32[8,8]\nreturn %2, %3\n",
                rng, given(ir::DType::kF32, {8, 8})) == 3);
  CHECK(compare(of + "f32[8,8]\n%1 = exp(%0) : f32[8,8]\n%2 = neg(%1) : f32[8,8]\n"
                     "%3 = permute(%1) {axes=[1,0]} : f32[8,8]\n%4 = abs(%3) : f32[8,8]\nreturn %2, %4\n",
                rng, given(ir::DType::kF32, {8, 8})) == 2);
}

TEST_CASE("drawn programs of small steps over views keep their bits") {
  int64_t apart = 0, fused = 0;
  for (uint32_t seed = 0; seed < 150; ++seed) {
    CAPTURE(seed);
    std::mt19937 rng(seed);
    const auto draw = [&](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
    std::ostringstream text;
    const int a = 1 + draw(5), b = 1 + draw(5);
    const auto type = [&](int x, int y) {
      return "f32[" + std::to_string(x) + "," + std::to_string(y) + "]";
    };
    text << "rmir 1\ninput %0 \"x\" : " << type(a, b) << "\ninput %1 \"r\" : " << type(1, b)
         << "\ninput %2 \"n\" : i64[1,1]\n%3 = cast(%2) : " << type(1, 1) << "\n";
    struct Value {
      int id, rows, columns;
    };
    std::vector<Value> values{{0, a, b}, {1, 1, b}, {3, 1, 1}};
    int next = 4;
    const auto add = [&](const std::string& node, int rows, int columns) {
      text << "%" << next << " = " << node << " : " << type(rows, columns) << "\n";
      values.push_back({next++, rows, columns});
    };
    for (int step = 0; step < 12; ++step) {
      const Value v = values[static_cast<size_t>(draw(static_cast<int>(values.size())))];
      const std::string id = "%" + std::to_string(v.id);
      const auto shaped = [&](int x, int y) {
        return " {shape=<" + std::to_string(x) + "," + std::to_string(y) + ">}";
      };
      switch (draw(7)) {
        case 0:
          add("permute(" + id + ") {axes=[1,0]}", v.columns, v.rows);
          break;
        case 1:
          add("reshape(" + id + ")" + shaped(1, v.rows * v.columns), 1, v.rows * v.columns);
          break;
        case 2:
          if (v.rows == 1) add("expand(" + id + ")" + shaped(3, v.columns), 3, v.columns);
          break;
        case 3:
        case 4: {
          std::vector<Value> fitting;
          for (const Value& w : values) {
            const bool rows = w.rows == v.rows || w.rows == 1 || v.rows == 1;
            const bool columns = w.columns == v.columns || w.columns == 1 || v.columns == 1;
            if (rows && columns) fitting.push_back(w);
          }
          const Value w = fitting[static_cast<size_t>(draw(static_cast<int>(fitting.size())))];
          add(std::string(draw(2) != 0 ? "add" : "maximum") + "(" + id + ", %" + std::to_string(w.id) + ")",
              std::max(v.rows, w.rows), std::max(v.columns, w.columns));
          break;
        }
        default:
          add(std::string(draw(2) != 0 ? "neg" : "abs") + "(" + id + ")", v.rows, v.columns);
      }
    }
    text << "return %" << values.back().id << ", %" << values[values.size() / 2].id << "\n";
    const std::vector<HostTensor> inputs{random_tensor(rng, ir::DType::kF32, {a, b}),
                                         random_tensor(rng, ir::DType::kF32, {1, b}),
                                         ops::from_doubles({ir::DType::kI64, {1, 1}}, {7.0})};
    CAPTURE(text.str());
    int64_t before = 0;
    const int64_t after = compare(text.str(), rng, inputs, &before);
    CHECK(after <= before);
    apart += before, fused += after;
  }
  CHECK(fused < apart * 3 / 4);
}
