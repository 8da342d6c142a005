// Random graphs through the whole pipeline: the numbers stay the same whatever the rules match.
#include "support.hpp"

using namespace rm;
using namespace rm::test;

namespace {

using ir::Dims;
using ir::DType;
using ir::Graph;
using ir::ValueId;

// Grows a graph over values of shape [s0,s1,8] (and narrower ones that broadcast to it).
class Generator {
 public:
  explicit Generator(uint32_t seed) : rng_(seed) {
    graph_.symbols["s0"] = {2, 64};
    graph_.symbols["s1"] = {2, 64};
    for (const char* name : {"a", "b", "c"}) floats_.push_back(graph_.add_input(name, full_));
    floats_.push_back(graph_.add_input("row", {DType::kF32, {8}}));
    floats_.push_back(graph_.add_input("column", {DType::kF32, {s1_, 1}}));
  }

  Graph run(int nodes) {
    for (int i = 0; i < nodes; ++i) step();
    for (int i = 0; i < 3; ++i) graph_.outputs.push_back(floats_[floats_.size() - 1 - pick(4)]);
    graph_.compact();
    return graph_;
  }

 private:
  size_t pick(size_t n) { return rng_() % n; }
  ValueId any() { return floats_[pick(floats_.size())]; }
  ValueId wide() {
    ValueId v = any();
    if (graph_.type(v) == full_) return v;
    return graph_.append("expand", {v}, {{"shape", full_.dims}}, full_);
  }
  ValueId scalar() {
    constexpr double kValues[] = {0, 1, 2, 0.5, -1, 3};
    return ir::add_scalar(graph_, DType::kF32, kValues[pick(6)]);
  }
  ValueId weight(Dims dims) {
    return graph_.add_weight("w" + std::to_string(graph_.num_values()),
                             {DType::kF32, std::move(dims)});
  }

