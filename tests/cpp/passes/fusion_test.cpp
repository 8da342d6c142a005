// Fusion passes: golden text and equal numbers, and what must stay apart.
#include "support.hpp"

using namespace rm;
using namespace rm::test;
using namespace rm::passes;

static const std::string kS = "sym s0 [2,64]\nsym s1 [2,64]\n";

static std::string rms_norm_text(const std::string& dtype) {
  bool half = dtype != "f32";
  std::string widen = half ? "%3 = cast(%0) : f32[s0,s1,8]\n" : "";
  std::string x = half ? "%3" : "%0", y = half ? "%9" : "%8";
  return kS + "input %0 \"x\" : " + dtype + "[s0,s1,8]\nweight %1 \"w\" : " + dtype +
         "[8]\n"
         "literal %2 : f32[] = bd378635\n" +
         widen + "%4 = mul(" + x + ", " + x +
         ") : f32[s0,s1,8]\n"
         "%5 = reduce(%4) {axes=[2], keepdim=1, kind=\"mean\"} : f32[s0,s1,1]\n"
         "%6 = add(%5, %2) : f32[s0,s1,1]\n"
         "%7 = rsqrt(%6) : f32[s0,s1,1]\n"
         "%8 = mul(" +
         x + ", %7) : f32[s0,s1,8]\n" + (half ? "%9 = cast(%8) : " + dtype + "[s0,s1,8]\n" : "") +
         "%10 = mul(%1, " + y + ") : " + dtype + "[s0,s1,8]\nreturn %10\n";
}

TEST_CASE("RMS normalisation is recognised in full and in half precision") {
  for (const char* dtype : {"f32", "bf16", "f16"}) {
    CAPTURE(dtype);
    std::string d = dtype;
    check_rewrite(rms_norm_text(d), {fuse_norm},
                  kS + "input %0 \"x\" : " + d + "[s0,s1,8]\nweight %1 \"w\" : " + d +
                      "[8]\n"
                      "%2 = rms_norm(%0, %1) {eps=0x1.0c6f7ap-20} : " +
                      d + "[s0,s1,8]\nreturn %2\n",
                  d == "f32" ? 1e-6 : 0.02);
  }
}

TEST_CASE("a weight counted from one becomes the offset of rms_norm") {
  check_rewrite(
      kS +
          "input %0 \"x\" : bf16[s0,8]\nweight %1 \"w\" : bf16[8]\nliteral %2 : f32[] = 0000803f\n"
          "%3 = cast(%0) : f32[s0,8]\n%4 = mul(%3, %3) : f32[s0,8]\n"
          "%5 = reduce(%4) {axes=[1], keepdim=1, kind=\"mean\"} : f32[s0,1]\n"
          "%6 = add(%5, %2) : f32[s0,1]\n%7 = rsqrt(%6) : f32[s0,1]\n%8 = mul(%3, %7) : f32[s0,8]\n"
          "%9 = cast(%1) : f32[8]\n%10 = add(%9, %2) : f32[8]\n%11 = mul(%8, %10) : f32[s0,8]\n"
          "%12 = cast(%11) : bf16[s0,8]\nreturn %12\n",
      {fuse_norm},
      kS + "input %0 \"x\" : bf16[s0,8]\nweight %1 \"w\" : bf16[8]\n"
           "%2 = rms_norm(%0, %1) {eps=0x1p+0, weight_offset=0x1p+0} : bf16[s0,8]\nreturn %2\n",
      0.02);
}

TEST_CASE("a mean over another axis is no RMS normalisation") {
  ir::Graph graph = after(
      "input %0 \"x\" : f32[8,8]\nliteral %1 : f32[] = 0000803f\n"
      "%2 = mul(%0, %0) : f32[8,8]\n"
      "%3 = reduce(%2) {axes=[0], keepdim=1, kind=\"mean\"} : f32[1,8]\n"
      "%4 = add(%3, %1) : f32[1,8]\n%5 = rsqrt(%4) : f32[1,8]\n"
      "%6 = mul(%0, %5) : f32[8,8]\nreturn %6\n",
      {fuse_norm});
  CHECK(count(graph, "rms_norm") == 0);
}

