// Drafts from the text, and when checking them is worth it.
#include "generation/prompt_lookup.hpp"

#include <doctest/doctest.h>

#include "generation/greedy_loop.hpp"

using namespace rm;
using generation::Draft;
using generation::DraftPolicy;

namespace {

const std::vector<size_t> kWidths = {4, 8};

Draft sure() { return {{1, 2, 3, 4, 5, 6, 7}, 3}; }

void times(DraftPolicy& policy, double check8) {
  for (int i = 0; i < 40; ++i) {
    policy.took(1, 64, 1000);
    policy.took(4, 64, 5000);
    policy.took(8, 64, check8);
  }
}

}  // namespace

TEST_CASE("a draft is what followed the longest and latest earlier occurrence of the end") {
  CHECK(generation::look_up({}, 4).tokens.empty());
  CHECK(generation::look_up({1}, 4).tokens.empty());
  CHECK(generation::look_up({1, 2, 3, 4}, 4).tokens.empty());
  CHECK(generation::look_up({9, 2, 8, 2}, 4).tokens.empty());  // one token alone is no evidence
  Draft latest = generation::look_up({1, 2, 5, 1, 2, 6, 1, 2}, 1);
  CHECK(latest.tokens == std::vector<int64_t>{6});
  CHECK(latest.kind == 0);
  Draft longest = generation::look_up({0, 1, 2, 5, 8, 1, 2, 6, 0, 1, 2}, 2);
  CHECK(longest.tokens == std::vector<int64_t>{5, 8});
  CHECK(longest.kind == 1);
}

TEST_CASE("a text that repeats goes on repeating in its draft") {
  CHECK(generation::look_up({3, 3, 3}, 5).tokens == std::vector<int64_t>{3, 3, 3, 3, 3});
  CHECK(generation::look_up({1, 2, 1, 2, 1}, 4).tokens == std::vector<int64_t>{2, 1, 2, 1});
}

TEST_CASE("drafts that hold are checked where checks are fast enough") {
  DraftPolicy policy(false);
  CHECK(policy.choose(sure(), kWidths) == 0);  // no step was measured yet
  times(policy, 2000);
  for (int i = 0; i < 30; ++i) policy.checked(sure(), 7);
  CHECK(policy.choose(sure(), kWidths) == 8);
  CHECK(policy.choose(sure(), {}) == 0);
  CHECK(policy.counts().accepted == 210);
}

TEST_CASE("slow checks are given up and measured again after 64 drafts") {
  DraftPolicy policy(false);
  times(policy, 9000);
  for (int i = 0; i < 30; ++i) policy.held(sure(), 7);
  for (int i = 0; i < 63; ++i) CHECK(policy.choose(sure(), kWidths) == 0);
  CHECK(policy.choose(sure(), kWidths) == 8);
  CHECK(policy.choose(sure(), kWidths) == 0);
}

TEST_CASE("drafts that do not hold are not checked, however fast checks are") {
  DraftPolicy policy(false);
  times(policy, 1100);
  for (int i = 0; i < 60; ++i) policy.held(sure(), 0);
  for (int i = 0; i < 200; ++i) CHECK(policy.choose(sure(), kWidths) == 0);
}

TEST_CASE("checks are wanted when they would have saved what making them takes") {
  DraftPolicy policy(false);
  for (int i = 0; i < 3; ++i) policy.took(1, 64, 1000);
  CHECK(!policy.wants_checks(sure(), 50000));
  for (int i = 0; i < 7; ++i) policy.missed(sure(), 7);  // 6.7 steps each
  CHECK(!policy.wants_checks(sure(), 50000));
  policy.missed(sure(), 7);
  CHECK(policy.wants_checks(sure(), 50000));
  CHECK(DraftPolicy(true).wants_checks(sure(), 1e12));
}

TEST_CASE("the first run with new buffers makes a plan and is not counted as slow") {
  DraftPolicy policy(false);
  policy.took(1, 64, 1e9);
  policy.took(1, 64, 1000);
  policy.took(1, 128, 1e9);
  CHECK(policy.counts().step_ns == 1000);
}

TEST_CASE("a logit stands out when it leads by more than the margin") {
  std::vector<float> logits(1000, 1.0f);
  logits[700] = 2.0f;
  logits[3] = -4.0f;  // the largest magnitude
  auto leads = [&](double margin) {
    return generation::stands_out(ir::DType::kF32, logits.data(), 1000, 700, margin);
  };
  CHECK(leads(0.2));
  CHECK(!leads(0.3));
  logits[999] = 2.0f;
  CHECK(!leads(1e-6));
  logits[999] = std::numeric_limits<float>::quiet_NaN();
  CHECK(!leads(0.0));
}
