// Type inference: symbolic dims, broadcasting, and what is refused.
#include "ops/infer.hpp"

#include <algorithm>

#include "support.hpp"

using namespace rm;
using namespace rm::test;

TEST_CASE("every operator of the table is found by its name and names itself") {
  CHECK(ops::all().size() > 60);
  for (const ops::OpDef* def : ops::all()) {
    CAPTURE(def->name);
    CHECK(ops::find(def->name) == def);
    CHECK((def->infer != nullptr));
    CHECK((def->cost != nullptr));
    CHECK((def->reference != nullptr));
  }
  CHECK(ops::find("aten.conv2d.default") == ops::find("aten"));
  CHECK(ops::find("convolve") == nullptr);
  CHECK_THROWS_AS(ops::get("convolve"), Error);
}

TEST_CASE("dims are different only when the difference is a non-zero integer") {
  ir::Dim s = ir::Dim::symbol("s0"), t = ir::Dim::symbol("s1");
  CHECK(ops::compare(s + 1, s + 1) == ops::DimOrder::kEqual);
  CHECK(ops::compare(s + 1, s) == ops::DimOrder::kDifferent);
  CHECK(ops::compare(s, t) == ops::DimOrder::kUnknown);
  CHECK(ops::compare(3, 4) == ops::DimOrder::kDifferent);
}

TEST_CASE("symbolic shapes are inferred through a layer") {
  CHECK(type_error("sym s0 [1,64]\nsym s1 [1,512]\n"
                   "input %0 \"ids\" : i64[s0,s1]\n"
                   "weight %1 \"table\" : f32[100,64]\n"
                   "weight %2 \"w\" : f32[192,64]\n"
                   "weight %3 \"b\" : f32[192]\n"
                   "%4 = embedding(%1, %0) : f32[s0,s1,64]\n"
                   "%5 = layer_norm(%4, _, _) {eps=0x1p-10} : f32[s0,s1,64]\n"
                   "%6 = linear(%5, %2, %3) : f32[s0,s1,192]\n"
                   "%7 = slice(%6) {axis=2, start=<0>, step=1, stop=<64>} : f32[s0,s1,64]\n"
                   "%8 = reshape(%7) {shape=<s0,s1,4,16>} : f32[s0,s1,4,16]\n"
                   "%9 = permute(%8) {axes=[0,2,1,3]} : f32[s0,4,s1,16]\n"
                   "%10 = sdpa(%9, %9, %9, _) {is_causal=1, scale=0x1p-2} : f32[s0,4,s1,16]\n"
                   "%11 = concat(%10, %9) {axis=2} : f32[s0,4,2*s1,16]\n"
                   "%12 = reduce(%11) {axes=[2], keepdim=0, kind=\"mean\"} : f32[s0,4,16]\n"
                   "return %12\n") == "");
}

TEST_CASE("a written type that contradicts the operator is refused with both types") {
  std::string message =
      type_error("input %0 \"x\" : f32[2,3]\n%1 = relu(%0) : f32[3,2]\nreturn %1\n");
  CHECK(message.find("[relu]") != std::string::npos);
  CHECK(message.find("f32[2,3]") != std::string::npos);
  CHECK(message.find("f32[3,2]") != std::string::npos);
}

TEST_CASE("ill-typed nodes are refused") {
  auto refused = [](const std::string& body, const char* word) {
    std::string message = type_error(body + "return %9\n");
    CAPTURE(body);
    CAPTURE(message);
    CHECK(message.find("expected") != std::string::npos);
    CHECK(message.find(word) != std::string::npos);
  };
  std::string x =
      "sym s0 [1,9]\ninput %0 \"x\" : f32[2,3]\ninput %1 \"y\" : i64[2,3]\n"
      "input %2 \"z\" : f32[2,4]\n";
  refused(x + "%9 = add(%0, %1) : f32[2,3]\n", "cast");
  refused(x + "%9 = add(%0, %2) : f32[2,3]\n", "broadcast");
  refused(x + "%9 = exp(%1) : i64[2,3]\n", "floating");
  refused(x + "%9 = add(%0) : f32[2,3]\n", "operands");
  refused(x + "%9 = add(%0, _) : f32[2,3]\n", "present");
  refused(x + "%9 = matmul(%0, %2) : f32[2,4]\n", "inner sizes");
  refused(x + "%9 = reshape(%0) {shape=<7>} : f32[7]\n", "elements");
  refused(x + "%9 = reshape(%0) {shape=<s0,6,0>} : f32[s0,6,0]\n", "elements");
  refused(x + "%9 = permute(%0) {axes=[0,0]} : f32[2,2]\n", "permutation");
  refused(x + "%9 = slice(%0) {axis=1, start=<2>, stop=<5>} : f32[2,3]\n", "stop");
  refused(x + "%9 = slice(%0) {axis=2, start=<0>, stop=<1>} : f32[2,3]\n", "axis");
  refused(x + "%9 = expand(%0) {shape=<4,3>} : f32[4,3]\n", "broadcasts");
  refused(x + "%9 = reduce(%0) {axes=[0], keepdim=1, kind=\"median\"} : f32[1,3]\n", "kind");
  refused(x + "%9 = gemm(%0, %2) {activation=\"swish\", trans_b=0} : f32[2,4]\n", "activation");
  refused("input %0 \"x\" : f32[4,3]\nweight %1 \"w\" : f32[2,5,6]\ninput %2 \"e\" : i32[2]\n"
          "%9 = grouped_gemm(%0, %1, %2) : f32[4,6]\n", "inner sizes");
  refused("input %0 \"x\" : f32[4,3]\nweight %1 \"w\" : f32[2,3,6]\ninput %2 \"e\" : i32[3]\n"
          "%9 = grouped_gemm(%0, %1, %2) : f32[4,6]\n", "offsets and matrices");
  refused("input %0 \"x\" : f32[4,3]\nweight %1 \"w\" : f32[2,3,6]\ninput %2 \"e\" : f32[2]\n"
          "%9 = grouped_gemm(%0, %1, %2) : f32[4,6]\n", "i64 or i32 offsets");
  refused(x + "%9 = embedding(%0, %2) : f32[2,4,3]\n", "indices");
  refused(x + "%9 = bitcast(%0) : i64[2,3]\n", "bytes");
  refused("input %0 \"x\" : u64[3]\n%9 = maximum(%0, %0) : u64[3]\n", "u64");
  refused("input %0 \"x\" : u64[3]\n%9 = sort(%0) {axis=0} : u64[3]\n", "u64");
  refused(x + "%9 = ewise(%0) {code=[40,0,0,7,-1], imm=f[]} : f32[2,3]\n", "register");
}

