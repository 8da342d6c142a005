// Updates in place: a donated input takes the update exactly when nothing else reads what it held,
// and is handed back exactly when it is the output as the caller laid it out.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "engine/bind_symbols.hpp"
#include "engine_support.hpp"

using namespace rm;
using namespace rm::engine_test;
using engine::Program;
using ops::HostTensor;

namespace {

// A cache of capacity s1: new rows go to `at`, and what the cache then holds is read.
std::string append_program(bool donated, const char* extra) {
  return std::string("rmir 1\nsym s0 [1,8]\nsym s1 [1,64]\n") + "input %0 \"cache\" : f32[2,s1,4]" +
         (donated ? " donated" : "") + "\n" +
         "input %1 \"new\" : f32[2,s0,4]\n"
         "input %2 \"at\" : i64[s0]\n"
         "%3 = index_copy(%0, %2, %1) {axis=1} : f32[2,s1,4]\n"
         "%4 = reduce(%3) {axes=[1], keepdim=0, kind=\"sum\"} : f32[2,4]\n" +
         extra;
}

}  // namespace

TEST_CASE("a donated input is updated in place, any other is left alone") {
  std::mt19937 rng(8);
  struct Variant {
    bool donated;
    const char* rest;
    bool in_place;
  };
  const Variant variants[] = {
      {true, "return %3, %4\n", true},
      {false, "return %3, %4\n", false},
      // Read after the update: the old content must survive it.
      {true, "%5 = reduce(%0) {axes=[1], keepdim=0, kind=\"sum\"} : f32[2,4]\nreturn %3, %4, %5\n",
       false},
      {true, "return %3, %4, %0\n", false},
  };
  for (const Variant& v : variants) {
    CAPTURE(v.rest);
    Case c = load(append_program(v.donated, v.rest).c_str(), rng);
    Program program(c.graph, cpu_kernels());
    program.set_weights({});
    HostTensor cache = random_tensor(rng, ir::DType::kF32, {2, 9, 4});
    HostTensor rows = random_tensor(rng, ir::DType::kF32, {2, 3, 4});
    HostTensor at = ops::from_doubles({ir::DType::kI64, {3}}, {4, 8, 0});
    const HostTensor before = cache;
    std::vector<ir::Layout> layouts{ir::contiguous(cache.type), ir::contiguous(rows.type),
                                    ir::contiguous(at.type)};
    ir::Graph fixed = ir::substitute(c.graph, engine::bind_symbols(c.graph, layouts));
    auto want = ops::evaluate(fixed, {before, rows, at}, c.weights);
    HostOutputs outputs;
    program.run({view(cache), view(rows), view(at)}, outputs);
    CHECK(outputs.reused.count(0) == (v.in_place ? 1u : 0u));
    CHECK(max_difference(v.in_place ? cache : outputs.tensors[0], want[0]) == 0);
    if (!v.in_place) CHECK(max_difference(cache, before) == 0);
    for (size_t i = 1; i < want.size(); ++i) {
      CHECK(max_difference(outputs.reused.count(i) ? cache : outputs.tensors[i], want[i]) < 1e-5);
    }
  }
}

namespace {

struct Run {
  HostTensor cache;             // after the run
  std::vector<HostTensor> got;  // outputs; of one that is the donated input, the input's content
  std::vector<HostTensor> want;
  std::map<size_t, size_t> reused;
};

// `inputs[0]` is the donated one. All shapes are static.
Run run_static(const std::string& text, std::vector<HostTensor> inputs) {
  std::mt19937 rng(1);
  Case c = load(text, rng);
  Program program(c.graph, cpu_kernels());
  program.set_weights({});
  Run out;
  out.want = ops::evaluate(c.graph, inputs, c.weights);
  std::vector<engine::TensorView> views;
  for (const auto& t : inputs) views.push_back(view(t));
  HostOutputs outputs;
  program.run(views, outputs);
  out.cache = inputs[0];
  out.reused = outputs.reused;
  for (size_t i = 0; i < out.want.size(); ++i) {
    out.got.push_back(out.reused.count(i) != 0 ? out.cache : outputs.tensors[i]);
  }
  return out;
}

}  // namespace

