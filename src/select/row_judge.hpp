// Who may keep a kernel row from being used for a problem; src/selfcheck implements it.
#pragma once

#include <cstdint>
#include <string>

namespace rm::select {

struct Row;
class Problem;

class RowJudge {
 public:
  virtual ~RowJudge() = default;
  /// Empty when the row may serve the problem, else why it must not. Any thread; may be slow.
  virtual std::string refusal(const Row& row, uint32_t config, const Problem& problem) = 0;
};

}  // namespace rm::select
