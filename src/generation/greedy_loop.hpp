// Greedy decoding as one loop over a program: no allocation and no caller between two tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/program.hpp"

namespace rm::generation {

/// Which inputs of the program change with every token, by number; -1: the program has none.
struct GreedyRoles {
  int ids = -1;        // i64 [B,1]: the last token of every row
  int positions = -1;  // i64 [B,1] or [1,1]
  int length = -1;     // i64 []: positions the cache holds
  int mask = -1;       // i64 [B,C]: column `length` becomes 1
  int logits = -1;     // output, [B,1,V] f32, bf16 or f16
};

struct GreedyLimits {
  int64_t steps = 0;                      // at most this many tokens a row
  int64_t capacity = 0;                   // positions the cache has room for
  std::vector<std::vector<int64_t>> eos;  // one list a row
  int64_t pad = 0;                        // what finished rows get
  bool until_one_ends = false;            // stop with the first row that ends, not with the last
};

struct GreedyResult {
  std::vector<int64_t> tokens;  // [count][B]
  int64_t count = 0;
  bool interrupted = false;
  bool wants_checks = false;  // ended because programs that check drafts would win
};

/// What the caller answers between tokens.
enum class Poll { kContinue, kStop, kInterrupt };

struct Drafting;

/// The caller's functions.
struct GreedyHooks {
  std::function<Poll()> poll;  // now and then, between whole steps
  /// Gets the tokens of every run of one row, in order, and returns how many of them it accepted when
  /// the loop is to end with those; -1 when it accepted all and the loop goes on.
  std::function<int64_t(const std::vector<int64_t>&)> on_tokens;
  Drafting* drafting = nullptr;  // draft_check.hpp; of one row: a run may give several tokens
};

/// Runs until `steps` tokens were made, every row is finished or the cache is full. The tensors of
/// the roles are the loop's own and are updated in place; buffers of the cache are donated inputs.
/// `finished[b]` says which rows ended, before and after. Another answer of `poll` than kContinue ends
/// the loop after a whole step, and so does a step whose values the program refuses
/// (RM_OUT_OF_RANGE): it is not made, and the caller has the original judge it. Throws what else
/// Program::run throws; the tensors then say how far it came.
GreedyResult decode_greedy(engine::Program& program, const std::vector<engine::TensorView>& inputs,
                           const GreedyRoles& roles, const GreedyLimits& limits,
                           std::vector<char>& finished, const GreedyHooks& hooks);

/// One step: `tokens`, one a row, go through the program. Returns the first largest logit of every
/// row; none where the program's logits are not dense. The tensors of the roles are updated as in
/// `decode_greedy`; when this throws, all but the tokens and the cache's content are as they were.
std::vector<int64_t> decode_step(engine::Program& program, const std::vector<engine::TensorView>& inputs,
                                 const GreedyRoles& roles, const std::vector<int64_t>& tokens,
                                 engine::OutputAllocator& outputs);

/// The first index of the largest of `count` logits; a NaN counts as the largest, as in torch.
int64_t argmax(ir::DType dtype, const void* logits, int64_t count);

/// True when logit `winner`, the largest, leads by more than `margin` of the largest magnitude; not
/// when one of them is NaN.
bool stands_out(ir::DType dtype, const void* logits, int64_t count, int64_t winner, double margin);

/// True when `token` ends row `row`.
bool is_end(const GreedyLimits& limits, size_t row, int64_t token);

}  // namespace rm::generation
