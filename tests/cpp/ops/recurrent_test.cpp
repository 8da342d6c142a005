// The reference of recurrent against steps worked out by hand, and what its inference refuses.
#include "support.hpp"

using namespace rm;
using namespace rm::test;

namespace {
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
}  // namespace

TEST_CASE("an lstm's cell forgets and takes in, and its output is gated") {
  const std::string in =
      "input %0 \"x\" : f32[2,1,4]\ninput %1 \"w\" : f32[4,1]\ninput %2 \"h\" : f32[1,1]\n"
      "input %3 \"c\" : f32[1,1]\ninput %4 \"b\" : f32[4]\n";
  auto x = f32({2, 1, 4}, {0.1, 0.2, 0.3, 0.4, -0.1, -0.2, -0.3, -0.4});
  const double w[] = {0.5, -0.5, 1, 2}, b[] = {0.25, 0, -0.25, 1};
  double h = 0.5, c = -1;
  std::vector<double> want;
  for (int t = 0; t < 2; ++t) {
    double gate[4];
    for (int g = 0; g < 4; ++g) gate[g] = (t ? -0.1 : 0.1) * (g + 1) + w[g] * h + b[g];
    c = sigmoid(gate[1]) * c + sigmoid(gate[0]) * std::tanh(gate[2]);
    h = sigmoid(gate[3]) * std::tanh(c);
    want.push_back(h);
  }
  auto got = run(in +
                     "%5, %6, %7 = recurrent(%0, %1, %2, %3, %4) {cell=\"lstm\"} : f32[2,1,1], f32[1,1], "
                     "f32[1,1]\nreturn %5, %6, %7\n",
                 {x, f32({4, 1}, {w[0], w[1], w[2], w[3]}), f32({1, 1}, {0.5}), f32({1, 1}, {-1}),
                  f32({4}, {b[0], b[1], b[2], b[3]})});
  check_close(got[0], want);
  check_close(got[1], {h});
  check_close(got[2], {c});
}

TEST_CASE("a gru resets the product, a plain layer runs backwards from its last step") {
  const double h = 0.5, r = sigmoid(0.1 + 0.5 * h), z = sigmoid(0.2 - 0.5 * h);
  const double n = std::tanh(0.3 + r * (1 * h + 0.125));
  auto gru = run("input %0 \"x\" : f32[1,1,3]\ninput %1 \"w\" : f32[3,1]\ninput %2 \"h\" : f32[1,1]\n"
                 "input %3 \"b\" : f32[3]\n"
                 "%4, %5 = recurrent(%0, %1, %2, _, %3) {cell=\"gru\"} : f32[1,1,1], f32[1,1]\n"
                 "return %4, %5\n",
                 {f32({1, 1, 3}, {0.1, 0.2, 0.3}), f32({3, 1}, {0.5, -0.5, 1}), f32({1, 1}, {h}),
                  f32({3}, {0, 0, 0.125})});
  check_close(gru[0], {(1 - z) * n + z * h});
  auto plain = run("input %0 \"x\" : f32[1,3,1]\ninput %1 \"w\" : f32[1,1]\ninput %2 \"h\" : f32[1,1]\n"
                   "%3, %4 = recurrent(%0, %1, %2) {batch_first=1, cell=\"relu\", reverse=1} : "
                   "f32[1,3,1], f32[1,1]\nreturn %3, %4\n",
                   {f32({1, 3, 1}, {-9, 1, 2}), f32({1, 1}, {3}), f32({1, 1}, {1})});
  check_close(plain[0], {39, 16, 5});  // 3*1+2, 3*5+1, 3*16-9
  check_close(plain[1], {39});
}

TEST_CASE("a recurrent layer refuses what does not fit") {
  auto error = [](const std::string& cell, const std::string& w, const std::string& operands) {
    return type_error("input %0 \"x\" : f32[5,2,12]\ninput %1 \"w\" : " + w +
                      "\ninput %2 \"h\" : f32[2,3]\ninput %3 \"b\" : f32[7]\n"
                      "%4, %5 = recurrent(" + operands + ") {cell=\"" + cell +
                      "\"} : f32[5,2,3], f32[2,3]\nreturn %4, %5\n");
  };
  CHECK(error("elman", "f32[12,3]", "%0, %1, %2").find("lstm, gru, tanh or relu") != std::string::npos);
  CHECK(error("lstm", "f32[12,3]", "%0, %1, %2").find("cell state") != std::string::npos);
  CHECK(error("gru", "f32[12,3]", "%0, %1, %2, %2").find("cell state") != std::string::npos);
  CHECK(error("gru", "f32[12,3]", "%0, %1, %2").find("equal") != std::string::npos);
  CHECK(error("gru", "f32[13,3]", "%0, %1, %2").find("rows of the weight") != std::string::npos);
  CHECK(error("relu", "f32[12,12]", "%0, %1, %2").find("equal") != std::string::npos);
  CHECK(error("tanh", "bf16[12,12]", "%0, %1, %2").find("all operands") != std::string::npos);
}
