// fuse_ewise: what becomes one program, and what must not.
#include "support.hpp"

using namespace rm;
using namespace rm::test;
using passes::fuse_ewise;

static const std::string kS = "sym s0 [2,64]\nsym s1 [2,64]\n";

TEST_CASE("a gated activation is one program") {
  check_rewrite(kS + "input %0 \"g\" : f32[s0,s1]\ninput %1 \"u\" : f32[s0,s1]\n"
                     "%2 = silu(%0) : f32[s0,s1]\n%3 = mul(%2, %1) : f32[s0,s1]\nreturn %3\n",
                {fuse_ewise},
                kS + "input %0 \"g\" : f32[s0,s1]\ninput %1 \"u\" : f32[s0,s1]\n"
                     "%2 = ewise(%0, %1) {code=[16,0,0,-1,-1,42,0,2,1,-1], imm=f[]} : "
                     "f32[s0,s1]\nreturn %2\n");
}

TEST_CASE("functions of a value beside itself read the value") {
  const std::string in = "input %0 \"x\" : f32[1,32]\nliteral %1 : f32[] = 00000040\n";
  check_rewrite(in + "%2 = concat(%0, %0) {axis=1} : f32[1,64]\n%3 = cos(%2) : f32[1,64]\n"
                     "%4 = mul(%3, %1) : f32[1,64]\n%5 = sin(%2) : f32[1,64]\nreturn %4, %5\n",
                {fuse_ewise},
                "input %0 \"x\" : f32[1,32]\n"
                "%1 = reshape(%0) {shape=<1,1,32>} : f32[1,1,32]\n"
                "%2 = expand(%1) {shape=<1,2,32>} : f32[1,2,32]\n"
                "%3 = ewise(%2) {code=[9,0,0,-1,-1,0,0,0,-1,-1,42,0,1,2,-1], imm=f[0x1p+1]} : "
                "f32[1,2,32]\n"
                "%4 = reshape(%3) {shape=<1,64>} : f32[1,64]\n%5 = sin(%2) : f32[1,2,32]\n"
                "%6 = reshape(%5) {shape=<1,64>} : f32[1,64]\nreturn %4, %6\n");
  check_kept("input %0 \"x\" : f32[1,32]\ninput %1 \"y\" : f32[1,32]\n"
             "%2 = concat(%0, %1) {axis=1} : f32[1,64]\n%3 = cos(%2) : f32[1,64]\nreturn %3\n",
             {fuse_ewise});
}

TEST_CASE("constants become immediates and broadcast operands stay operands") {
  check_rewrite(
      kS + "input %0 \"x\" : f32[s0,s1]\ninput %1 \"r\" : f32[s1]\nliteral %2 : f32[] = 00000040\n"
           "%3 = mul(%0, %2) : f32[s0,s1]\n%4 = add(%3, %1) : f32[s0,s1]\n%5 = mul(%4, %4) : "
           "f32[s0,s1]\nreturn %5\n",
      {fuse_ewise},
      kS + "input %0 \"x\" : f32[s0,s1]\ninput %1 \"r\" : f32[s1]\n"
           "%2 = ewise(%0, %1) {code=[0,0,0,-1,-1,42,0,0,2,-1,40,0,3,1,-1,42,0,4,4,-1], "
           "imm=f[0x1p+1]} : f32[s0,s1]\nreturn %2\n");
}

TEST_CASE("masks mix integers, logic and floats in one program") {
  ir::Graph graph = after(kS + "input %0 \"x\" : f32[s0,s1]\ninput %1 \"m\" : i64[s0,s1]\nliteral "
                               "%2 : f32[] = 000080ff\n"
                               "literal %3 : i64[] = 0000000000000000\n"
                               "%4 = gt(%1, %3) : bool[s0,s1]\n%5 = logical_not(%4) : bool[s0,s1]\n"
                               "%6 = where(%5, %2, %0) : f32[s0,s1]\n%7 = cast(%6) : "
                               "f64[s0,s1]\n%8 = exp(%7) : f64[s0,s1]\nreturn %8\n",
                          {fuse_ewise});
  CHECK(graph.nodes.size() == 1);
  ir::Graph before = parse_checked(
      kS +
      "input %0 \"x\" : f32[s0,s1]\ninput %1 \"m\" : i64[s0,s1]\nliteral %2 : f32[] = 000080ff\n"
      "literal %3 : i64[] = 0000000000000000\n"
      "%4 = gt(%1, %3) : bool[s0,s1]\n%5 = logical_not(%4) : bool[s0,s1]\n"
      "%6 = where(%5, %2, %0) : f32[s0,s1]\n%7 = cast(%6) : f64[s0,s1]\n%8 = exp(%7) : "
      "f64[s0,s1]\nreturn %8\n");
  for (const auto& bindings : some_bindings()) check_same_numbers(before, graph, bindings);
}

