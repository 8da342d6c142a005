// sdpa_decode for caches of few keys, where the time from one kernel to the next counts, not the bytes.
// A block holds all its keys at once (kTiles tiles of 16), which its number says and no length: it asks
// for them before the stream's previous kernel has ended. It is small enough to come to a
// multiprocessor beside a block of that kernel. (Blocks of sixteen warps fill one.)
// Where the caches are stable (SdpaStepArgs::stable: what is behind the launch has left them alone since
// something that waited for all before it) the keys come into shared memory, else as far as the L2
// cache. How many there are is guessed by the length of before, which the previous kernels may be
// writing: it chooses what is asked for early, the length behind the wait what counts.
#pragma once

#include "sdpa/kernels/sdpa_decode_rows_sm80.cuh"

namespace rm::cuda_ops {

template <int kHeadDim, int kBlockWarps, int kMostTiles>
struct DecodeFewShape : DecodeMemory<kHeadDim, kBlockWarps, kMostTiles * 2 * 16 * kHeadDim * 2> {
  static constexpr int kKeys = 16, kTiles = kMostTiles, kTile = kKeys * kHeadDim * 2;
  static constexpr int kRounds = (kTiles + kBlockWarps - 1) / kBlockWarps;  // tiles of a warp
  static constexpr int kBlocks = kBlockWarps > 8 ? 1 : 2;  // that a multiprocessor's registers hold
  using Sums = DecodeMemory<kHeadDim, kBlockWarps, kMostTiles * 2 * 16 * kHeadDim * 2>;
  static constexpr int kRows = (Sums::kMemory + 127) / 128 * 128;  // where DecodeFewRows lie
  static constexpr int kMemory = kRows + (kDecodeRows + 2) * kHeadDim * 2;
};

/// What a block reads behind the wait, once for all its warps: the query rows as a swizzled tile [16][kD], and
/// a step's new key and value, rotated where they are to be. All of it is asked for at once, each thread
/// two pairs of columns and their angles: one way to the L2 cache and back.
template <class T, class Shape, class Step>
class DecodeFewRows {
  static constexpr int kD = Shape::kD, kHalf = kD / 2, kPairs = kD / 4;  // pairs with partners
  static constexpr int kNew = kSdpaStep<Step> ? 2 : 0;
  static constexpr int kEach = ((kDecodeRows + kNew) * kPairs + Shape::kThreads - 1) / Shape::kThreads;

 public:
  __device__ __forceinline__ DecodeFewRows(const SdpaArgs& p, const Step& f, int b, int g, int rows,
                                           unsigned char* memory)
      : p_(p), f_(f), memory_(memory + Shape::kRows), b_(b), rows_(rows) {
#pragma unroll
    for (int n = 0; n < kEach; ++n) from_[n] = source(n, g);
    constexpr int kPieces = kD / 8;  // of a row
    for (int i = rows * kPieces + static_cast<int>(threadIdx.x); i < kDecodeRows * kPieces;
         i += Shape::kThreads) {
      reinterpret_cast<uint4*>(memory_)[i] = uint4{0, 0, 0, 0};
    }
  }

  __device__ __forceinline__ void load() {
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      if (from_[n] == nullptr) continue;
      const int d = column(n);
      low_[n] = d < p_.dim ? word_at(from_[n]) : 0u;
      high_[n] = d + kHalf < p_.dim ? word_at(from_[n] + kHalf) : 0u;
      if constexpr (kSdpaTurns<Step>) angles_[n].load(f_, b_, d, kHalf);
    }
  }