TEST_CASE("GELU by tanh and by erf, and SiLU, are recognised from their formulas") {
  std::string constants =
      "literal %1 : f32[] = 0000003f\nliteral %2 : f32[] = 00004040\n"
      "literal %3 : f32[] = 1327373d\nliteral %4 : f32[] = 2a424c3f\n"
      "literal %5 : f32[] = 0000803f\nliteral %6 : f32[] = f304b53f\n";
  check_rewrite(
      kS + "input %0 \"x\" : f32[s0,s1]\n" + constants +
          "%7 = mul(%0, %1) : f32[s0,s1]\n%8 = pow(%0, %2) : f32[s0,s1]\n"
          "%9 = mul(%8, %3) : f32[s0,s1]\n%10 = add(%0, %9) : f32[s0,s1]\n"
          "%11 = mul(%10, %4) : f32[s0,s1]\n%12 = tanh(%11) : f32[s0,s1]\n"
          "%13 = add(%12, %5) : f32[s0,s1]\n%14 = mul(%7, %13) : f32[s0,s1]\nreturn %14\n",
      {fuse_activation},
      kS + "input %0 \"x\" : f32[s0,s1]\n%1 = gelu_tanh(%0) : f32[s0,s1]\nreturn %1\n");
  check_rewrite(kS + "input %0 \"x\" : f32[s0,s1]\n" + constants +
                    "%7 = div(%0, %6) : f32[s0,s1]\n%8 = erf(%7) : f32[s0,s1]\n"
                    "%9 = add(%8, %5) : f32[s0,s1]\n%10 = mul(%0, %9) : f32[s0,s1]\n"
                    "%11 = mul(%10, %1) : f32[s0,s1]\nreturn %11\n",
                {fuse_activation},
                kS + "input %0 \"x\" : f32[s0,s1]\n%1 = gelu(%0) : f32[s0,s1]\nreturn %1\n");
  check_rewrite(kS + "input %0 \"x\" : f32[s0,s1]\n%1 = sigmoid(%0) : f32[s0,s1]\n"
                     "%2 = mul(%1, %0) : f32[s0,s1]\nreturn %2\n",
                {fuse_activation},
                kS + "input %0 \"x\" : f32[s0,s1]\n%1 = silu(%0) : f32[s0,s1]\nreturn %1\n");
  check_kept(kS + "input %0 \"x\" : f32[s0,s1]\ninput %1 \"y\" : f32[s0,s1]\n%2 = sigmoid(%0) : "
                  "f32[s0,s1]\n"
                  "%3 = mul(%1, %2) : f32[s0,s1]\nreturn %3\n",
             {fuse_activation});
}

static std::string rope_text(const char* first, const char* second) {
  return kS +
         "input %0 \"x\" : f32[s0,4,s1,8]\ninput %1 \"cos\" : f32[s0,1,s1,8]\ninput %2 \"sin\" : "
         "f32[s0,1,s1,8]\n"
         "%3 = mul(%0, %1) : f32[s0,4,s1,8]\n"
         "%4 = slice(%0) {axis=3, start=<0>, step=1, stop=<4>} : f32[s0,4,s1,4]\n"
         "%5 = slice(%0) {axis=3, start=<4>, step=1, stop=<8>} : f32[s0,4,s1,4]\n"
         "%6 = neg(" +
         std::string(first) +
         ") : f32[s0,4,s1,4]\n"
         "%7 = concat(%6, " +
         std::string(second) +
         ") {axis=3} : f32[s0,4,s1,8]\n"
         "%8 = mul(%7, %2) : f32[s0,4,s1,8]\n%9 = add(%3, %8) : f32[s0,4,s1,8]\nreturn %9\n";
}

TEST_CASE("the rotary embedding is recognised and its mirror image is not") {
  check_rewrite(rope_text("%5", "%4"), {fuse_rope},
                kS + "input %0 \"x\" : f32[s0,4,s1,8]\ninput %1 \"cos\" : f32[s0,1,s1,8]\ninput %2 "
                     "\"sin\" : f32[s0,1,s1,8]\n"
                     "%3 = rope(%0, %1, %2) {interleaved=0} : f32[s0,4,s1,8]\nreturn %3\n");
  CHECK(count(after(rope_text("%4", "%5"), {fuse_rope}), "rope") == 0);
}

