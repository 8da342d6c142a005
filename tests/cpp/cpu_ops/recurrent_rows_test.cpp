// recurrent on every row against its reference: cells, sizes around the edges of vectors and tiles,
// directions, layouts, and sizes of nothing.
#include <doctest/doctest.h>
#include <omp.h>

#include <cmath>

#include "harness.hpp"
#include "ir/graph.hpp"
#include "ops/registry.hpp"

using namespace rm::test;
namespace ops = rm::ops;
namespace ir = rm::ir;

namespace {

struct Layer {
  std::string cell;
  int64_t steps, batch, hidden, out;  // out != hidden: with a projection
  Type type = Type::f32;
  bool bias = true, reverse = false, batch_first = false, scrambled = false;
};

int64_t gates(const Layer& l) { return l.cell == "lstm" ? 4 : l.cell == "gru" ? 3 : 1; }

/// Operands and results of a layer, and the call over them.
struct Given {
  std::vector<Tensor> in, out;
  Call call;

  Given(const Layer& l, std::mt19937& rng) {
    const int64_t rows = gates(l) * l.hidden;
    const auto sequence = [&](int64_t n) {
      return l.batch_first ? Dims{l.batch, l.steps, n} : Dims{l.steps, l.batch, n};
    };
    const std::vector<Dims> shapes = {sequence(rows),      {rows, l.out}, {l.batch, l.out},
                                      {l.batch, l.hidden}, {rows},        {l.out, l.hidden}};
    const bool lstm = l.cell == "lstm";
    const bool there[] = {true, true, true, lstm, l.bias, l.out != l.hidden};
    for (const Dims& shape : shapes) {
      in.push_back(l.scrambled ? Tensor::scrambled(l.type, shape, rng) : Tensor(l.type, shape));
      in.back().normal(rng, 0.5);
    }
    for (const Dims& shape : {sequence(l.out), Dims{l.batch, l.out}, Dims{l.batch, l.hidden}}) {
      out.push_back(l.scrambled ? Tensor::scrambled(l.type, shape, rng) : Tensor(l.type, shape));
    }
    call.op = "recurrent";
    for (size_t i = 0; i < in.size(); ++i) call.inputs.push_back(there[i] ? &in[i] : nullptr);
    for (size_t i = 0; i < (lstm ? 3 : 2); ++i) call.outputs.push_back(&out[i]);
    call.attrs = {text("cell", l.cell), integer("reverse", l.reverse), integer("batch_first", l.batch_first)};
  }
};

ir::DType ir_type(Type t) {
  return t == Type::f32 ? ir::DType::kF32 : t == Type::bf16 ? ir::DType::kBF16 : ir::DType::kF16;
}

ir::Dims ir_dims(const Dims& dims) { return {dims.begin(), dims.end()}; }

void check(const Layer& l, std::mt19937& rng) {
  Given given(l, rng);
  ir::Node node;
  node.attrs = {{"cell", l.cell}, {"reverse", int64_t{l.reverse}}, {"batch_first", int64_t{l.batch_first}}};
  std::vector<ops::HostTensor> held;
  for (const Tensor& t : given.in) {
    std::vector<double> values;
    for (int64_t i = 0; i < t.numel(); ++i) values.push_back(t[i]);
    held.push_back(ops::from_doubles({ir_type(l.type), ir_dims(t.shape())}, values));
  }
  ops::HostOperands operands;
  for (size_t i = 0; i < held.size(); ++i) {
    operands.push_back(given.call.inputs[i] != nullptr ? &held[i] : nullptr);
  }
  std::vector<ir::TensorType> types;  // in f64: the reference rounds nothing
  for (const Tensor* t : given.call.outputs) types.push_back({ir::DType::kF64, ir_dims(t->shape())});
  const auto want = ops::get("recurrent").reference(node, operands, types);
  CAPTURE(l.cell);
  CAPTURE(l.steps);
  CAPTURE(l.batch);
  CAPTURE(l.hidden);
  CAPTURE(l.out);
  CAPTURE(name(l.type));
  CAPTURE(l.batch_first);
  CAPTURE(l.scrambled);
  on_every_row(given.call, [&](const std::string& row) {
    CAPTURE(row);
    for (size_t r = 0; r < want.size(); ++r) {
      const std::vector<double> values = ops::to_doubles(want[r]);
      const Tensor& got = *given.call.outputs[r];
      int64_t bad = 0;
      for (int64_t i = 0; i < got.numel(); ++i) {
        const double w = values[static_cast<size_t>(i)];
        // An argument of a gate is a sum of so many products in f32: its error grows with the root.
        const double sums = 1e-5 * std::sqrt(std::max(1.0, static_cast<double>(std::max(l.out, l.hidden)) / 32));
        bad += close(got[i], w, 2 * epsilon(l.type) + 1e-5, sums * (l.cell == "relu" ? 10 : 1)) ? 0 : 1;
      }
      CAPTURE(r);
      CHECK(bad == 0);
    }
  });
}

}  // namespace