TEST_CASE("a read of a donated input after an update through a view of it sees the old content") {
  HostTensor k = ops::from_doubles({ir::DType::kF32, {2, 3}}, {1, 1, 1, 1, 1, 1});
  HostTensor at = ops::from_ints({ir::DType::kI64, {1}}, {0});
  HostTensor row = ops::from_doubles({ir::DType::kF32, {1, 2}}, {7, 7});
  const Run r = run_static(
      "rmir 1\ninput %0 \"k\" : f32[2,3] donated\ninput %1 \"at\" : i64[1]\n"
      "input %2 \"row\" : f32[1,2]\n%3 = reshape(%0) {shape=<3,2>} : f32[3,2]\n"
      "%4 = index_copy(%3, %1, %2) {axis=0} : f32[3,2]\n%5 = relu(%0) : f32[2,3]\n"
      "return %4, %5\n",
      {k, at, row});
  for (size_t i = 0; i < 2; ++i) CHECK(max_difference(r.got[i], r.want[i]) == 0);
}

TEST_CASE("an update whose source is a view of its target reads the old content") {
  HostTensor k = ops::from_doubles({ir::DType::kF32, {3, 2}}, {1, 2, 3, 4, 5, 6});
  HostTensor at = ops::from_ints({ir::DType::kI64, {2}}, {1, 2});
  const Run r = run_static(
      "rmir 1\ninput %0 \"k\" : f32[3,2] donated\ninput %1 \"at\" : i64[2]\n"
      "%2 = slice(%0) {axis=0, start=<0>, step=1, stop=<2>} : f32[2,2]\n"
      "%3 = index_copy(%0, %1, %2) {axis=0} : f32[3,2]\nreturn %3\n",
      {k, at});
  CHECK(max_difference(r.got[0], r.want[0]) == 0);
}

TEST_CASE("an output that is another view of a donated input is a tensor of its own") {
  HostTensor k = ops::from_doubles({ir::DType::kF32, {3, 2}}, {1, 2, 3, 4, 5, 6});
  HostTensor at = ops::from_ints({ir::DType::kI64, {1}}, {1});
  HostTensor row = ops::from_doubles({ir::DType::kF32, {1, 2}}, {7, 8});
  const std::string head =
      "rmir 1\ninput %0 \"k\" : f32[3,2] donated\ninput %1 \"at\" : i64[1]\n"
      "input %2 \"row\" : f32[1,2]\n%3 = index_copy(%0, %1, %2) {axis=0} : f32[3,2]\n";
  for (const char* view_of_it : {"%4 = permute(%3) {axes=[1,0]} : f32[2,3]\nreturn %4\n",
                                 "%4 = reshape(%3) {shape=<2,3>} : f32[2,3]\nreturn %4\n"}) {
    CAPTURE(view_of_it);
    const Run r = run_static(head + view_of_it, {k, at, row});
    CHECK(r.reused.empty());
    CHECK(max_difference(r.got[0], r.want[0]) == 0);
  }
  CHECK(run_static(head + "return %3\n", {k, at, row}).reused.size() == 1);
}

namespace {

// Random programs of views, updates and reads over one donated matrix.
class Generator {
 public:
  explicit Generator(std::mt19937& rng) : rng_(rng) {
    text_ = "rmir 1\ninput %0 \"k\" : f32[4,6] donated\ninput %1 \"at\" : i64[1]\n";
    values_ = {{0, 4, 6}};
  }
  std::string run(int nodes) {
    for (int i = 0; i < nodes; ++i) step();
    text_ += "return ";
    for (size_t i = 0, n = 1 + rng_() % 3; i < n; ++i) {
      text_ += (i == 0 ? "%" : ", %") + std::to_string(any().id);
    }
    return text_ + "\n";
  }

