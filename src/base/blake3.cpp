// The tree over the chunks, and the choice of the vector width.
#include "base/blake3.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/blake3_lanes.hpp"

static_assert(std::endian::native == std::endian::little, "words are read as they stand in memory");

namespace rm::blake3 {
namespace {

// One input of any size, with plain integers.
Words hash_one(const Job& job) {
  uint32_t value[8], m[16];
  std::memcpy(value, job.key, sizeof(value));
  size_t at = 0;
  do {
    const size_t bytes = std::min(job.bytes - at, kBlockBytes);
    std::memset(m, 0, sizeof(m));
    std::memcpy(m, job.data + at, bytes);
    const uint32_t flags = job.flags | (at == 0 ? job.first_flags : 0) |
                           (at + bytes == job.bytes ? job.last_flags : 0);
    lanes::compress(value, m, static_cast<uint32_t>(job.counter),
                    static_cast<uint32_t>(job.counter >> 32), static_cast<uint32_t>(bytes), flags);
    at += bytes;
  } while (at < job.bytes);
  Words out;
  std::copy_n(value, 8, out.begin());
  return out;
}

void skip(Job& job, size_t inputs) {
  job.data += inputs * job.stride;
  job.counter += inputs * job.counter_step;
}

using Hash = void (*)(const Job& job, uint32_t (*out)[8]);

void hash4(const Job& job, uint32_t (*out)[8]) { lanes::hash<4>(job, out); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) void hash8(const Job& job, uint32_t (*out)[8]) {
  lanes::hash<8>(job, out);
}
__attribute__((target("avx512f,avx512vl,prefer-vector-width=512"))) void hash16(
    const Job& job, uint32_t (*out)[8]) {
  lanes::hash<16>(job, out);
}
#endif

// `count` inputs of whole blocks, in groups as wide as the level allows.
void hash_many(Level level, Job job, size_t count, Words* out) {
  const auto groups_of = [&](size_t width, Hash hash) {
    for (; count >= width; count -= width, out += width, skip(job, width)) {
      hash(job, reinterpret_cast<uint32_t(*)[8]>(out));
    }
  };
#if defined(__x86_64__)
  if (level >= Level::kAvx512) groups_of(16, hash16);
  if (level >= Level::kAvx2) groups_of(8, hash8);
#endif
  groups_of(4, hash4);
  for (; count > 0; --count, ++out, skip(job, 1)) *out = hash_one(job);
}

// Subtrees are hashed whole up to this size: large enough that inner nodes fill vectors too.
constexpr size_t kMostChunks = 128;

// The root of a complete subtree over `chunks` (a power of two) chunks, never the whole tree's.
Words hash_subtree(Level level, const Words& key, uint32_t flags, const uint8_t* data,
                   size_t chunks, uint64_t counter) {
  Words nodes[kMostChunks];
  hash_many(level, {key.data(), data, kChunkBytes, kChunkBytes, counter, 1, flags, kChunkStart,
                    kChunkEnd}, chunks, nodes);
  for (size_t count = chunks / 2; count > 0; count /= 2) {
    Words parents[kMostChunks / 2];
    hash_many(level, {key.data(), reinterpret_cast<const uint8_t*>(nodes), kBlockBytes,
                      kBlockBytes, 0, 0, flags | kParent, 0, 0}, count, parents);
    std::copy_n(parents, count, nodes);
  }
  return nodes[0];
}

}  // namespace

Level best_level() {
#if defined(__x86_64__)
  static const Level level = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")
                                 ? Level::kAvx512
                             : __builtin_cpu_supports("avx2") ? Level::kAvx2
                                                              : Level::kBaseline;
  return level;
#else
  return Level::kBaseline;
#endif
}

Hasher::Hasher(Level level) : level_(level) { std::copy_n(kInitial, 8, key_.begin()); }

Hasher::Hasher(std::span<const uint8_t, kDigestBytes> key, Level level)
    : level_(level), flags_(kKeyed) {
  std::memcpy(key_.data(), key.data(), kDigestBytes);
}

Words Hasher::parent(const Words& left, const Words& right, uint32_t more_flags) const {
  const Words children[2] = {left, right};
  return hash_one({key_.data(), reinterpret_cast<const uint8_t*>(children), 0, kBlockBytes, 0, 0,
                   flags_ | kParent | more_flags, 0, 0});
}

// Complete subtrees of equal size join, as two equal digits carry in binary addition.
void Hasher::add_subtree(const Words& value, uint64_t chunks) {
  Words joined = value;
  chunks_ += chunks;
  for (uint64_t size = chunks; (chunks_ & size) == 0; size *= 2) {
    joined = parent(subtrees_.back(), joined, 0);
    subtrees_.pop_back();
  }
  subtrees_.push_back(joined);
}

void Hasher::update(const uint8_t* data, size_t size) {
  while (size > 0) {
    if (pending_bytes_ == kChunkBytes) {
      add_subtree(hash_subtree(level_, key_, flags_, pending_.data(), 1, chunks_), 1);
      pending_bytes_ = 0;
    }
    if (pending_bytes_ == 0 && size > kChunkBytes) {
      // The largest subtree that may stand at this place and leaves at least one byte.
      size_t chunks = std::bit_floor(std::min((size - 1) / kChunkBytes, kMostChunks));
      while ((chunks_ & (chunks - 1)) != 0) chunks /= 2;
      add_subtree(hash_subtree(level_, key_, flags_, data, chunks, chunks_), chunks);
      data += chunks * kChunkBytes;
      size -= chunks * kChunkBytes;
      continue;
    }
    const size_t bytes = std::min(size, kChunkBytes - pending_bytes_);
    std::memcpy(pending_.data() + pending_bytes_, data, bytes);
    pending_bytes_ += bytes;
    data += bytes;
    size -= bytes;
  }
}

std::array<uint8_t, kDigestBytes> Hasher::digest() const {
  const uint32_t root = subtrees_.empty() ? kRoot : 0;  // the only chunk is the root
  Words value = hash_one({key_.data(), pending_.data(), 0, pending_bytes_, chunks_, 0, flags_,
                          kChunkStart, kChunkEnd | root});
  for (size_t i = subtrees_.size(); i-- > 0;) {
    value = parent(subtrees_[i], value, i == 0 ? kRoot : 0);
  }
  std::array<uint8_t, kDigestBytes> out;
  std::memcpy(out.data(), value.data(), out.size());
  return out;
}

}  // namespace rm::blake3