  /// Into shared memory; a barrier of the block belongs behind it.
  __device__ __forceinline__ void store() {
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      if (from_[n] == nullptr) continue;
      const int r = row(n), d = column(n);
      if constexpr (kSdpaTurns<Step>) {
        if (r <= rows_) angles_[n].turn(low_[n], high_[n]);  // the last is the value
      }
      *word(r, d) = low_[n], *word(r, d + kHalf) = high_[n];
    }
  }

  __device__ __forceinline__ std::uint32_t tile() const { return shared_address(memory_); }

  /// The new key and value into row `at` of a warp's tiles, and to `position` of the caches.
  __device__ __forceinline__ void append(int g, std::int64_t position, unsigned char* k_tile,
                                         unsigned char* v_tile, int at) const {
    constexpr int kPieces = kD / 8;
    const T* k = static_cast<const T*>(f_.k_cache) + b_ * p_.k_batch + g * p_.k_head + position * p_.k_row;
    const T* v = static_cast<const T*>(f_.v_cache) + b_ * p_.v_batch + g * p_.v_head + position * p_.v_row;
    for (int i = threadIdx.x % 32; i < 2 * kPieces; i += 32) {
      const int piece = i % kPieces;
      const uint4 x = reinterpret_cast<const uint4*>(memory_ + kDecodeRows * kD * 2)[i];
      *reinterpret_cast<uint4*>((i < kPieces ? k_tile : v_tile) + swizzled<kD * 2>(at, piece)) = x;
      reinterpret_cast<uint4*>(const_cast<T*>(i < kPieces ? k : v))[piece] = x;
    }
  }

 private:
  /// Of a thread's pair `n`: its row (behind those of the queries the key, then the value), its column.
  __device__ __forceinline__ static int row(int n) {
    return (static_cast<int>(threadIdx.x) + n * Shape::kThreads) / kPairs;
  }
  __device__ __forceinline__ static int column(int n) {
    return (static_cast<int>(threadIdx.x) + n * Shape::kThreads) % kPairs * 2;
  }
  __device__ __forceinline__ const T* source(int n, int g) const {
    const int r = row(n);
    if (r >= rows_ + kNew) return nullptr;
    if constexpr (kSdpaStep<Step>) {
      if (r == rows_) return static_cast<const T*>(f_.k) + b_ * f_.k_batch + g * f_.k_head + column(n);
      if (r > rows_) return static_cast<const T*>(f_.v) + b_ * f_.v_batch + g * f_.v_head + column(n);
    }
    const int s = p_.rows == 1 ? 0 : r / p_.ratio, h = g * p_.ratio + r - s * p_.ratio;
    return static_cast<const T*>(p_.q) + b_ * p_.q_batch + h * p_.q_head + s * p_.q_row + column(n);
  }
  __device__ __forceinline__ std::uint32_t* word(int r, int d) const {
    const int at = r < rows_ ? swizzled<kD * 2>(r, d / 8) + d % 8 * 2
                             : ((kDecodeRows + r - rows_) * kD + d) * 2;
    return reinterpret_cast<std::uint32_t*>(memory_ + at);
  }

  const SdpaArgs& p_;
  const Step& f_;
  unsigned char* const memory_;
  const int b_, rows_;
  const T* from_[kEach];
  std::uint32_t low_[kEach], high_[kEach];
  DecodeAngles<T> angles_[kEach];
};

/// The tiles of a block of p.span; a warp's are `warp`, `warp` + kWarps, ..
template <class T, class Shape>
struct DecodeFewTiles {
  static constexpr int kD = Shape::kD, kKeys = Shape::kKeys, kTile = Shape::kTile;
  const SdpaArgs& p;
  const T *k, *v;
  unsigned char* memory;
  int key0;  // the block's first

  __device__ __forceinline__ static int tile(int round) {
    return static_cast<int>(threadIdx.x) / 32 + round * Shape::kWarps;
  }
  __device__ __forceinline__ int first(int round) const { return key0 + tile(round) * kKeys; }
  /// Whether a warp's tile is one of the block's, with keys below `keys`.
  __device__ __forceinline__ bool has(int round, int keys) const {
    return tile(round) < p.span && first(round) < keys;
  }
  __device__ __forceinline__ unsigned char* at(int round) const {
    return memory + tile(round) * 2 * kTile;
  }
  /// Copies keys below `keys`, zeros behind them.
  __device__ __forceinline__ void ask(int round, int keys) const {
    const int at0 = first(round), valid = min(kKeys, keys - at0), lane = threadIdx.x % 32;
    const std::uint32_t to = shared_address(at(round));
    copy_tile<T, kD, kKeys, 32>(to, k + at0 * p.k_row, p.k_row, valid, p.dim, lane);
    copy_tile<T, kD, kKeys, 32>(to + kTile, v + at0 * p.v_row, p.v_row, valid, p.dim, lane);
  }
  /// The same as far as the L2 cache.
  __device__ __forceinline__ void prefetch(int round, int keys) const {
    const int at0 = first(round), count = min(kKeys, keys - at0), lane = threadIdx.x % 32;
    decode_ask_rows(k, p.k_row * 2, at0, count, p.dim * 2, lane);
    decode_ask_rows(v, p.v_row * 2, at0, count, p.dim * 2, lane);
  }
  /// Values that no row sees may be anything, and nothing times NaN is NaN.
  __device__ __forceinline__ void clear_values(int round, int keys) const {
    constexpr int kPieces = kD / 8;
    for (int i = (keys - first(round)) * kPieces + static_cast<int>(threadIdx.x) % 32;
         i < kKeys * kPieces; i += 32) {
      *reinterpret_cast<uint4*>(at(round) + kTile + swizzled<kD * 2>(i / kPieces, i % kPieces)) =
          uint4{0, 0, 0, 0};
    }
  }
};

