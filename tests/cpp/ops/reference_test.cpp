// Reference evaluation against values worked out by hand.
#include <limits>

#include "support.hpp"

using namespace rm;
using namespace rm::test;

static const double kNaN = std::numeric_limits<double>::quiet_NaN();
static const double kInf = std::numeric_limits<double>::infinity();

TEST_CASE("views move elements as numpy does") {
  auto x = f32({2, 3}, {0, 1, 2, 3, 4, 5});
  std::string in = "input %0 \"x\" : f32[2,3]\n";
  check_close(run(in + "%1 = permute(%0) {axes=[1,0]} : f32[3,2]\nreturn %1\n", {x})[0],
              {0, 3, 1, 4, 2, 5});
  check_close(run(in + "%1 = reshape(%0) {shape=<3,2>} : f32[3,2]\nreturn %1\n", {x})[0],
              {0, 1, 2, 3, 4, 5});
  check_close(
      run(in + "%1 = slice(%0) {axis=1, start=<0>, step=2, stop=<3>} : f32[2,2]\nreturn %1\n",
          {x})[0],
      {0, 2, 3, 5});
  check_close(
      run(in + "%1 = slice(%0) {axis=1, start=<1>, step=1, stop=<1>} : f32[2,0]\nreturn %1\n",
          {x})[0],
      {});
  check_close(run(in + "%1 = concat(%0, %0) {axis=0} : f32[4,3]\nreturn %1\n", {x})[0],
              {0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5});
  check_close(run(in + "%1 = concat(%0, %0) {axis=1} : f32[2,6]\nreturn %1\n", {x})[0],
              {0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5});
  auto row = f32({1, 2}, {7, 8});
  check_close(
      run("input %0 \"x\" : f32[1,2]\n%1 = expand(%0) {shape=<2,3,2>} : f32[2,3,2]\nreturn %1\n",
          {row})[0],
      {7, 8, 7, 8, 7, 8, 7, 8, 7, 8, 7, 8});
}

TEST_CASE("creation operators fill their written type") {
  check_close(run("%0 = iota() {start=<3>, step=2} : i64[3]\nreturn %0\n", {})[0], {3, 5, 7});
  check_close(run("%0 = full() {value=0x1p-1} : bf16[2,1]\nreturn %0\n", {})[0], {0.5, 0.5});
  check_close(run("%0 = full() {value=1} : bool[]\nreturn %0\n", {})[0], {1});
  check_close(run("%0 = dim_value() {value=<12>} : i64[]\nreturn %0\n", {})[0], {12});
}

TEST_CASE("reductions have torch's identities and keep NaN") {
  std::string in = "input %0 \"x\" : f32[2,2]\n";
  auto x = f32({2, 2}, {1, kNaN, 3, 4});
  auto reduce = [&](const std::string& kind, const std::string& dtype) {
    return run(in + "%1 = reduce(%0) {axes=[1], keepdim=0, kind=\"" + kind + "\"} : " + dtype +
                   "[2]\nreturn %1\n",
               {x})[0];
  };
  check_close(reduce("sum", "f32"), {kNaN, 7});
  check_close(reduce("mean", "f32"), {kNaN, 3.5});
  check_close(reduce("max", "f32"), {kNaN, 4});
  check_close(reduce("min", "f32"), {kNaN, 3});
  check_close(reduce("prod", "f32"), {kNaN, 12});
  check_close(reduce("argmax", "i64"), {1, 1});
  check_close(reduce("argmin", "i64"), {1, 0});
  check_close(reduce("all", "bool"), {1, 1});
  auto none = f32({0}, {});
  auto empty = [&](const std::string& kind) {
    return run("input %0 \"x\" : f32[0]\n%1 = reduce(%0) {axes=[0], keepdim=1, kind=\"" + kind +
                   "\"} : f32[1]\nreturn %1\n",
               {none})[0];
  };
  check_close(empty("sum"), {0});
  check_close(empty("prod"), {1});
  check_close(empty("max"), {-kInf});
  check_close(empty("mean"), {kNaN});
}