  void step() {
    switch (pick(12)) {
      case 0:
      case 1:
        return unary();
      case 2:
      case 3:
      case 4:
        return binary();
      case 5:
        return with_scalar();
      case 6:
        return linear();
      case 7:
        return norm();
      case 8:
        return there_and_back();
      case 9:
        return halves();
      case 10:
        return masked();
      default:
        return casts();
    }
  }
  void unary() {
    constexpr const char* kOps[] = {"neg", "tanh", "sigmoid", "relu", "gelu", "silu", "sin", "abs"};
    ValueId x = any();
    floats_.push_back(graph_.append(kOps[pick(8)], {x}, {}, graph_.type(x)));
  }
  void binary() {
    constexpr const char* kOps[] = {"add", "sub", "mul", "maximum", "minimum", "add", "mul"};
    ValueId a = wide(), b = any();
    if (pick(2) == 0) std::swap(a, b);
    floats_.push_back(graph_.append(kOps[pick(7)], {a, b}, {}, full_));
  }
  void with_scalar() {
    constexpr const char* kOps[] = {"add", "sub", "mul"};
    ValueId x = any(), c = scalar();
    const char* op = kOps[pick(3)];
    bool first = pick(3) == 0 && op[0] != 's';
    std::vector<ValueId> operands{x, c};
    if (first) std::swap(operands[0], operands[1]);
    floats_.push_back(graph_.append(op, operands, {}, graph_.type(x)));
  }
  void linear() {
    ValueId x = wide();
    for (size_t i = 0; i < 1 + pick(3); ++i) {
      ValueId bias = pick(2) == 0 ? ir::kNoValue : weight({8});
      floats_.push_back(graph_.append("linear", {x, weight({8, 8}), bias}, {}, full_));
    }
  }
  void norm() {
    ValueId x = pick(2) == 0 ? graph_.append("add", {wide(), wide()}, {}, full_) : wide();
    if (pick(2) == 0) {
      floats_.push_back(
          graph_.append("layer_norm", {x, weight({8}), ir::kNoValue}, {{"eps", 0.01}}, full_));
    } else {
      ir::TensorType mean{DType::kF32, {s0_, s1_, 1}};
      ValueId sq = graph_.append("mul", {x, x}, {}, full_);
      ValueId m = graph_.append("reduce", {sq},
                                {{"axes", std::vector<int64_t>{2}},
                                 {"keepdim", int64_t{1}},
                                 {"kind", std::string("mean")}},
                                mean);
      ValueId e = graph_.append("add", {m, ir::add_scalar(graph_, DType::kF32, 0.5)}, {}, mean);
      ValueId r = graph_.append("rsqrt", {e}, {}, mean);
      floats_.push_back(graph_.append("mul", {x, r}, {}, full_));
    }
    if (pick(2) == 0) floats_.push_back(x);
  }
  void there_and_back() {
    ir::TensorType heads{DType::kF32, {s0_, s1_, 2, 4}}, moved{DType::kF32, {s0_, 2, s1_, 4}};
    ValueId x = graph_.append("reshape", {wide()}, {{"shape", heads.dims}}, heads);
    x = graph_.append("permute", {x}, {{"axes", std::vector<int64_t>{0, 2, 1, 3}}}, moved);
    if (pick(2) == 0)
      x = graph_.append("sdpa", {x, x, x}, {{"is_causal", int64_t{1}}, {"scale", 0.5}}, moved);
    x = graph_.append("permute", {x}, {{"axes", std::vector<int64_t>{0, 2, 1, 3}}}, heads);
    floats_.push_back(graph_.append("reshape", {x}, {{"shape", full_.dims}}, full_));
  }
  void halves() {
    ir::TensorType half{DType::kF32, {s0_, s1_, 4}};
    auto slice = [&](ValueId x, int64_t from) {
      return graph_.append("slice", {x},
                           {{"axis", int64_t{2}},
                            {"start", Dims{from}},
                            {"step", int64_t{1}},
                            {"stop", Dims{from + 4}}},
                           half);
    };
    ValueId x = wide(), y = wide();
    floats_.push_back(
        graph_.append("concat", {slice(x, 4), slice(y, 0)}, {{"axis", int64_t{2}}}, full_));
  }
  void masked() {
    ir::TensorType range{DType::kI64, {s1_}}, column{DType::kI64, {s1_, 1}},
        test{DType::kBool, {s1_, 8}};
    ValueId i =
        graph_.append("iota", {}, {{"start", Dims{int64_t{0}}}, {"step", int64_t{1}}}, range);
    i = graph_.append("reshape", {i}, {{"shape", column.dims}}, column);
    ValueId j = graph_.append(
        "iota", {}, {{"start", Dims{static_cast<int64_t>(pick(3))}}, {"step", int64_t{1}}},
        {DType::kI64, {8}});
    constexpr const char* kOps[] = {"le", "ge", "lt", "ne"};
    ValueId c = graph_.append(kOps[pick(4)], {i, j}, {}, test);
    floats_.push_back(graph_.append("where", {c, wide(), scalar()}, {}, full_));
  }
  void casts() {
    ir::TensorType doubles{DType::kF64, full_.dims};
    ValueId x = graph_.append("cast", {wide()}, {}, doubles);
    if (pick(2) == 0) x = graph_.append("neg", {x}, {}, doubles);
    floats_.push_back(graph_.append("cast", {x}, {}, full_));
  }

  std::mt19937 rng_;
  ir::Dim s0_ = ir::Dim::symbol("s0"), s1_ = ir::Dim::symbol("s1");
  ir::TensorType full_{DType::kF32, {s0_, s1_, 8}};
  Graph graph_;
  std::vector<ValueId> floats_;
};

}  // namespace

TEST_CASE("random graphs give the same numbers after the pipeline, symbolic or static") {
  for (uint32_t seed = 0; seed < 150; ++seed) {
    CAPTURE(seed);
    ir::Graph before = Generator(seed).run(4 + static_cast<int>(seed % 30));
    ir::verify(before);
    ops::infer_and_check(before);
    passes::PassContext context;
    context.verify = true;
    ir::Graph after = before;
    passes::run_pipeline(after, passes::inference_pipeline(), context);
    CHECK(after.nodes.size() <= before.nodes.size() + 8);  // merging adds slices
    for (const auto& bindings : some_bindings()) {
      check_same_numbers(before, after, bindings, 2e-3);
      ir::Graph at_size = ir::substitute(before, bindings);
      passes::run_pipeline(at_size, passes::inference_pipeline(), context);
      check_same_numbers(before, at_size, bindings, 2e-3);
    }
    // The pipeline is at rest on what it made: nothing more to drop.
    ir::Graph again = after;
    passes::run_pipeline(again, passes::inference_pipeline(), context);
    CHECK(again.nodes.size() <= after.nodes.size());
  }
}
