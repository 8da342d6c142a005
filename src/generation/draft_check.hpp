// Prompt-lookup decoding of one row: drafts, and the programs that check them.
//
// A check feeds the last token and a draft at once. Every token it gives is the argmax of its own
// logits, as in a plain step; the first one that is not the draft's ends it, and the cache's length
// is set behind what held. A token whose two best logits nearly tie is left to a plain step: sums
// over several rows round differently.
#pragma once

#include <cstdint>
#include <vector>

#include "generation/greedy_loop.hpp"
#include "generation/greedy_memory.hpp"
#include "generation/prompt_lookup.hpp"

namespace rm::generation {

/// A program over `width` tokens that gives the logits of each. Length and mask are the tensors of
/// the plain step, its ids [1,width] and positions [1,width] are its own.
struct Check {
  engine::Program* program = nullptr;
  std::vector<engine::TensorView> inputs;
  GreedyRoles roles;
  size_t width = 0;
};

struct Drafting {
  DraftPolicy* policy = nullptr;
  std::vector<int64_t> text;  // the row so far, the prompt first; the loop appends
  std::vector<Check> checks;  // by growing width; none: drafts are only scored
  double margin = 0;          // of the largest logit: less between the two best is a tie
  double making_ns = 0;       // what making checks takes; the loop ends when they are worth it
  bool may_want = false;      // there are none yet and they can be made
};

/// The drafts of one loop.
class DraftCheck {
 public:
  DraftCheck(Drafting& drafting, StepMemory& step, const GreedyLimits& limits, size_t rows);

  /// The width of the next run: 1 for a plain step, 0 when checks should be made first.
  size_t plan(int64_t room);
  /// Runs the check that was planned; at most `room` tokens. True when the row ended.
  bool run(int64_t room, GreedyResult& out, std::vector<char>& finished);
  /// After every run, with the time it took.
  void ran(double ns, const GreedyResult& out);
  /// After a plain step, before `ran`: a token a check would not have decided confirms no draft.
  void plain(const StepOutputs& outputs, const GreedyRoles& roles, int64_t token);

 private:
  Drafting& drafting_;
  StepMemory& step_;
  const GreedyLimits& limits_;
  const size_t start_;              // length of the text at the beginning
  std::vector<StepMemory> memory_;  // by check
  std::vector<StepOutputs> outputs_;
  std::vector<size_t> widths_;
  const Check* planned_ = nullptr;
  Draft draft_;              // what the planned check gets
  size_t right_ = 0;         // tokens of it that held
  Draft followed_;           // a draft that plain steps confirm or not
  size_t holds_ = 0;         // tokens of it that held so far
  bool decided_ = true;      // the last plain token is no near tie
  bool plain_next_ = false;  // the last check ended at a tie
};

}  // namespace rm::generation
