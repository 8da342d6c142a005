// BLAKE3 after its public specification (github.com/BLAKE3-team/BLAKE3-specs): 32-byte digests,
// plain or keyed.
//
// The input is split into chunks of 1024 bytes, the leaves of a binary tree. Chunks are independent,
// so several are compressed side by side, one in each lane of a vector register.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace rm::blake3 {

inline constexpr size_t kKeyWords = 8, kDigestBytes = 32, kBlockBytes = 64, kChunkBytes = 1024;

using Words = std::array<uint32_t, kKeyWords>;

/// How many chunks are compressed side by side at most. Results are the same at every level.
enum class Level { kBaseline, kAvx2, kAvx512 };

/// The highest level of this processor.
Level best_level();

/// Incremental digest. Copyable; not thread safe.
class Hasher {
 public:
  explicit Hasher(Level level = best_level());
  Hasher(std::span<const uint8_t, kDigestBytes> key, Level level = best_level());

  void update(const uint8_t* data, size_t size);
  /// The digest of what was given so far; more may follow.
  std::array<uint8_t, kDigestBytes> digest() const;

 private:
  void add_subtree(const Words& value, uint64_t chunks);
  Words parent(const Words& left, const Words& right, uint32_t more_flags) const;

  Level level_;
  Words key_;
  uint32_t flags_ = 0;
  uint64_t chunks_ = 0;          // whole chunks in the tree
  std::vector<Words> subtrees_;  // roots of complete subtrees, from large to small
  // The chunk that the next byte belongs to. A full one stays here until another byte follows,
  // because the last chunk of the input is compressed differently.
  std::array<uint8_t, kChunkBytes> pending_;
  size_t pending_bytes_ = 0;
};

}  // namespace rm::blake3
