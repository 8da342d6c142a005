// Drafts of coming tokens from what the text said before, and whether checking them pays.
//
// A text that repeats itself tells its own next tokens: what followed the last occurrence of its
// last few tokens is a draft, and a program that takes several tokens checks it in about the time
// of one. Whether that wins is measured, never assumed: how far drafts hold is learned from plain
// steps too (which cost nothing more), and the time of a check against that of a step.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace rm::generation {

inline constexpr size_t kMostDrafted = 15;  // tokens of a draft
inline constexpr size_t kDraftKinds = 4;    // by how much of the text agrees

struct Draft {
  std::vector<int64_t> tokens;
  size_t kind = 0;  // 0: the last 2 tokens were there before; 1: 3 or 4; 2: 5 to 8; 3: more
};

/// What followed the longest earlier occurrence of the text's end, the latest one of those; at most
/// `most` tokens, none when not even the last two tokens were there before.
Draft look_up(const std::vector<int64_t>& text, size_t most);

/// What is known about drafts on one model. Any thread may call any method.
class DraftPolicy {
 public:
  /// `always`: every draft is checked, whatever that takes.
  explicit DraftPolicy(bool always) : always_(always) {}

  /// The first `accepted` tokens of a draft were what the model said, the next was not (or the
  /// draft ended).
  void held(const Draft& draft, size_t accepted);
  /// The same, when a program checked the draft; it saved `accepted` steps.
  void checked(const Draft& draft, size_t accepted);
  /// The same, when no program could: adds up what it would have saved.
  void missed(const Draft& draft, size_t accepted);

  /// A run over `width` tokens took that long; a plain step has width 1. A first run with buffers
  /// of some capacity makes its plan and does not count.
  void took(size_t width, int64_t capacity, double ns);

  /// The width of the check to run for this draft, out of `widths`; 0 when a plain step is better.
  size_t choose(const Draft& draft, std::span<const size_t> widths);
  /// True when programs that check would have saved as much time as it takes to make them.
  bool wants_checks(const Draft& draft, double making_ns) const;

  struct Counts {
    int64_t checks = 0, drafted = 0, accepted = 0;  // runs, tokens offered to them, tokens right
    double step_ns = 0, check_ns = 0;               // a plain step; the last width checked
  };
  Counts counts() const;

 private:
  double gain(const Draft& draft, size_t width, double cost_ns) const;
  double cost_of(size_t width) const;  // 0: not known
  void learn(const Draft& draft, size_t accepted);

  const bool always_;
  mutable std::mutex mutex_;
  // holds_[kind][i]: how often at least i + 1 tokens of a draft hold, the newest counting most.
  std::array<std::array<double, kMostDrafted>, kDraftKinds> holds_ = first_guess();
  std::vector<std::pair<size_t, double>> cost_ns_;  // by width, smoothed
  std::set<std::pair<size_t, int64_t>> planned_;    // widths and capacities that ran before
  double missed_ns_ = 0;
  int64_t passed_over_ = 0;  // checks that were not run because they had been slow
  Counts counts_;

  static std::array<std::array<double, kMostDrafted>, kDraftKinds> first_guess();
};

}  // namespace rm::generation