TEST_CASE("a grouped product gives zeros behind the last group and refuses offsets that fall") {
  const auto x = f32({4, 1}, {1, 2, 3, 4}), w = f32({3, 1, 2}, {1, 10, 5, 50, 7, 70});
  const auto product = [&](std::vector<double> ends) {
    return run("input %0 \"x\" : f32[4,1]\ninput %1 \"w\" : f32[3,1,2]\ninput %2 \"e\" : i64[3]\n"
               "%3 = grouped_gemm(%0, %1, %2) : f32[4,2]\nreturn %3\n",
               {x, w, tensor(ir::DType::kI64, {3}, std::move(ends))})[0];
  };
  check_close(product({1, 1, 3}), {1, 10, 14, 140, 21, 210, 0, 0});
  check_close(product({0, 4, 4}), {5, 50, 10, 100, 15, 150, 20, 200});
  for (const std::vector<double>& wrong :
       {std::vector<double>{2, 1, 4}, std::vector<double>{-1, 1, 4}, std::vector<double>{0, 1, 5}}) {
    CHECK_THROWS_WITH_AS(product(wrong), doctest::Contains("offsets that do not fall"), Error);
  }
}

TEST_CASE("integer sums widen to 64 bits and cumsum runs along its axis") {
  auto flags = tensor(ir::DType::kBool, {2, 2}, {1, 1, 0, 1});
  check_close(run("input %0 \"x\" : bool[2,2]\n%1 = reduce(%0) {axes=[0,1], keepdim=0, "
                  "kind=\"sum\"} : i64[]\nreturn %1\n",
                  {flags})[0],
              {3});
  check_close(run("input %0 \"x\" : bool[2,2]\n%1 = cumsum(%0) {axis=0} : i64[2,2]\nreturn %1\n",
                  {flags})[0],
              {1, 1, 1, 2});
}

TEST_CASE("softmax, its logarithm and sort agree with hand values") {
  auto x = f32({1, 3}, {0, std::log(2.0), std::log(5.0)});
  std::string in = "input %0 \"x\" : f32[1,3]\n";
  check_close(run(in + "%1 = softmax(%0) {axis=1, log=0} : f32[1,3]\nreturn %1\n", {x})[0],
              {0.125, 0.25, 0.625});
  check_close(run(in + "%1 = softmax(%0) {axis=1, log=1} : f32[1,3]\nreturn %1\n", {x})[0],
              {std::log(0.125), std::log(0.25), std::log(0.625)});
  auto y = f32({4}, {2, 3, 2, kNaN});
  auto out =
      run("input %0 \"x\" : f32[4]\n%1, %2 = sort(%0) {axis=0, descending=1, k=3} : f32[3], "
          "i64[3]\nreturn %1, %2\n",
          {y});
  check_close(out[0], {kNaN, 3, 2});
  check_close(out[1], {3, 1, 0});
}

TEST_CASE("indexing follows torch and refuses what lies outside") {
  auto x = f32({2, 3}, {0, 1, 2, 3, 4, 5});
  std::string in = "input %0 \"x\" : f32[2,3]\ninput %1 \"i\" : i64[2,1]\n";
  check_close(
      run(in + "%2 = gather(%0, %1) {axis=1} : f32[2,1]\nreturn %2\n", {x, i64({2, 1}, {2, 0})})[0],
      {2, 3});
  check_close(
      run(in + "%2 = embedding(%0, %1) : f32[2,1,3]\nreturn %2\n", {x, i64({2, 1}, {1, 0})})[0],
      {3, 4, 5, 0, 1, 2});
  check_close(run(in + "%2 = index(%0, %1) {axes=[1]} : f32[2,2,1]\nreturn %2\n",
                  {x, i64({2, 1}, {-1, 1})})[0],
              {2, 1, 5, 4});
  check_close(run(in + "input %2 \"j\" : i64[3]\n%3 = index(%0, %1, %2) {axes=[0,1]} : "
                       "f32[2,3]\nreturn %3\n",
                  {x, i64({2, 1}, {1, 0}), i64({3}, {2, 1, 0})})[0],
              {5, 4, 3, 2, 1, 0});
  check_close(run(in + "input %2 \"s\" : f32[2,1]\n%3 = scatter(%0, %1, %2) {axis=1, kind=\"add\"} "
                       ": f32[2,3]\nreturn %3\n",
                  {x, i64({2, 1}, {2, 0}), f32({2, 1}, {10, 20})})[0],
              {0, 1, 12, 23, 4, 5});
  check_close(run("input %0 \"x\" : f32[2,3]\ninput %1 \"i\" : i64[2]\ninput %2 \"s\" : f32[2,2]\n"
                  "%3 = index_copy(%0, %1, %2) {axis=1} : f32[2,3]\nreturn %3\n",
                  {x, i64({2}, {2, 0}), f32({2, 2}, {10, 20, 30, 40})})[0],
              {20, 1, 10, 40, 4, 30});
  for (double bad : {-1.0, 2.0}) {
    CHECK_THROWS_AS(
        run(in + "%2 = embedding(%0, %1) : f32[2,1,3]\nreturn %2\n", {x, i64({2, 1}, {bad, 0})}),
        Error);
  }
}

