// Offsets of blocks with known lifetimes in one arena (the dynamic storage allocation problem).
#pragma once

#include <cstdint>
#include <vector>

namespace rm::plan {

struct Block {
  int64_t bytes = 0;
  int32_t first = INT32_MAX, last = -1;  // steps, inclusive
  int32_t buffer = -1;                   // -1: the workspace of step `first`
  int64_t offset = -1;
};

/// Searches offsets so that no block ends above `capacity`, for at most about `work` simple operations.
/// False: none was found, and the blocks are as they were. The same blocks get the same offsets in every process.
bool place_within(std::vector<Block>& blocks, int64_t capacity, int64_t work);

}  // namespace rm::plan
