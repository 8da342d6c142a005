// The destination decides the loop order; pieces of the innermost axes are shared over threads.
#include "common/strided_copy.hpp"

#include <cstring>
#include <stdexcept>

#include "common/parallel.hpp"
#include "common/plain_vec.hpp"

namespace rm::cpu {
namespace {

constexpr int64_t kTile = 16;  // 16 x 16: a cache line of 4-byte elements on both sides

template <class T>
void move_strided(T* dst, const T* src, int64_t n, int64_t ds, int64_t ss) {
  if (ds == 1 && ss == 0) {
    for (int64_t i = 0; i < n; ++i) dst[i] = src[0];
    return;
  }
  for (int64_t i = 0; i < n; ++i) dst[i * ds] = src[i * ss];
}

/// One tile of a transpose through a small square buffer: both sides move in whole lines.
template <class T>
void move_tile(T* dst, const T* src, int64_t n, int64_t m, int64_t ds, int64_t ss) {
  T tile[kTile][kTile];
  if (n == kTile && m == kTile) {
    for (int64_t j = 0; j < kTile; ++j) {
      for (int64_t i = 0; i < kTile; ++i) tile[i][j] = src[i + j * ss];
    }
    for (int64_t i = 0; i < kTile; ++i) std::memcpy(dst + i * ds, tile[i], sizeof tile[i]);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < m; ++j) dst[i * ds + j] = src[i + j * ss];
  }
}

/// n x m elements; the source is dense along the first axis, the destination along the second.
template <class T>
void move_tiles(T* dst, const T* src, int64_t n, int64_t m, int64_t ds, int64_t ss) {
  for (int64_t i = 0; i < n; i += kTile) {
    for (int64_t j = 0; j < m; j += kTile) {
      move_tile(dst + i * ds + j, src + i + j * ss, std::min(kTile, n - i), std::min(kTile, m - j),
                ds, ss);
    }
  }
}

void drop(Nest& nest, int axis) {
  nest.shape.erase(nest.shape.begin() + axis);
  for (auto& s : nest.strides) s.erase(s.begin() + axis);
}

}  // namespace

StridedCopy::StridedCopy(const View& x, const View& y) {
  if (x.shape != y.shape || x.dtype != y.dtype) {
    throw std::invalid_argument("[copy] expected operands of one shape and type");
  }
  bytes_ = dtype_bytes(x.dtype);
  Nest nest = make_nest(y.shape, {y.stride, x.stride}, 0);
  total_ = nest.numel();
  take_inner(nest);
  outer_ = RowsIndex(nest.shape, nest.strides, 0);
  threads_ = thread_limit();
}

// Moves the axes one piece covers out of the nest.
void StridedCopy::take_inner(Nest& nest) {
  n_ = nest.shape.back();
  ds_ = nest.strides[0].back();
  ss_ = nest.strides[1].back();
  drop(nest, nest.rank() - 1);
  if ((ds_ == 1 && ss_ == 1) || n_ == 1) {
    kind_ = Kind::dense;
    return;
  }
  kind_ = Kind::elements;
  if (ds_ != 1) return;
  for (int i = nest.rank() - 1; i >= 0; --i) {
    if (nest.strides[1][i] != 1 || nest.shape[i] < 4) continue;
    kind_ = Kind::tiles;
    m_ = n_;             // along the destination's dense axis
    n_ = nest.shape[i];  // along the source's
    ds_ = nest.strides[0][i];
    drop(nest, i);
    return;
  }
}

void StridedCopy::run(void* y, const void* x, bool serial) const {
  if (total_ == 0 || x == y) return;
  const double work = (kind_ == Kind::dense ? 0.05 : 0.25) * static_cast<double>(total_ * bytes_);
  const int threads = serial ? 1 : threads_for(work, total_, threads_);
  // With few outer pieces the first inner axis is shared instead.
  const bool inside = outer_.count() < threads;
  const int64_t shares = inside ? n_ : outer_.count();
  parallel_ranges(shares, threads, inside ? 64 : 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = inside ? 0 : begin; i < (inside ? outer_.count() : end); ++i) {
      piece(at(y, outer_.offset(0, i), bytes_), at(x, outer_.offset(1, i), bytes_),
            inside ? begin : 0, inside ? end : n_);
    }
  });
}

/// Elements [begin, end) of the piece's first axis.
void StridedCopy::piece(char* dst, const char* src, int64_t begin, int64_t end) const {
  if (kind_ == Kind::dense) {
    std::memcpy(dst + begin * bytes_, src + begin * bytes_,
                static_cast<size_t>((end - begin) * bytes_));
    return;
  }
  visit_bytes(bytes_, [&](auto zero) {
    using T = decltype(zero);
    auto* d = reinterpret_cast<T*>(dst);
    const auto* s = reinterpret_cast<const T*>(src);
    if (kind_ == Kind::tiles) {
      move_tiles<T>(d + begin * ds_, s + begin, end - begin, m_, ds_, ss_);
    } else {
      move_strided<T>(d + begin * ds_, s + begin * ss_, end - begin, ds_, ss_);
    }
  });
}

}  // namespace rm::cpu