TEST_CASE("a matrix product of one term an element is a multiplication, which fusion takes along") {
  const std::string inputs = kS + "input %0 \"x\" : i64[s0,1,s1]\nweight %1 \"w\" : f32[1,8,1]\n";
  const std::string body = inputs +
                           "%2 = cast(%0) : f32[s0,1,s1]\n%3 = matmul(%1, %2) : f32[s0,8,s1]\n"
                           "%4 = cos(%3) : f32[s0,8,s1]\nreturn %4\n";
  check_rewrite(body, {fuse_gemm},
                inputs +
                    "%2 = cast(%0) : f32[s0,1,s1]\n%3 = mul(%1, %2) : f32[s0,8,s1]\n"
                    "%4 = cos(%3) : f32[s0,8,s1]\nreturn %4\n",
                0);
  ir::Graph fused = after(body, {fuse_gemm, fuse_ewise});
  CHECK(count(fused, "matmul") + count(fused, "mul") + count(fused, "cos") == 0);
  CHECK(count(fused, "ewise") == 1);
  check_kept(kS +
                 "input %0 \"x\" : f32[s0,4,2]\ninput %1 \"y\" : f32[s0,2,4]\n"
                 "%2 = matmul(%0, %1) : f32[s0,4,4]\nreturn %2\n",
             {fuse_gemm});
}

TEST_CASE("attention written out is sdpa, with its scale and additive mask") {
  check_rewrite(
      kS + "input %0 \"q\" : f32[s0,4,s1,8]\ninput %1 \"k\" : f32[s0,4,s1+1,8]\ninput %2 \"v\" : "
           "f32[s0,4,s1+1,6]\n"
           "input %3 \"m\" : f32[s0,1,1,s1+1]\nliteral %4 : f32[] = 0000803e\n"
           "%5 = permute(%1) {axes=[0,1,3,2]} : f32[s0,4,8,s1+1]\n"
           "%6 = matmul(%0, %5) : f32[s0,4,s1,s1+1]\n%7 = mul(%6, %4) : f32[s0,4,s1,s1+1]\n"
           "%8 = add(%7, %3) : f32[s0,4,s1,s1+1]\n"
           "%9 = softmax(%8) {axis=3, log=0} : f32[s0,4,s1,s1+1]\n"
           "%10 = matmul(%9, %2) : f32[s0,4,s1,6]\nreturn %10\n",
      {fuse_sdpa},
      kS + "input %0 \"q\" : f32[s0,4,s1,8]\ninput %1 \"k\" : f32[s0,4,s1+1,8]\ninput %2 \"v\" : "
           "f32[s0,4,s1+1,6]\n"
           "input %3 \"m\" : f32[s0,1,1,s1+1]\n"
           "%4 = sdpa(%0, %1, %2, %3) {is_causal=0, scale=0x1p-2} : f32[s0,4,s1,6]\nreturn %4\n");
}

TEST_CASE("attention is recognised when the key's transposition is part of another permute") {
  check_rewrite(
      kS + "input %0 \"q\" : f32[s0,4,s1,8]\ninput %1 \"k\" : f32[s0,s1,4,8]\ninput %2 \"v\" : "
           "f32[s0,4,s1,8]\n"
           "%3 = permute(%1) {axes=[0,2,3,1]} : f32[s0,4,8,s1]\n"
           "%4 = matmul(%0, %3) : f32[s0,4,s1,s1]\n"
           "%5 = softmax(%4) {axis=3, log=0} : f32[s0,4,s1,s1]\n"
           "%6 = matmul(%5, %2) : f32[s0,4,s1,8]\nreturn %6\n",
      {fuse_sdpa},
      kS + "input %0 \"q\" : f32[s0,4,s1,8]\ninput %1 \"k\" : f32[s0,s1,4,8]\ninput %2 \"v\" : "
           "f32[s0,4,s1,8]\n"
           "%3 = permute(%1) {axes=[0,2,1,3]} : f32[s0,4,s1,8]\n"
           "%4 = sdpa(%0, %3, %2, _) {is_causal=0, scale=0x1p+0} : f32[s0,4,s1,8]\nreturn %4\n");
}

