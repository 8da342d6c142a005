// Dims, text form and verifier of src/ir.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>

#include "base/error.hpp"
#include "ir/byte_count.hpp"
#include "ir/layout.hpp"
#include "ir/scalar.hpp"
#include "ir/signature.hpp"
#include "ir/text.hpp"
#include "ir/verify.hpp"

using namespace rm::ir;

TEST_CASE("equal dim expressions have one text") {
  Dim s = Dim::symbol("s0"), t = Dim::symbol("s1");
  CHECK((s + 1 + t).str() == (t + s + 1).str());
  CHECK((s * 2 - s - s).str() == "0");
  CHECK(((s + t) * (s - t)) == (s * s - t * t));
  CHECK(Dim::floordiv(s * 4 + 8, 4) == s + 2);
  CHECK(Dim::parse("1+s0*3+floordiv(s1,2)").str() == "floordiv(s1,2)+3*s0+1");
  CHECK(Dim::parse(Dim::parse("2*(s0+s1)*s0-7").str()) == Dim::parse("2*s0*s0+2*s1*s0-7"));
}

TEST_CASE("dims that do not fit 63 bits or expand without end are refused") {
  auto refused = [](const std::string& text) {
    CAPTURE(text);
    CHECK_THROWS_AS(Dim::parse(text), rm::Error);
  };
  refused("9223372036854775808");
  refused("9223372036854775807+1");
  refused("-9223372036854775807-1");
  refused("9223372036854775807*2");
  refused("floordiv(-9223372036854775807-1,-1)");
  refused("mod(1,0)");
  // (a0+b0)*(a1+b1)*... has 2^n terms.
  std::string product;
  for (int i = 0; i < 30; ++i) {
    product += (i == 0 ? "(a" : "*(a") + std::to_string(i) + "+b" + std::to_string(i) + ")";
  }
  refused(product);
  std::string power = "s0";
  for (int i = 0; i < 200; ++i) power += "*s0";
  refused(power);
  CHECK(Dim::parse("-9223372036854775807").value() == -INT64_MAX);
  CHECK(Dim::parse("9223372036854775807*s0").str() == "9223372036854775807*s0");
  CHECK(Dim::parse("mod(9223372036854775807,-2)").value() == -1);
  CHECK(Dim::floordiv(Dim::parse("-9223372036854775807"), -1).value() == INT64_MAX);
  CHECK(Dim::floordiv(Dim::parse("3*s0"), -1).str() == "-3*s0");
}

TEST_CASE("sizes are multiplied with care") {
  CHECK(num_bytes(std::vector<int64_t>{3, 5}, DType::kF32) == 60);
  CHECK(num_elements(std::vector<int64_t>{}) == 1);
  CHECK(num_elements(std::vector<int64_t>{INT64_MAX, INT64_MAX, 0}) == 0);
  CHECK(num_bytes(std::vector<int64_t>{kMaxBytes}, DType::kU8) == kMaxBytes);
  CHECK_THROWS_AS(num_bytes(std::vector<int64_t>{kMaxBytes}, DType::kI16), rm::Error);
  CHECK_THROWS_AS(num_elements(std::vector<int64_t>{1LL << 32, 1LL << 32}), rm::Error);
  CHECK_THROWS_AS(num_elements(std::vector<int64_t>{-1, 0}), rm::Error);
  CHECK_THROWS_AS(contiguous_strides({1, INT64_MAX, INT64_MAX}), rm::Error);
  CHECK(contiguous(DType::kF32, {0, INT64_MAX, INT64_MAX}).is_contiguous());
  const Layout row = contiguous(DType::kF32, {8});
  CHECK(view_slice(row, 0, 3, 8, INT64_MAX).dims == Ints{1});
  CHECK(view_slice(row, 0, 8, 8, 1).offset == 0);
}

TEST_CASE("substitution evaluates like integer arithmetic") {
  std::mt19937 rng(7);
  for (int round = 0; round < 200; ++round) {
    int64_t a = static_cast<int64_t>(rng() % 50), b = static_cast<int64_t>(rng() % 50) + 1;
    Dim x = Dim::symbol("s0"), y = Dim::symbol("s1");
    Dim e = Dim::floordiv(x * 3 + y, y) + Dim::mod(x - y * 2, 7) + Dim::max(x, y) * Dim::min(x, 5);
    int64_t m = (a - b * 2) % 7;
    if (m < 0) m += 7;
    int64_t want = (a * 3 + b) / b + m + std::max(a, b) * std::min<int64_t>(a, 5);
    CHECK(e.substitute({{"s0", a}, {"s1", b}}).value() == want);
  }
}

TEST_CASE("half formats round trip every bit pattern") {
  for (uint32_t u = 0; u < 65536; ++u) {
    auto bits = static_cast<uint16_t>(u);
    float h = f16_to_float(bits), b = bf16_to_float(bits);
    if (!std::isnan(h)) CHECK(float_to_f16(h) == bits);
    if (!std::isnan(b)) CHECK(float_to_bf16(b) == bits);
    if (std::isnan(h)) CHECK(std::isnan(f16_to_float(float_to_f16(h))));
  }
  CHECK(float_to_f16(65520.0f) == 0x7c00);
  CHECK(float_to_f16(65519.0f) == 0x7bff);
}

