// Rows of copy: runs of memcpy where both sides are dense, tiles where one side is transposed,
// single elements otherwise.  The destination decides the loop order.
#include "ops/copy/rows.hpp"

#include <cstring>

#include "common/parallel.hpp"
#include "common/row.hpp"
#include "common/rows_index.hpp"

namespace rm::cpu {
namespace {

constexpr int64_t kTile = 32;  // 32 x 32 of 4 bytes: both sides of a transpose stay in L1

template <class T>
void move_strided(char* dst, const char* src, int64_t n, int64_t ds, int64_t ss) {
  auto* d = reinterpret_cast<T*>(dst);
  const auto* s = reinterpret_cast<const T*>(src);
  for (int64_t i = 0; i < n; ++i) d[i * ds] = s[i * ss];
}

/// n x m elements; the source is dense along the first axis, the destination along the second.
template <class T>
void move_tiles(char* dst, const char* src, int64_t n, int64_t m, int64_t ds, int64_t ss) {
  auto* d = reinterpret_cast<T*>(dst);
  const auto* s = reinterpret_cast<const T*>(src);
  for (int64_t i0 = 0; i0 < n; i0 += kTile) {
    for (int64_t j0 = 0; j0 < m; j0 += kTile) {
      const int64_t i1 = std::min(n, i0 + kTile), j1 = std::min(m, j0 + kTile);
      for (int64_t i = i0; i < i1; ++i) {
        for (int64_t j = j0; j < j1; ++j) d[i * ds + j] = s[i + j * ss];
      }
    }
  }
}

class Copy {
 public:
  static constexpr const char* kOp = "copy";
  static constexpr const char* kAlgorithm = "strided";

  static const char* reject(const Problem& p) {
    return p.input(0).dtype == p.output(0).dtype ? nullptr : "the types differ: that is ewise";
  }
  static double cost_ns(const Problem& p) {
    return 100 + 0.3 * static_cast<double>(p.output(0).numel());
  }

  Copy(const Problem& p, Isa) {
    const View x = p.input(0), y = p.output(0);
    if (x.shape != y.shape) throw std::invalid_argument("[copy] expected operands of one shape");
    bytes_ = dtype_bytes(x.dtype);
    Nest nest = make_nest(y.shape, {y.stride, x.stride}, 0);
    total_ = nest.numel();
    take_inner(nest);
    outer_ = RowsIndex(nest.shape, nest.strides, 0);
    threads_ = thread_limit();
  }

  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    if (total_ == 0) return nullptr;
    const double work = (kind_ == Kind::dense ? 0.1 : 0.5) * static_cast<double>(total_ * bytes_) / 2;
    if (outer_.count() == 1 && kind_ == Kind::dense) return one_run(l, work);
    const int threads = threads_for(work, outer_.count(), threads_);
    parallel_ranges(outer_.count(), threads, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        piece(at(l.outputs[0], outer_.offset(0, i), bytes_),
              at(l.inputs[0], outer_.offset(1, i), bytes_));
      }
    });
    return nullptr;
  }

 private:
  enum class Kind { dense, tiles, elements };

  // Moves the axes one piece covers out of the nest.
  void take_inner(Nest& nest) {
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
      m_ = n_;           // along the destination's dense axis
      n_ = nest.shape[i];  // along the source's
      ds_ = nest.strides[0][i];
      // Long transposed axes are cut so that threads have pieces to share.
      drop(nest, i);
      return;
    }
  }
  static void drop(Nest& nest, int axis) {
    nest.shape.erase(nest.shape.begin() + axis);
    for (auto& s : nest.strides) s.erase(s.begin() + axis);
  }

  rm_status* one_run(const rm_launch& l, double work) const {
    const int threads = threads_for(work, n_, threads_);
    parallel_ranges(n_, threads, 64, [&](int64_t begin, int64_t end, int) {
      std::memcpy(at(l.outputs[0], begin, bytes_), at(l.inputs[0], begin, bytes_),
                  static_cast<size_t>((end - begin) * bytes_));
    });
    return nullptr;
  }

  void piece(char* dst, const char* src) const {
    if (kind_ == Kind::dense) {
      std::memcpy(dst, src, static_cast<size_t>(n_ * bytes_));
      return;
    }
    switch (bytes_) {
      case 1: return typed<uint8_t>(dst, src);
      case 2: return typed<uint16_t>(dst, src);
      case 4: return typed<uint32_t>(dst, src);
      default: return typed<uint64_t>(dst, src);
    }
  }
  template <class T>
  void typed(char* dst, const char* src) const {
    if (kind_ == Kind::tiles) {
      move_tiles<T>(dst, src, n_, m_, ds_, ss_);
    } else {
      move_strided<T>(dst, src, n_, ds_, ss_);
    }
  }

  RowsIndex outer_;
  Kind kind_ = Kind::dense;
  int64_t bytes_, total_, n_ = 1, m_ = 1, ds_ = 1, ss_ = 1;
  int threads_;
};

}  // namespace

std::span<const rm_kernel> copy_rows() { return plain_rows<Copy>(); }

}  // namespace rm::cpu