TEST_CASE("repeated key and value heads become grouped queries") {
  std::string in = kS +
                   "input %0 \"q\" : f32[s0,6,s1,8]\ninput %1 \"k\" : f32[s0,2,s1,8]\ninput %2 "
                   "\"v\" : f32[s0,2,s1,8]\n";
  auto repeat = [](const char* from, int at) {
    std::string a = std::to_string(at), b = std::to_string(at + 1), c = std::to_string(at + 2);
    return "%" + a + " = reshape(" + from + ") {shape=<s0,2,1,s1,8>} : f32[s0,2,1,s1,8]\n%" + b +
           " = expand(%" + a + ") {shape=<s0,2,3,s1,8>} : f32[s0,2,3,s1,8]\n%" + c +
           " = reshape(%" + b + ") {shape=<s0,6,s1,8>} : f32[s0,6,s1,8]\n";
  };
  check_rewrite(
      in + repeat("%1", 3) + repeat("%2", 6) +
          "%9 = sdpa(%0, %5, %8) {is_causal=1, scale=0x1p-1} : f32[s0,6,s1,8]\nreturn %9\n",
      {fuse_sdpa},
      in + "%3 = sdpa(%0, %1, %2, _) {is_causal=1, scale=0x1p-1} : f32[s0,6,s1,8]\nreturn %3\n");
}

TEST_CASE("a mask of positions in order is is_causal, an open one is none") {
  std::string in = kS + "input %0 \"q\" : f32[s0,2,s1,8]\n";
  check_rewrite(
      in + "%1 = iota() {start=<0>, step=1} : i64[s1]\n"
           "%2 = reshape(%1) {shape=<1,1,s1,1>} : i64[1,1,s1,1]\n%3 = reshape(%1) "
           "{shape=<1,1,1,s1>} : i64[1,1,1,s1]\n"
           "%4 = le(%3, %2) : bool[1,1,s1,s1]\n%5 = full() {value=1} : bool[1,1,1,s1]\n"
           "%6 = sdpa(%0, %0, %0, %4) {is_causal=0, scale=0x1p-1} : f32[s0,2,s1,8]\n"
           "%7 = sdpa(%6, %0, %0, %5) {is_causal=0, scale=0x1p-1} : f32[s0,2,s1,8]\nreturn %7\n",
      {fuse_sdpa},
      in + "%1 = sdpa(%0, %0, %0, _) {is_causal=1, scale=0x1p-1} : f32[s0,2,s1,8]\n"
           "%2 = sdpa(%1, %0, %0, _) {is_causal=0, scale=0x1p-1} : f32[s0,2,s1,8]\nreturn %2\n");
  // "<" hides the diagonal too.
  check_kept(
      in +
          "%1 = iota() {start=<0>, step=1} : i64[s1]\n%2 = reshape(%1) {shape=<1,1,s1,1>} : "
          "i64[1,1,s1,1]\n"
          "%3 = reshape(%1) {shape=<1,1,1,s1>} : i64[1,1,1,s1]\n%4 = lt(%3, %2) : bool[1,1,s1,s1]\n"
          "%5 = sdpa(%0, %0, %0, %4) {is_causal=0, scale=0x1p-1} : f32[s0,2,s1,8]\nreturn %5\n",
      {fuse_sdpa});
}

TEST_CASE("linears of one operand merge, missing biases become zeros") {
  check_rewrite(
      kS + "input %0 \"x\" : f32[s0,s1,4]\nweight %1 \"q\" : f32[6,4]\nweight %2 \"k\" : "
           "f32[2,4]\nweight %3 \"qb\" : f32[6]\n"
           "%4 = linear(%0, %1, %3) : f32[s0,s1,6]\n%5 = exp(%4) : f32[s0,s1,6]\n"
           "%6 = linear(%0, %2) : f32[s0,s1,2]\nreturn %5, %6\n",
      {merge_linear},
      kS +
          "input %0 \"x\" : f32[s0,s1,4]\nweight %1 \"q\" : f32[6,4]\nweight %2 \"k\" : "
          "f32[2,4]\nweight %3 \"qb\" : f32[6]\n"
          "%4 = concat(%1, %2) {axis=0} : f32[8,4]\n%5 = full() {value=0x0p+0} : f32[2]\n"
          "%6 = concat(%3, %5) {axis=0} : f32[8]\n%7 = linear(%0, %4, %6) : f32[s0,s1,8]\n"
          "%8 = slice(%7) {axis=2, start=<0>, step=1, stop=<6>} : f32[s0,s1,6]\n%9 = exp(%8) : "
          "f32[s0,s1,6]\n"
          "%10 = slice(%7) {axis=2, start=<6>, step=1, stop=<8>} : f32[s0,s1,2]\nreturn %9, %10\n");
}

static void part(ir::Graph& graph, const PassContext&) { part_products(graph); }