 private:
  struct Matrix {
    int id;
    int64_t rows, columns;
  };
  static std::string type(int64_t rows, int64_t columns) {
    return "f32[" + std::to_string(rows) + "," + std::to_string(columns) + "]";
  }
  // Late values more often, so that chains grow.
  Matrix any() { return values_[std::max(rng_() % values_.size(), rng_() % values_.size())]; }
  void add(const std::string& call, int64_t rows, int64_t columns) {
    text_ += "%" + std::to_string(next_) + " = " + call + " : " + type(rows, columns) + "\n";
    values_.push_back({next_++, rows, columns});
  }
  std::string first_row(const Matrix& m) {
    add("slice(%" + std::to_string(m.id) + ") {axis=0, start=<0>, step=1, stop=<1>}", 1, m.columns);
    return std::to_string(values_.back().id);
  }
  void step() {
    const Matrix m = any();
    const std::string id = "%" + std::to_string(m.id);
    const std::string swapped =
        "<" + std::to_string(m.columns) + "," + std::to_string(m.rows) + ">";
    switch (rng_() % 6) {
      case 0: return add("permute(" + id + ") {axes=[1,0]}", m.columns, m.rows);
      case 1: return add("reshape(" + id + ") {shape=" + swapped + "}", m.columns, m.rows);
      case 2: return add("relu(" + id + ")", m.rows, m.columns);
      case 3: {
        const Matrix other = any();
        if (other.columns != m.columns || other.rows != m.rows) return;
        return add("add(" + id + ", %" + std::to_string(other.id) + ")", m.rows, m.columns);
      }
      default: {  // `at` is 0: any row will do
        Matrix source = any();
        if (source.columns != m.columns) source = m;
        if (rng_() % 2 == 0) {
          add("neg(%" + std::to_string(source.id) + ")", source.rows, source.columns);
          source = values_.back();
        }
        const std::string row = first_row(source);
        return add("index_copy(" + id + ", %1, %" + row + ") {axis=0}", m.rows, m.columns);
      }
    }
  }

  std::mt19937& rng_;
  std::string text_;
  std::vector<Matrix> values_;
  int next_ = 2;
};

}  // namespace

TEST_CASE("random updates of a donated input give what the reference gives") {
  const char* given = std::getenv("RM_SEED");
  const auto seed = given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10)) : 7u;
  MESSAGE("seed " << seed);
  std::mt19937 rng(seed);
  size_t in_place = 0;
  for (int round = 0; round < 400; ++round) {
    const std::string text = Generator(rng).run(3 + static_cast<int>(rng() % 8));
    CAPTURE(text);
    HostTensor k = random_tensor(rng, ir::DType::kF32, {4, 6});
    const Run r = run_static(text, {k, ops::from_ints({ir::DType::kI64, {1}}, {0})});
    in_place += r.reused.size();
    for (size_t i = 0; i < r.want.size(); ++i) {
      CAPTURE(i);
      CHECK(max_difference(r.got[i], r.want[i]) == 0);
    }
  }
  CHECK(in_place > 10);
}

TEST_CASE("a call that a check refuses leaves what was given away as it was, wherever the check stands") {
  const HostTensor k = ops::from_doubles({ir::DType::kF32, {3, 2}}, {1, 2, 3, 4, 5, 6});
  const HostTensor at = ops::from_ints({ir::DType::kI64, {1}}, {1});
  const HostTensor row = ops::from_doubles({ir::DType::kF32, {1, 2}}, {7, 8});
  const std::string head =
      "rmir 1\ninput %0 \"k\" : f32[3,2] donated\ninput %1 \"at\" : i64[1]\n"
      "input %2 \"row\" : f32[1,2]\ninput %3 \"c\" : bool[]\n";
  struct Kind {
    const char* what;
    const char* body;
  };
  for (const Kind kind : {
           Kind{"in front of an update", "%4 = check(%3) : bool[]\n%5 = index_copy(%0, %1, %2) {axis=0} : f32[3,2]\nreturn %5\n"},
           Kind{"behind an update", "%4 = index_copy(%0, %1, %2) {axis=0} : f32[3,2]\n%5 = check(%3) : bool[]\nreturn %4\n"},
           Kind{"behind an assignment", "%4 = neg(%0) : f32[3,2]\n%5 = assign(%0, %4) : f32[3,2]\n%6 = check(%3) : bool[]\nreturn %5\n"},
           Kind{"between", "%4 = neg(%0) : f32[3,2]\n%5 = check(%3) : bool[]\n%6 = assign(%0, %4) : f32[3,2]\nreturn %6\n"},
       }) {
    CAPTURE(kind.what);
    const HostTensor yes = ops::from_ints({ir::DType::kBool, {}}, {1});
    const Run good = run_static(head + kind.body, {k, at, row, yes});
    CHECK(max_difference(good.got[0], good.want[0]) == 0);

    std::mt19937 rng(1);
    Case c = load(head + kind.body, rng);
    Program program(c.graph, cpu_kernels());
    program.set_weights({});
    std::vector<HostTensor> inputs{k, at, row, ops::from_ints({ir::DType::kBool, {}}, {0})};
    std::vector<engine::TensorView> views;
    for (const auto& t : inputs) views.push_back(view(t));
    HostOutputs outputs;
    CHECK_THROWS_WITH_AS(program.run(views, outputs), doctest::Contains("checks"), Error);
    CHECK(inputs[0].bytes == k.bytes);
  }
}