TEST_CASE("costs count multiply-adds and traffic") {
  ir::Graph graph = ir::parse(
      "rmir 1\ninput %0 \"x\" : f32[2,3,4]\nweight %1 \"w\" : f32[5,4]\n"
      "%2 = linear(%0, %1) : f32[2,3,5]\n%3 = reshape(%2) {shape=<6,5>} : f32[6,5]\nreturn %3\n");
  ops::Cost linear = ops::cost(graph, graph.nodes[0]);
  CHECK(linear.flops == 2.0 * 6 * 5 * 4);
  CHECK(linear.bytes == 4.0 * (24 + 20 + 30));
  CHECK(ops::cost(graph, graph.nodes[1]).bytes == 0);
}

TEST_CASE("a grouped product reads the matrices of as many groups as can have rows") {
  const ir::Graph graph = ir::parse(
      "rmir 1\ninput %0 \"x\" : f32[3,4]\nweight %1 \"w\" : f32[8,4,5]\ninput %2 \"e\" : i32[8]\n"
      "%3 = grouped_gemm(%0, %1, %2) : f32[3,5]\nreturn %3\n");
  const ops::Cost cost = ops::cost(graph, graph.nodes[0]);
  CHECK(cost.flops == 2.0 * 3 * 4 * 5);
  CHECK(cost.bytes == 4.0 * (3 * 4 + 3 * 5 + 3 * 4 * 5));
}

TEST_CASE("an index that is longer than what it points into is refused where it can be known") {
  auto message = [](const char* x, const char* index, const char* op) {
    const std::string from = std::string(x), at = std::string(index);
    std::string body = "sym s0 [1,64]\ninput %0 \"x\" : f32[" + from + "]\ninput %1 \"i\" : i64[" +
                       at + "]\ninput %2 \"s\" : f32[" + at + "]\n";
    if (std::string(op) == "gather") {
      body += "%3 = gather(%0, %1) {axis=1} : f32[" + at + "]\nreturn %3\n";
    } else {
      body += "%3 = scatter(%0, %1, %2) {axis=1, kind=\"set\"} : f32[" + from + "]\nreturn %3\n";
    }
    return type_error(body);
  };
  for (const char* op : {"gather", "scatter"}) {
    CAPTURE(op);
    CHECK(message("2,3", "3,3", op).find("at most 2 along axis 0") != std::string::npos);
    CHECK(message("s0,3", "s0+1,3", op).find("at most s0 along axis 0") != std::string::npos);
    CHECK(message("2,3", "2,9", op) == "");  // along the axis it may be longer
    CHECK(message("2,3", "1,2", op) == "");
    CHECK(message("s0,3", "2,3", op) == "");  // known once s0 is
  }
}

TEST_CASE("the record of an operator says what it does besides computing its results") {
  auto effects = [](const char* op, ir::Attrs attrs) {
    return ops::effects({op, {}, {}, std::move(attrs)});
  };
  CHECK(effects("add", {}) == ops::Effects::kNone);
  CHECK(effects("aten.rand.default", {}) == ops::Effects::kRandom);
  CHECK(effects("aten.tril.default", {{"pure", int64_t{1}}}) == ops::Effects::kNone);
  CHECK(effects("aten.tril.default", {{"pure", int64_t{0}}}) == ops::Effects::kRandom);
  CHECK(effects("no.such", {{"pure", int64_t{1}}}) == ops::Effects::kIo);
  for (const ops::OpDef* def : ops::all()) {
    CAPTURE(def->name);
    CHECK(def->updates < std::max(def->min_operands, 1));
  }
}

TEST_CASE("constants are weights, literals and what pure nodes make of them") {
  const ir::Graph graph = ir::parse(
      "rmir 1\ninput %0 \"x\" : f32[2]\nweight %1 \"w\" : f32[2]\n%2 = exp(%1) : f32[2]\n"
      "%3 = aten.rand_like.default(%2) : f32[2]\n%4 = add(%2, %3) : f32[2]\n"
      "%5 = aten.flip.default(%2) {pure=1} : f32[2]\n%6 = add(%5, %0) : f32[2]\n"
      "%7 = full() {value=1} : f32[2]\nreturn %4, %6, %7\n");
  CHECK(ops::constant_values(graph) == std::vector<char>{0, 1, 1, 0, 0, 1, 0, 1});
}