static const std::string kMerged =
    kS + "input %0 \"x\" : f32[s0,s1,4]\nweight %1 \"q\" : f32[6,4]\nweight %2 \"k\" : f32[2,4]\n"
         "weight %3 \"qb\" : f32[6]\n%4 = concat(%1, %2) {axis=0} : f32[8,4]\n%5 = full() {value=0x0p+0} : f32[2]\n"
         "%6 = concat(%3, %5) {axis=0} : f32[8]\n"
         "%7 = gemm(%0, %4, %6, _) {activation=\"none\", trans_b=1} : f32[s0,s1,8]\n"
         "%8 = slice(%7) {axis=2, start=<0>, step=1, stop=<6>} : f32[s0,s1,6]\n%9 = exp(%8) : f32[s0,s1,6]\n";

TEST_CASE("a product of merged weights is one a weight where its pieces alone are read") {
  check_rewrite(
      kMerged + "%10 = slice(%7) {axis=2, start=<6>, step=1, stop=<8>} : f32[s0,s1,2]\nreturn %9, %10\n", {part},
      kS + "input %0 \"x\" : f32[s0,s1,4]\nweight %1 \"q\" : f32[6,4]\nweight %2 \"qb\" : f32[6]\n"
           "weight %3 \"k\" : f32[2,4]\n%4 = full() {value=0x0p+0} : f32[2]\n"
           "%5 = gemm(%0, %1, %2, _) {activation=\"none\", trans_b=1} : f32[s0,s1,6]\n%6 = exp(%5) : f32[s0,s1,6]\n"
           "%7 = gemm(%0, %3, %4, _) {activation=\"none\", trans_b=1} : f32[s0,s1,2]\nreturn %6, %7\n");
}

TEST_CASE("a product of merged weights stays whole where something else of it is read") {
  for (const char* rest : {"%10 = slice(%7) {axis=2, start=<5>, step=1, stop=<8>} : f32[s0,s1,3]\nreturn %9, %10\n",
                           "%10 = slice(%7) {axis=2, start=<0>, step=2, stop=<6>} : f32[s0,s1,3]\nreturn %9, %10\n",
                           "%10 = exp(%7) : f32[s0,s1,8]\nreturn %9, %10\n", "return %9, %7\n"}) {
    CAPTURE(rest);
    check_kept(kMerged + rest, {part});
  }
}

TEST_CASE("a linear with an activation of its own keeps it as epilogue, a gated one merges") {
  std::string in =
      "input %0 \"x\" : f32[3,4]\nweight %1 \"a\" : f32[5,4]\nweight %2 \"b\" : f32[5,4]\n"
      "%3 = linear(%0, %1) : f32[3,5]\n%4 = linear(%0, %2) : f32[3,5]\n%5 = gelu(%3) : f32[3,5]\n";
  check_kept(in + "return %5, %4\n", {merge_linear});
  ir::Graph gated = after(in + "%6 = mul(%5, %4) : f32[3,5]\nreturn %6\n", {merge_linear});
  CHECK(count(gated, "linear") == 1);
}

TEST_CASE("linears with computed weights stay apart") {
  check_kept(
      "input %0 \"x\" : f32[3,4]\ninput %1 \"a\" : f32[5,4]\ninput %2 \"b\" : f32[5,4]\n"
      "%3 = linear(%0, %1) : f32[3,5]\n%4 = linear(%0, %2) : f32[3,5]\nreturn %3, %4\n",
      {merge_linear});
}

TEST_CASE("gemm takes bias, activation and residual in that order") {
  check_rewrite(
      kS + "input %0 \"x\" : f32[s0,s1,4]\ninput %1 \"r\" : f32[s0,s1,6]\nweight %2 \"w\" : "
           "f32[6,4]\nweight %3 \"b\" : f32[6]\n"
           "%4 = linear(%0, %2) : f32[s0,s1,6]\n%5 = add(%3, %4) : f32[s0,s1,6]\n"
           "%6 = gelu(%5) : f32[s0,s1,6]\n%7 = add(%1, %6) : f32[s0,s1,6]\nreturn %7\n",
      {fuse_gemm},
      kS +
          "input %0 \"x\" : f32[s0,s1,4]\ninput %1 \"r\" : f32[s0,s1,6]\nweight %2 \"w\" : "
          "f32[6,4]\nweight %3 \"b\" : f32[6]\n"
          "%4 = gemm(%0, %2, %3, %1) {activation=\"gelu\", trans_b=1} : f32[s0,s1,6]\nreturn %4\n");
}