static const char* kText =
    "rmir 1\n"
    "sym s0 [1,512]\n"
    "input %0 \"ids\\\"\\x0a\" : i64[s0,2]\n"
    "input %1 \"kv\" : f32[s0] donated\n"
    "weight %2 \"w\" : f32[100,64]\n"
    "literal %3 : f32[2] = 0000803f00000040\n"
    "%4 = embedding(%2, %0) : f32[s0,2,64]\n"
    "%5, %6 = sort(%4, _) {a=-3, axes=[0,1], eps=0x1p-3, imm=f[], inf=-inf, kind=\"max\", "
    "shape=<s0,2*s0+1>} : f32[s0,2,64], i64[s0,2,64]\n"
    "return %5, %0\n";

TEST_CASE("the text form parses back byte for byte") {
  Graph g = parse(kText);
  CHECK(print(g) == kText);
  verify(g);
  CHECK(g.nodes[1].f("eps") == 0.125);
  CHECK(g.nodes[1].dims("shape")[1].str() == "2*s0+1");
}

TEST_CASE("compact drops dead values and is stable") {
  Graph g = parse(kText);
  g.compact();
  std::string once = print(g);
  CHECK(once.find("literal") == std::string::npos);
  g.compact();
  CHECK(print(g) == once);
  CHECK(print(parse(once)) == once);
}

TEST_CASE("mutated text is refused or parsed, never a crash") {
  std::mt19937 rng(11);
  std::string base = kText;
  for (int round = 0; round < 20000; ++round) {
    std::string text = base;
    int edits = 1 + static_cast<int>(rng() % 4);
    for (int e = 0; e < edits; ++e) {
      size_t at = rng() % text.size();
      if (rng() % 3 == 0) {
        text.erase(at, rng() % 6);
      } else {
        text[at] = static_cast<char>(rng() % 128);
      }
      if (text.empty()) text = "r";
    }
    try {
      verify(parse(text));
    } catch (const rm::Error&) {
    }
  }
}

TEST_CASE("the verifier names the broken rule") {
  Graph g = parse(kText);
  std::swap(g.nodes[0], g.nodes[1]);
  CHECK_THROWS_WITH_AS(verify(g), doctest::Contains("defined above"), rm::Error);
  Graph h = parse(kText);
  h.symbols.clear();
  CHECK_THROWS_WITH_AS(verify(h), doctest::Contains("declared symbols"), rm::Error);
}

TEST_CASE("substitution binds every dim") {
  Graph g = substitute(parse(kText), {{"s0", 3}});
  CHECK(g.type(5).dims[0].value() == 3);
  CHECK(g.nodes[1].dims("shape")[1].value() == 7);
  verify(g);
}

TEST_CASE("relations of sizes are printed, parsed and refused as sizes are") {
  const std::string text =
      "rmir 1\nsym s0 [0,64]\nsym s1 [0,64]\n"
      "input %0 \"x\" : f32[s0,8]\ninput %1 \"y\" : f32[s1]\n"
      "where s0!=s1\nwhere mod(s0,4)==0\nwhere s0<=2*s1+1\nreturn %0, %1\n";
  CHECK(print(parse(text)) == text);
  CHECK(parse_head(text).relations.size() == 3);
  for (const char* bad : {"s0", "s0=s1", "s0<", "<s1", "s0==s1==3", "s0<=f(s1)"}) {
    CAPTURE(bad);
    CHECK_THROWS_AS(Relation::parse(bad), rm::Error);
  }
  Graph undeclared = parse(text);
  undeclared.relations.push_back(Relation::parse("s7<3"));
  CHECK_THROWS_AS(verify(undeclared), rm::Error);
  const Graph half = substitute(parse(text), {{"s0", 8}});
  CHECK(print(half).find("where 8!=s1\nwhere 8<=2*s1+1\n") != std::string::npos);
  CHECK_THROWS_AS(substitute(parse(text), {{"s0", 7}}), rm::Error);
}

TEST_CASE("a signature judges sizes as substitution does") {
  const char* const head =
      "rmir 1\nsym s0 [2,64]\nsym s1 [0,64]\n"
      "input %0 \"x\" : f32[s0,8]\ninput %1 \"y\" : f32[s1,s0]\ninput %2 \"z\" : f32[s0-s1+1]\n"
      "where s0>s1\nwhere floordiv(s0-9,2)*min(s1,3)<=max(s0,7)\nwhere mod(1-s0,4)!=1\n";
  const Signature signature{std::string(head) + "return %0\n"};
  const Signature::Test all = signature.test({}), some = signature.test({false, true, false});
  REQUIRE(all.inputs().size() == 3);
  REQUIRE(some.inputs().size() == 2);
  std::mt19937 random(5);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    const auto any = [&] { return static_cast<int64_t>(random() % 70); };
    const int64_t s0 = any(), s1 = any();
    const bool off = random() % 4 == 0;
    const int64_t z = s0 - s1 + 1 + (off ? 1 : 0);
    bool expected = s0 >= 2 && s0 <= 64 && s1 <= 64 && !off;
    for (const Relation& relation : signature.relations()) {
      const Relation now = relation.substitute({{"s0", s0}, {"s1", s1}});
      expected = expected && now.order_holds();
    }
    accepted += expected ? 1 : 0;
    CHECK(all.accepts({s0, 8, s1, s0, z}) == expected);
    CHECK_FALSE(all.accepts({s0, 9, s1, s0, z}));
    CHECK_FALSE(all.accepts({s0, 8, s1, s0 + 1, z}));
    // Without input 1 nothing is known of s1: what names it is left out.
    const bool known = s0 >= 2 && s0 <= 64 && ((1 - s0) % 4 + 4) % 4 != 1;
    CHECK(some.accepts({s0, 8, z}) == known);
  }
  CHECK(accepted > 500);
}