TEST_CASE("check gives its condition and refuses where it is false") {
  const std::string in = "input %0 \"c\" : bool[]\n%1 = check(%0) {message=\"small\"} : bool[]\nreturn %1\n";
  check_close(run(in, {ops::from_ints({ir::DType::kBool, {}}, {1})})[0], {1});
  CHECK_THROWS_WITH_AS(run(in, {ops::from_ints({ir::DType::kBool, {}}, {0})}), doctest::Contains("small"), Error);
}

TEST_CASE("gemm is linear with its epilogue") {
  auto x = f32({2, 2}, {1, 2, 3, 4}), w = f32({3, 2}, {1, 0, 0, 1, -1, -1});
  auto b = f32({3}, {10, 20, 0}), r = f32({2, 3}, {1, 1, 1, 1, 1, 1});
  std::string in =
      "input %0 \"x\" : f32[2,2]\ninput %1 \"w\" : f32[3,2]\ninput %2 \"b\" : f32[3]\ninput %3 "
      "\"r\" : f32[2,3]\n";
  check_close(run(in + "%4 = linear(%0, %1, %2) : f32[2,3]\nreturn %4\n", {x, w, b, r})[0],
              {11, 22, -3, 13, 24, -7});
  check_close(
      run(in + "%4 = gemm(%0, %1, %2, %3) {activation=\"relu\", trans_b=1} : f32[2,3]\nreturn %4\n",
          {x, w, b, r})[0],
      {12, 23, 1, 14, 25, 1});
  check_close(run(in + "%4 = permute(%1) {axes=[1,0]} : f32[2,3]\n%5 = matmul(%0, %4) : "
                       "f32[2,3]\nreturn %5\n",
                  {x, w, b, r})[0],
              {1, 2, -3, 3, 4, -7});
}

TEST_CASE("matmul broadcasts its leading dims") {
  auto a = f32({2, 1, 2}, {1, 2, 3, 4}), b = f32({2, 1}, {1, 10});
  check_close(run("input %0 \"a\" : f32[2,1,2]\ninput %1 \"b\" : f32[2,1]\n%2 = matmul(%0, %1) : "
                  "f32[2,1,1]\nreturn %2\n",
                  {a, b})[0],
              {21, 43});
}

TEST_CASE("norms give the residual sum as second result") {
  auto x = f32({1, 2}, {1, 2}), r = f32({1, 2}, {0, 2}), w = f32({2}, {2, 1}), b = f32({2}, {5, 6});
  std::string in =
      "input %0 \"x\" : f32[1,2]\ninput %1 \"r\" : f32[1,2]\ninput %2 \"w\" : f32[2]\ninput %3 "
      "\"b\" : f32[2]\n";
  auto out = run(
      in + "%4, %5 = layer_norm(%0, %2, %3, %1) {eps=0x0p+0} : f32[1,2], f32[1,2]\nreturn %4, %5\n",
      {x, r, w, b});
  check_close(out[0], {-2 + 5, 1 + 6});
  check_close(out[1], {1, 4});
  double rms = std::sqrt((1.0 + 16.0) / 2);
  out = run(
      in + "%4 = rms_norm(%0, %2, %1) {eps=0x0p+0, weight_offset=0x1p+0} : f32[1,2]\nreturn %4\n",
      {x, r, w, b});
  check_close(out[0], {3 / rms, 8 / rms});
}

