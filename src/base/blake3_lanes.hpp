// The compression function of BLAKE3 on N inputs at once, one in each lane of a vector.
//
// Everything is force-inlined into a caller whose `target` attribute names the instruction set, so
// one source serves every level and no function of a higher level is shared with other files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#define RM_BLAKE3_INLINE [[gnu::always_inline]] inline

namespace rm::blake3 {

// Flags of a block.
inline constexpr uint32_t kChunkStart = 1, kChunkEnd = 2, kParent = 4, kRoot = 8, kKeyed = 16;

inline constexpr uint32_t kInitial[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                         0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

/// What N inputs of one call share.
struct Job {
  const uint32_t* key;       // 8 words
  const uint8_t* data;       // input i starts at data + i * stride
  size_t stride;             // bytes
  size_t bytes;              // of every input; the last block may be short
  uint64_t counter;          // of input 0
  uint64_t counter_step;     // 1 for chunks, 0 for parents
  uint32_t flags, first_flags, last_flags;  // of all blocks, added to the first, to the last
};

namespace lanes {

template <int N>
struct VectorOf {
  typedef uint32_t type __attribute__((vector_size(4 * N)));
};
template <int N>
using Vector = typename VectorOf<N>::type;

// The message words of round r, in the order in which the round uses them.
struct Schedule {
  int word[7][16];
  constexpr Schedule() : word{} {
    constexpr int kPermutation[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    for (int i = 0; i < 16; ++i) word[0][i] = i;
    for (int r = 1; r < 7; ++r) {
      for (int i = 0; i < 16; ++i) word[r][i] = word[r - 1][kPermutation[i]];
    }
  }
};
inline constexpr Schedule kSchedule;

// Byte i of the result is byte i + Bytes of its word, around the word's end.
template <int Bytes, typename V, size_t... I>
RM_BLAKE3_INLINE void rotate_bytes(V& x, std::index_sequence<I...>) {
  typedef uint8_t Octets __attribute__((vector_size(sizeof(V))));
  const Octets octets = reinterpret_cast<const Octets&>(x);
  const Octets rotated =
      __builtin_shufflevector(octets, octets, (I / 4 * 4 + (I % 4 + Bytes) % 4)...);
  x = reinterpret_cast<const V&>(rotated);
}

template <int Bits, typename V>
RM_BLAKE3_INLINE void rotate(V& x) {
  if constexpr (sizeof(V) == 32 && Bits % 8 == 0) {  // AVX2 shuffles bytes, but cannot rotate words
    rotate_bytes<Bits / 8>(x, std::make_index_sequence<sizeof(V)>());
  } else {
    x = (x >> Bits) | (x << (32 - Bits));
  }
}

template <typename V>
RM_BLAKE3_INLINE void mix(V& a, V& b, V& c, V& d, const V& x, const V& y) {
  a += b + x;
  d ^= a;
  rotate<16>(d);
  c += d;
  b ^= c;
  rotate<12>(b);
  a += b + y;
  d ^= a;
  rotate<8>(d);
  c += d;
  b ^= c;
  rotate<7>(b);
}

template <int R, typename V>
RM_BLAKE3_INLINE void round(V (&v)[16], const V (&m)[16]) {
  constexpr const int(&w)[16] = kSchedule.word[R];
  mix(v[0], v[4], v[8], v[12], m[w[0]], m[w[1]]);
  mix(v[1], v[5], v[9], v[13], m[w[2]], m[w[3]]);
  mix(v[2], v[6], v[10], v[14], m[w[4]], m[w[5]]);
  mix(v[3], v[7], v[11], v[15], m[w[6]], m[w[7]]);
  mix(v[0], v[5], v[10], v[15], m[w[8]], m[w[9]]);
  mix(v[1], v[6], v[11], v[12], m[w[10]], m[w[11]]);
  mix(v[2], v[7], v[8], v[13], m[w[12]], m[w[13]]);
  mix(v[3], v[4], v[9], v[14], m[w[14]], m[w[15]]);
}

// Lanes a0 b0 a1 b1 ... of the lower (upper) halves of a and b.
template <int N, size_t... I>
RM_BLAKE3_INLINE void zip(const Vector<N>& a, const Vector<N>& b, Vector<N>& low, Vector<N>& high,
                          std::index_sequence<I...>) {
  low = __builtin_shufflevector(a, b, (I / 2 + (I % 2) * N)...);
  high = __builtin_shufflevector(a, b, (N / 2 + I / 2 + (I % 2) * N)...);
}

// m[j] gets word j of the block at `at` of every input. N rows of N words are transposed by log2(N)
// rounds of zipping row i with row i + N/2.
template <int N>
RM_BLAKE3_INLINE void load_block(const uint8_t* at, size_t stride, Vector<N> (&m)[16]) {
  static_assert(16 % N == 0);
  for (int part = 0; part < 16; part += N) {
    Vector<N> rows[N];
    for (int i = 0; i < N; ++i) {
      std::memcpy(&rows[i], at + static_cast<size_t>(i) * stride + 4 * part, sizeof(rows[i]));
    }
    for (int width = 1; width < N; width *= 2) {
      Vector<N> next[N];
      for (int i = 0; i < N / 2; ++i) {
        zip<N>(rows[i], rows[i + N / 2], next[2 * i], next[2 * i + 1],
               std::make_index_sequence<N>());
      }
      for (int i = 0; i < N; ++i) rows[i] = next[i];
    }
    for (int i = 0; i < N; ++i) m[part + i] = rows[i];
  }
}

template <typename V>
RM_BLAKE3_INLINE void compress(V (&value)[8], const V (&m)[16], const V& counter_low,
                               const V& counter_high, uint32_t bytes, uint32_t flags) {
  V v[16] = {value[0], value[1], value[2], value[3], value[4], value[5], value[6], value[7],
             V{} + kInitial[0], V{} + kInitial[1], V{} + kInitial[2], V{} + kInitial[3],
             counter_low, counter_high, V{} + bytes, V{} + flags};
  round<0>(v, m);
  round<1>(v, m);
  round<2>(v, m);
  round<3>(v, m);
  round<4>(v, m);
  round<5>(v, m);
  round<6>(v, m);
  for (int i = 0; i < 8; ++i) value[i] = v[i] ^ v[i + 8];
}

/// Inputs 0 .. N-1 of the job, whose size is a multiple of a block; out[i] gets the 8 words of input i.
template <int N>
RM_BLAKE3_INLINE void hash(const Job& job, uint32_t (*out)[8]) {
  using V = Vector<N>;
  V value[8], low = {}, high = {};
  for (int i = 0; i < 8; ++i) value[i] = V{} + job.key[i];
  for (int i = 0; i < N; ++i) {
    const uint64_t counter = job.counter + static_cast<uint64_t>(i) * job.counter_step;
    low[i] = static_cast<uint32_t>(counter);
    high[i] = static_cast<uint32_t>(counter >> 32);
  }
  for (size_t at = 0; at < job.bytes; at += 64) {
    V m[16];
    load_block<N>(job.data + at, job.stride, m);
    // The same block of the next group of inputs: the hardware follows too few streams by itself.
    for (int i = 0; i < N; ++i) {
      __builtin_prefetch(job.data + at + static_cast<size_t>(i + N) * job.stride);
    }
    const uint32_t flags = job.flags | (at == 0 ? job.first_flags : 0) |
                           (at + 64 == job.bytes ? job.last_flags : 0);
    compress(value, m, low, high, 64, flags);
  }
  for (int i = 0; i < N; ++i) {
    for (int w = 0; w < 8; ++w) out[i][w] = value[w][i];
  }
}

}  // namespace lanes
}  // namespace rm::blake3