TEST_CASE("every cell gives its reference's states, whatever the sizes") {
  std::mt19937 rng(18);
  for (const char* cell : {"lstm", "gru", "tanh", "relu"}) {
    for (int64_t batch : {1, 2, 3, 4, 5, 7, 9}) check({cell, 3, batch, 17, 17}, rng);
    for (int64_t hidden : {1, 3, 4, 8, 15, 16, 32, 33, 50}) check({cell, 4, 2, hidden, hidden}, rng);
    for (Type t : {Type::bf16, Type::f16}) {
      check({cell, 3, 5, 21, 21, t}, rng);
      check({cell, 2, 1, 16, 16, t, false, true}, rng);
    }
    check({cell, 6, 3, 20, 20, Type::f32, true, true, true}, rng);
    check({cell, 5, 2, 9, 9, Type::f32, false, false, true}, rng);
    for (int i = 0; i < 4; ++i) check({cell, 3, 3, 11, 11, Type::f32, true, i % 2 == 1, i > 1, true}, rng);
  }
}

TEST_CASE("an lstm's projection is the state that goes round") {
  std::mt19937 rng(19);
  for (int64_t out : {1, 7, 16, 40}) {
    check({"lstm", 4, 3, 33, out}, rng);
    check({"lstm", 3, 1, 16, out == 16 ? 17 : out, Type::bf16, true, true, true}, rng);
    check({"lstm", 3, 2, 10, out, Type::f32, false, false, false, true}, rng);
  }
}

TEST_CASE("no steps leave the state as it was, and no rows are no work") {
  std::mt19937 rng(20);
  for (const char* cell : {"lstm", "gru", "relu"}) {
    check({cell, 0, 2, 5, 5}, rng);
    check({cell, 3, 0, 5, 5}, rng);
    check({cell, 1, 1, 1, 1}, rng);
  }
}

TEST_CASE("the same bits whatever the threads: they share rows, or the panels of one row") {
  std::mt19937 rng(21);
  for (const Layer& l : {Layer{"lstm", 2, 64, 96, 96}, Layer{"gru", 2, 1, 512, 512},
                         Layer{"lstm", 2, 1, 640, 320}}) {
    check(l, rng);
    Given given(l, rng);
    for (const rm_kernel* row : rows("recurrent")) {
      if (!supports(*row, given.call)) continue;
      CAPTURE(std::string(row->name.data, row->name.size));
      const int threads = omp_get_max_threads();
      std::vector<double> first;
      for (int count : {1, 2, 3}) {
        omp_set_num_threads(count);
        REQUIRE(run(*row, given.call).code == RM_OK);
        int64_t differing = 0;
        for (int64_t i = 0; i < given.out[0].numel(); ++i) {
          if (count == 1) first.push_back(given.out[0][i]);
          differing += given.out[0][i] == first[static_cast<size_t>(i)] ? 0 : 1;
        }
        CHECK(differing == 0);
      }
      omp_set_num_threads(threads);
    }
  }
}

TEST_CASE("a plain layer keeps NaN in its row and out of the others") {
  std::mt19937 rng(22);
  Given given({"relu", 2, 3, 6, 6}, rng);
  given.in[0].set(6 + 2, std::nan(""));  // the first step of the second row
  on_every_row(given.call, [&](const std::string& row) {
    CAPTURE(row);
    CHECK(std::isnan(given.out[0][6 + 2]));
    for (int64_t j = 0; j < 6; ++j) {
      CHECK(!std::isnan(given.out[1][j]));
      CHECK(std::isnan(given.out[1][6 + j]));
    }
  });
}