TEST_CASE("attention masks, groups queries and gives zeros for a row with every key masked") {
  auto q = f32({1, 2, 2, 1}, {1, 1, 0, 0}), k = f32({1, 1, 2, 1}, {0, std::log(3.0)});
  auto v = f32({1, 1, 2, 1}, {4, 8});
  std::string in =
      "input %0 \"q\" : f32[1,2,2,1]\ninput %1 \"k\" : f32[1,1,2,1]\ninput %2 \"v\" : "
      "f32[1,1,2,1]\n";
  check_close(
      run(in + "%3 = sdpa(%0, %1, %2) {is_causal=0, scale=0x1p+0} : f32[1,2,2,1]\nreturn %3\n",
          {q, k, v})[0],
      {7, 7, 6, 6});
  check_close(
      run(in + "%3 = sdpa(%0, %1, %2, _) {is_causal=1, scale=0x1p+0} : f32[1,2,2,1]\nreturn %3\n",
          {q, k, v})[0],
      {4, 7, 4, 6});
  auto mask = tensor(ir::DType::kBool, {1, 1, 2, 2}, {0, 1, 0, 0});
  check_close(run(in + "input %3 \"m\" : bool[1,1,2,2]\n%4 = sdpa(%0, %1, %2, %3) {is_causal=0, "
                       "scale=0x1p+0} : f32[1,2,2,1]\nreturn %4\n",
                  {q, k, v, mask})[0],
              {8, 0, 8, 0});
  auto bias = f32({2}, {0, -kInf});
  check_close(run(in + "input %3 \"m\" : f32[2]\n%4 = sdpa(%0, %1, %2, %3) {is_causal=0, "
                       "scale=0x1p+0} : f32[1,2,2,1]\nreturn %4\n",
                  {q, k, v, bias})[0],
              {4, 4, 4, 4});
  auto none = f32({2}, {-kInf, -kInf});  // torch answers a row without keys with zeros
  check_close(run(in + "input %3 \"m\" : f32[2]\n%4 = sdpa(%0, %1, %2, %3) {is_causal=0, "
                       "scale=0x1p+0} : f32[1,2,2,1]\nreturn %4\n",
                  {q, k, v, none})[0],
              {0, 0, 0, 0});
}

TEST_CASE("rope rotates halves or pairs") {
  auto x = f32({1, 1, 1, 4}, {1, 2, 3, 4}), c = f32({4}, {1, 1, 1, 1}),
       s = f32({4}, {10, 10, 10, 10});
  std::string in =
      "input %0 \"x\" : f32[1,1,1,4]\ninput %1 \"c\" : f32[4]\ninput %2 \"s\" : f32[4]\n";
  check_close(
      run(in + "%3 = rope(%0, %1, %2) {interleaved=0} : f32[1,1,1,4]\nreturn %3\n", {x, c, s})[0],
      {-29, -38, 13, 24});
  check_close(
      run(in + "%3 = rope(%0, %1, %2) {interleaved=1} : f32[1,1,1,4]\nreturn %3\n", {x, c, s})[0],
      {-19, 12, -37, 34});
}

TEST_CASE("an aten node keeps its written types and has no reference") {
  std::string body =
      "input %0 \"x\" : f32[2]\n%1 = aten.erfinv.default(%0) {schema_args=\"[]\"} : f32[9]\nreturn "
      "%1\n";
  CHECK(type_error(body) == "");
  CHECK_THROWS_AS(run(body, {f32({2}, {0, 0})}), Error);
}

TEST_CASE("evaluation checks the types of inputs and weights") {
  std::string body =
      "input %0 \"x\" : f32[2]\nweight %1 \"w\" : f32[2]\n%2 = add(%0, %1) : f32[2]\nreturn %2\n";
  CHECK_THROWS_AS(run(body, {f32({2}, {0, 0})}), Error);
  CHECK_THROWS_AS(run(body, {f32({3}, {0, 0, 0})}), Error);
  ir::Graph graph = ir::parse("rmir 1\n" + body);
  check_close(ops::evaluate(graph, {f32({2}, {1, 2})}, {{"w", f32({2}, {10, 20})}})[0], {11, 22});
}