TEST_CASE("an activation after a residual is not pulled into the gemm") {
  check_rewrite(
      "input %0 \"x\" : f32[3,4]\ninput %1 \"r\" : f32[3,6]\nweight %2 \"w\" : f32[4,6]\n"
      "%3 = matmul(%0, %2) : f32[3,6]\n%4 = add(%3, %1) : f32[3,6]\n%5 = relu(%4) : "
      "f32[3,6]\nreturn %5\n",
      {fuse_gemm},
      "input %0 \"x\" : f32[3,4]\ninput %1 \"r\" : f32[3,6]\nweight %2 \"w\" : f32[4,6]\n"
      "%3 = gemm(%0, %2, _, %1) {activation=\"none\", trans_b=0} : f32[3,6]\n"
      "%4 = relu(%3) : f32[3,6]\nreturn %4\n");
}

TEST_CASE("a product with a second reader keeps its epilogue outside") {
  check_rewrite(
      "input %0 \"x\" : f32[3,4]\nweight %1 \"w\" : f32[6,4]\n"
      "%2 = linear(%0, %1) : f32[3,6]\n%3 = relu(%2) : f32[3,6]\n%4 = add(%2, %3) : "
      "f32[3,6]\nreturn %4, %2\n",
      {fuse_gemm},
      "input %0 \"x\" : f32[3,4]\nweight %1 \"w\" : f32[6,4]\n"
      "%2 = gemm(%0, %1, _, _) {activation=\"none\", trans_b=1} : f32[3,6]\n%3 = relu(%2) : "
      "f32[3,6]\n"
      "%4 = add(%2, %3) : f32[3,6]\nreturn %4, %2\n");
}

TEST_CASE("a residual that broadcasts stays an addition") {
  ir::Graph graph =
      after(kS + "input %0 \"x\" : f32[s0,s1,4]\ninput %1 \"r\" : f32[1,s1,6]\nweight %2 \"w\" : "
                 "f32[6,4]\n"
                 "%3 = linear(%0, %2) : f32[s0,s1,6]\n%4 = add(%3, %1) : f32[s0,s1,6]\nreturn %4\n",
            {fuse_gemm});
  CHECK(count(graph, "add") == 1);
}

TEST_CASE("a matrix product between flattening reshapes keeps the leading dims") {
  check_rewrite(
      kS + "input %0 \"x\" : f32[s0,s1,4]\nweight %1 \"w\" : f32[4,6]\nweight %2 \"b\" : f32[6]\n"
           "%3 = reshape(%0) {shape=<s0*s1,4>} : f32[s0*s1,4]\n%4 = matmul(%3, %1) : f32[s0*s1,6]\n"
           "%5 = add(%4, %2) : f32[s0*s1,6]\n%6 = reshape(%5) {shape=<s0,s1,6>} : f32[s0,s1,6]\n"
           "%7 = tanh(%6) : f32[s0,s1,6]\nreturn %7\n",
      {fuse_gemm},
      kS + "input %0 \"x\" : f32[s0,s1,4]\nweight %1 \"w\" : f32[4,6]\nweight %2 \"b\" : f32[6]\n"
           "%3 = gemm(%0, %1, %2, _) {activation=\"tanh\", trans_b=0} : f32[s0,s1,6]\nreturn %3\n");
}

TEST_CASE("a norm takes the addition before it and gives the sum to its other readers") {
  std::string in = kS +
                   "input %0 \"x\" : f32[s0,s1,8]\ninput %1 \"r\" : f32[s0,s1,8]\nweight %2 \"w\" "
                   ": f32[8]\nweight %3 \"b\" : f32[8]\n";
  check_rewrite(
      in + "%4 = add(%0, %1) : f32[s0,s1,8]\n%5 = layer_norm(%4, %2, %3) {eps=0x1p-10} : "
           "f32[s0,s1,8]\n"
           "%6 = exp(%4) : f32[s0,s1,8]\nreturn %5, %6\n",
      {fuse_residual_norm},
      in + "%4, %5 = layer_norm(%0, %2, %3, %1) {eps=0x1p-10} : f32[s0,s1,8], f32[s0,s1,8]\n"
           "%6 = exp(%5) : f32[s0,s1,8]\nreturn %4, %6\n");
  std::string bare = kS + "input %0 \"x\" : f32[s0,8]\ninput %1 \"r\" : f32[s0,8]\n";
  check_rewrite(bare +
                    "%2 = add(%0, %1) : f32[s0,8]\n%3 = rms_norm(%2, _) {eps=0x1p-10} : "
                    "f32[s0,8]\nreturn %3\n",
                {fuse_residual_norm},
                bare + "%2 = rms_norm(%0, _, %1) {eps=0x1p-10} : f32[s0,8]\nreturn %2\n");
  // A reader of the sum above the norm would read it too early.
  check_kept(bare +
                 "%2 = add(%0, %1) : f32[s0,8]\n%3 = exp(%2) : f32[s0,8]\n"
                 "%4 = rms_norm(%2, _) {eps=0x1p-10} : f32[s0,8]\nreturn %3, %4\n",
             {fuse_residual_norm});
}

