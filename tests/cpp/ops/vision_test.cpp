// References of conv, pool, resize and group_norm against values worked out by hand, and what their
// inference refuses.
#include "support.hpp"

using namespace rm;
using namespace rm::test;

TEST_CASE("conv slides its kernel, adds bias and residual, then activates") {
  auto x = f32({1, 1, 3, 3}, {1, 2, 3, 4, 5, 6, 7, 8, 9});
  auto w = f32({1, 1, 2, 2}, {1, 0, 0, -1});
  const std::string in =
      "input %0 \"x\" : f32[1,1,3,3]\ninput %1 \"w\" : f32[1,1,2,2]\ninput %2 \"b\" : f32[1]\n";
  auto bias = f32({1}, {3});
  check_close(run(in + "%3 = conv(%0, %1) : f32[1,1,2,2]\nreturn %3\n", {x, w, bias})[0],
              {-4, -4, -4, -4});
  check_close(run(in + "%3 = conv(%0, %1, %2) {activation=\"relu\", padding=[1,1,0,0], stride=[2,2]} "
                       ": f32[1,1,2,2]\nreturn %3\n",
                  {x, w, bias})[0],
              {2, 0, 0, 0});
  check_close(run(in + "%3 = conv(%0, %1) {dilation=[2,2]} : f32[1,1,1,1]\nreturn %3\n",
                  {x, w, bias})[0],
              {-8});
  check_close(run(in + "%3 = conv(%0, %1) {output_padding=[0,1], stride=[1,2], transposed=1} : "
                       "f32[1,1,4,7]\nreturn %3\n",
                  {x, w, bias})[0],
              {1, 0, 2, 0, 3, 0, 0,   4, -1, 5, -2, 6, -3, 0,
               7, -4, 8, -5, 9, -6, 0, 0, -7, 0, -8, 0, -9, 0});
}

TEST_CASE("groups see their own channels") {
  check_close(run("input %0 \"x\" : f32[1,4,1]\ninput %1 \"w\" : f32[2,2,1]\n"
                  "%2 = conv(%0, %1) {groups=2} : f32[1,2,1]\nreturn %2\n",
                  {f32({1, 4, 1}, {1, 2, 3, 4}), f32({2, 2, 1}, {1, 10, 100, 1000})})[0],
              {21, 4300});
}

TEST_CASE("pool takes the largest or the mean of what lies inside") {
  auto x = f32({1, 1, 4}, {1, 5, 2, 8});
  auto pool = [&](const std::string& attrs, int count) {
    return run("input %0 \"x\" : f32[1,1,4]\n%1 = pool(%0) {" + attrs + "} : f32[1,1," +
                   std::to_string(count) + "]\nreturn %1\n",
               {x})[0];
  };
  check_close(pool("kernel=[2], kind=\"max\", stride=[2]", 2), {5, 8});
  check_close(pool("kernel=[3], kind=\"max\", padding=[1,1]", 4), {5, 5, 8, 8});
  check_close(pool("kernel=[2], kind=\"mean\", padding=[1,1], stride=[2]", 3), {0.5, 3.5, 4});
  check_close(pool("count_include_pad=0, kernel=[2], kind=\"mean\", padding=[1,1], stride=[2]", 3),
              {1, 3.5, 8});
  check_close(pool("divisor=4, kernel=[2], kind=\"mean\", stride=[2]", 2), {1.5, 2.5});
}

TEST_CASE("resize repeats or mixes neighbours") {
  auto x = f32({1, 1, 2}, {0, 4});
  auto resize = [&](const std::string& attrs) {
    return run("input %0 \"x\" : f32[1,1,2]\n%1 = resize(%0) {" + attrs +
                   ", size=<4>} : f32[1,1,4]\nreturn %1\n",
               {x})[0];
  };
  check_close(resize("mode=\"nearest\", ratio=f[0x1p-1]"), {0, 0, 4, 4});
  check_close(resize("mode=\"linear\", ratio=f[0x1p-1]"), {0, 1, 3, 4});
  check_close(resize("align_corners=1, mode=\"linear\", ratio=f[0x1.5555555555555p-2]"),
              {0, 4.0 / 3, 8.0 / 3, 4});
}

TEST_CASE("group_norm centres and scales each group") {
  check_close(run("input %0 \"x\" : f32[1,2,2]\ninput %1 \"w\" : f32[2]\ninput %2 \"b\" : f32[2]\n"
                  "%3 = group_norm(%0, %1, %2) {eps=0x0p+0, groups=2} : f32[1,2,2]\nreturn %3\n",
                  {f32({1, 2, 2}, {1, 3, 10, 30}), f32({2}, {1, 2}), f32({2}, {0, 5})})[0],
              {-1, 1, 3, 7});
}

TEST_CASE("operators on images refuse what does not fit") {
  const std::string x = "input %0 \"x\" : f32[1,4,5,5]\n";
  auto conv = [&](const std::string& weight, const std::string& attrs) {
    return type_error(x + "input %1 \"w\" : " + weight + "\n%2 = conv(%0, %1) {" + attrs +
                      "} : f32[1,4,5,5]\nreturn %2\n");
  };
  CHECK(conv("f32[4,3,1,1]", "groups=1").find("channels to be equal") != std::string::npos);
  CHECK(conv("f32[3,2,1,1]", "groups=2").find("groups divide") != std::string::npos);
  CHECK(conv("f32[4,4,7,7]", "groups=1").find("fit into the padded input") != std::string::npos);
  CHECK(conv("f32[4,4,1,1]", "stride=[0,1]").find("at least 1") != std::string::npos);
  CHECK(conv("f32[4,4,1,1]", "padding=[1,1]").find("4 values") != std::string::npos);
  CHECK(conv("f32[4,4,1,1]", "activation=\"loud\"").find("activation") != std::string::npos);
  CHECK(conv("f32[4,4,1]", "groups=1").find("rank 4") != std::string::npos);
  CHECK(type_error(x + "%1 = pool(%0) {kernel=[2,2], kind=\"median\"} : f32[1,4,4,4]\nreturn %1\n")
            .find("max or mean") != std::string::npos);
  CHECK(type_error(x + "%1 = resize(%0) {mode=\"cubic\", ratio=f[0x1p+0,0x1p+0], size=<5,5>} : "
                       "f32[1,4,5,5]\nreturn %1\n")
            .find("nearest or linear") != std::string::npos);
  CHECK(type_error(x + "%1 = group_norm(%0) {eps=0x1p-10, groups=3} : f32[1,4,5,5]\nreturn %1\n")
            .find("groups divide") != std::string::npos);
}