template <class T, class Shape, class Step>
__device__ __forceinline__ void sdpa_decode_few_block(const SdpaArgs& p, const Step& f) {
  constexpr int kD = Shape::kD, kKeys = Shape::kKeys, kRounds = Shape::kRounds;
  static_assert(kRounds <= 2);  // what is waited for below
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) std::uint64_t received;
  const int b = blockIdx.y / p.groups, g = blockIdx.y % p.groups, rows = p.ratio * p.rows;
  const DecodeShare share(rows, kD, p.splits);
  decode_join_begin(p, share, rows, shared_address(&received));
  const DecodeFewTiles<T, Shape> tiles{p, static_cast<const T*>(p.k) + b * p.k_batch + g * p.k_head,
                                       static_cast<const T*>(p.v) + b * p.v_batch + g * p.v_head,
                                       memory, static_cast<int>(blockIdx.x) * p.span * kKeys};
  int asked = 0;  // keys below it are on their way
  if (p.early) {
    // A length that grows by one a call may be the last call's: a tile more.
    const int guess = min(p.keys, keys_of(p, b) + kKeys);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (!tiles.has(i, guess)) continue;
      if (p.stable) {
        tiles.ask(i, p.keys);
      } else {
        tiles.prefetch(i, guess);
      }
    }
    if (p.stable) asked = guess;
  }
  DecodeFewRows<T, Shape, Step> rows_of(p, f, b, g, rows, memory);
  DecodeQuery<T, kD> query;
  query.find(p, g, rows);
  DecodeMask<T, kKeys> mask[kRounds];
  // The next kernel's blocks ask for their weights as soon as they come: behind these keys.
  launch_dependents();
  wait_for_previous();  // from here on everything that earlier work wrote is there
  rows_of.load();
#pragma unroll
  for (int i = 0; i < kRounds; ++i) mask[i].load(p, query, b, tiles.first(i), rows);
  std::int64_t position = -1;
  if constexpr (kSdpaStep<Step>) position = position_of(f);
  const int keys = keys_of(p, b);  // the last: what depends on it waits for it
  rows_of.store();
  if (p.early && p.stable) copy_group_end();
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    if (tiles.has(i, keys) && !tiles.has(i, asked)) tiles.ask(i, keys);
    copy_group_end();
  }
  __syncthreads();
  query.take(rows_of.tile());
  query.look(p, rows, keys);
  SdpaWarp<T, kD, 1, kKeys> w;
  w.clear();
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    if (!tiles.has(i, keys)) break;
    const int first = tiles.first(i);
    if (i + 1 < kRounds) {
      copy_groups_wait<1>();
    } else {
      copy_groups_wait<0>();
    }
    __syncwarp();
    const bool ends = first + kKeys > keys;
    if (ends) tiles.clear_values(i, keys);
    if constexpr (kSdpaStep<Step>) {
      if (position >= first && position < min(first + kKeys, keys)) {
        unsigned char* there = tiles.at(i);
        rows_of.append(g, position, there, there + Shape::kTile, static_cast<int>(position) - first);
      }
    }
    __syncwarp();
    const std::uint32_t at = shared_address(tiles.at(i));
    query.attend(p, b, first, at, at + Shape::kTile, w, &mask[i]);
  }
  copy_groups_wait<0>();
  w.finish_totals();
  __syncthreads();  // the tiles become [warp][16 rows][kD + 2] floats
  decode_leave(w, rows, memory);
  decode_join<T, Shape>(p, share, b, g, 0, rows, memory, shared_address(&received));
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    sdpa_decode_few(const SdpaArgs p) {
  sdpa_decode_few_block<T, Shape>(p, SdpaNoStep{});
}

template <class T, class Shape, class Step>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    sdpa_decode_few_step(const SdpaArgs p, const Step f) {
  sdpa_decode_few_block<T, Shape>(p, f);
}

}  // namespace rm::cuda_ops