TEST_CASE("half precision chains compute in f32 inside the program") {
  std::string in = kS + "input %0 \"x\" : bf16[s0,s1]\n";
  check_rewrite(
      in + "%1 = cast(%0) : f32[s0,s1]\n%2 = exp(%1) : f32[s0,s1]\n%3 = cast(%2) : bf16[s0,s1]\n"
           "%4 = neg(%3) : bf16[s0,s1]\nreturn %4\n",
      {fuse_ewise},
      in + "%1 = ewise(%0) {code=[4,0,0,-1,-1,2,0,1,-1,-1], imm=f[]} : bf16[s0,s1]\nreturn %1\n",
      0.02);
}

TEST_CASE("a rounding to half precision that a model of f32 asks for stays") {
  for (const std::string half : {"f16", "bf16"}) {
    check_kept(kS + "input %0 \"x\" : f32[s0,s1]\n%1 = cast(%0) : " + half +
                   "[s0,s1]\n%2 = cast(%1) : f32[s0,s1]\nreturn %2\n",
               {fuse_ewise});
  }
  ir::Graph graph = after(kS + "input %0 \"x\" : f32[s0,s1]\n%1 = exp(%0) : f32[s0,s1]\n"
                               "%2 = cast(%1) : f16[s0,s1]\n%3 = cast(%2) : f32[s0,s1]\n"
                               "%4 = neg(%3) : f32[s0,s1]\nreturn %4\n",
                          {fuse_ewise});
  CHECK(graph.nodes.size() == 2);
}

TEST_CASE("a value with another reader or another shape is not computed twice") {
  check_kept(kS + "input %0 \"x\" : f32[s0,s1]\n%1 = exp(%0) : f32[s0,s1]\n%2 = neg(%1) : "
                  "f32[s0,s1]\nreturn %1, %2\n",
             {fuse_ewise});
  check_kept(kS + "input %0 \"x\" : f32[s0,s1]\ninput %1 \"r\" : f32[s1]\n%2 = exp(%1) : f32[s1]\n"
                  "%3 = add(%0, %2) : f32[s0,s1]\nreturn %3\n",
             {fuse_ewise});
}

TEST_CASE("constant expressions stay outside programs") {
  check_kept(kS + "input %0 \"x\" : f32[4]\nweight %1 \"w\" : f32[4]\n%2 = exp(%1) : f32[4]\n"
                  "%3 = add(%0, %2) : f32[4]\nreturn %3\n",
             {fuse_ewise});
}

TEST_CASE("narrow integers wrap where they are stored, so they are not kept in registers") {
  check_kept(
      "input %0 \"x\" : i64[4]\n%1 = cast(%0) : i8[4]\n%2 = add(%1, %1) : i8[4]\n%3 = cast(%2) : "
      "i64[4]\nreturn %3\n",
      {fuse_ewise});
}

TEST_CASE("a truncating cast and a test for zero keep their meaning inside a program") {
  std::string body =
      kS +
      "input %0 \"x\" : f32[s0,s1]\nliteral %1 : f32[] = 00002041\n"
      "%2 = mul(%0, %1) : f32[s0,s1]\n%3 = cast(%2) : i64[s0,s1]\n%4 = cast(%3) : f32[s0,s1]\n"
      "%5 = cast(%4) : bool[s0,s1]\n%6 = cast(%5) : f32[s0,s1]\n%7 = add(%6, %0) : "
      "f32[s0,s1]\nreturn %7\n";
  ir::Graph graph = after(body, {fuse_ewise});
  CHECK(graph.nodes.size() == 1);
  for (const auto& bindings : some_bindings())
    check_same_numbers(parse_checked(body), graph, bindings, 1e-6);
}

TEST_CASE("programs stay within 8 operands and 32 instructions") {
  std::string body = kS;
  for (int i = 0; i < 12; ++i)
    body += "input %" + std::to_string(i) + " \"x" + std::to_string(i) + "\" : f32[s0,s1]\n";
  body += "%100 = add(%0, %1) : f32[s0,s1]\n";
  for (int i = 2; i < 12; ++i) {
    body += "%" + std::to_string(99 + i) + " = add(%" + std::to_string(98 + i) + ", %" +
            std::to_string(i) + ") : f32[s0,s1]\n";
  }
  for (int i = 0; i < 60; ++i) {
    body += "%" + std::to_string(200 + i) + " = sin(%" + std::to_string(i == 0 ? 110 : 199 + i) +
            ") : f32[s0,s1]\n";
  }
  body += "return %259\n";
  ir::Graph graph = after(body, {fuse_ewise});
  for (const auto& node : graph.nodes) {
    if (node.op != "ewise") continue;
    CHECK(node.operands.size() <= 8);
    CHECK(node.ints("code").size() <= 32 * 5);
  }
  CHECK(graph.nodes.size() <= 5);
  for (const auto& bindings : some_bindings())
    check_same_numbers(parse_checked(body), graph, bindings);
}