TEST_CASE("a convolution takes batch norm, bias, residual and activation") {
  const std::string head =
      kS + "input %0 \"x\" : f32[s0,3,4,4]\ninput %1 \"r\" : f32[s0,5,4,4]\nweight %2 \"scale\" : "
           "f32[5]\nweight %3 \"w\" : f32[5,3,3,3]\nweight %4 \"shift\" : f32[5]\n";
  const std::string conv = "dilation=[1,1], groups=1, padding=[1,1,1,1], stride=[1,1]";
  check_rewrite(head + "%5 = conv(%0, %3) {" + conv +
                    "} : f32[s0,5,4,4]\n%6 = reshape(%2) {shape=<5,1,1>} : f32[5,1,1]\n"
                    "%7 = mul(%5, %6) : f32[s0,5,4,4]\n%8 = reshape(%4) {shape=<5,1,1>} : f32[5,1,1]\n"
                    "%9 = add(%7, %8) : f32[s0,5,4,4]\n%10 = add(%9, %1) : f32[s0,5,4,4]\n"
                    "%11 = relu(%10) : f32[s0,5,4,4]\nreturn %11\n",
                {fuse_conv, canonicalise},
                head +
                    "%5 = reshape(%2) {shape=<5,1,1,1>} : f32[5,1,1,1]\n"
                    "%6 = mul(%3, %5) : f32[5,3,3,3]\n"
                    "%7 = conv(%0, %6, %4, %1) {activation=\"relu\", " + conv +
                    "} : f32[s0,5,4,4]\nreturn %7\n");
}

TEST_CASE("hardswish written out is the activation of its convolution") {
  const std::string head = "input %0 \"x\" : f32[2,3,4,4]\nweight %1 \"w\" : f32[5,3,1,1]\n";
  check_rewrite(head +
                    "literal %2 : f32[] = 00004040\nliteral %3 : f32[] = 00000000\n"
                    "literal %4 : f32[] = 0000c040\nliteral %5 : f32[] = abaa2a3e\n"
                    "%6 = conv(%0, %1) : f32[2,5,4,4]\n%7 = add(%6, %2) : f32[2,5,4,4]\n"
                    "%8 = maximum(%7, %3) : f32[2,5,4,4]\n%9 = minimum(%8, %4) : f32[2,5,4,4]\n"
                    "%10 = mul(%6, %9) : f32[2,5,4,4]\n%11 = mul(%10, %5) : f32[2,5,4,4]\n"
                    "return %11\n",
                {fuse_conv},
                head + "%2 = conv(%0, %1) {activation=\"hardswish\"} : f32[2,5,4,4]\nreturn %2\n");
}

TEST_CASE("what differs by place, or is read twice, stays outside of a convolution") {
  for (const char* shape : {"f32[4,4]", "f32[2,1,1,1]", "f32[4]"}) {
    CAPTURE(std::string(shape));
    const std::string text =
        std::string("input %0 \"x\" : f32[2,3,4,4]\nweight %1 \"w\" : f32[5,3,1,1]\nweight %2 \"s\" : ") +
        shape + "\n%3 = conv(%0, %1) : f32[2,5,4,4]\n%4 = mul(%3, %2) : f32[2,5,4,4]\nreturn %4\n";
    check_rewrite(text, {fuse_conv}, text);
  }
  const std::string twice =
      "input %0 \"x\" : f32[2,3,4,4]\nweight %1 \"w\" : f32[5,3,1,1]\n%2 = conv(%0, %1) : "
      "f32[2,5,4,4]\n%3 = relu(%2) : f32[2,5,4,4]\n%4 = mul(%2, %3) : f32[2,5,4,4]\nreturn %4\n";
  check_rewrite(twice, {fuse_conv}, twice);
}
