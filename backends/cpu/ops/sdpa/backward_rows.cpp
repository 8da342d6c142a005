// Rows of sdpa_backward by their definition, in f64: correct for every shape and stride, not made for
// speed. Training steps on the CPU have products and softmax instead.
#include <cmath>
#include <limits>

#include "common/parallel.hpp"
#include "common/plain_vec.hpp"
#include "common/row.hpp"
#include "ops/sdpa/rows.hpp"

namespace rm::cpu {
namespace {

enum Input : size_t { kQ, kK, kV, kMask, kLast, kY, kLse, kDy, kInputs };

struct Rows {
  const char* at;
  int64_t stride[4];
};

template <class T>
double read(const Rows& x, int64_t b, int64_t h, int64_t s, int64_t d) {
  return static_cast<double>(
      get(reinterpret_cast<const T*>(x.at)[b * x.stride[0] + h * x.stride[1] + s * x.stride[2] +
                                           d * x.stride[3]]));
}

template <class T>
void write(const Rows& x, int64_t b, int64_t h, int64_t s, int64_t d, double value) {
  put(value, reinterpret_cast<T*>(const_cast<char*>(x.at)) + b * x.stride[0] + h * x.stride[1] +
                 s * x.stride[2] + d * x.stride[3]);
}

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void add_scaled(double* to, double by, const double* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += by * from[i];
}

class SdpaBackward {
 public:
  static constexpr const char* kOp = "sdpa_backward";
  static constexpr const char* kAlgorithm = "rows";

  static const char* reject(const Problem& p) {
    const View q = p.input(kQ), k = p.input(kK), v = p.input(kV);
    for (size_t i : {kQ, kK, kV, kY, kDy}) {
      if (p.input(i).rank() != 4) return "rank is not 4";
      if (p.input(i).dtype != q.dtype) return "mixed types";
    }
    if (p.num_outputs() != 3 || p.input(kLse).rank() != 3) return "not the results of sdpa";
    if (!is_float(q.dtype) || !is_float(p.input(kLse).dtype)) return "operands of another type";
    if (k.dim(1) == 0 ? q.dim(1) != 0 : q.dim(1) % k.dim(1)) {
      return "query heads are not a multiple of key heads";
    }
    if (k.dim(2) != v.dim(2)) return "keys and values of different lengths";
    if (!p.has_input(kMask)) return nullptr;
    const View m = p.input(kMask);
    if (m.rank() != 4) return "the mask's rank is not 4";
    return is_float(m.dtype) || m.dtype == DType::boolean ? nullptr
                                                          : "the mask is neither bool nor float";
  }
  static double cost_ns(const Problem& p) { return 1000 + 2 * work(p); }

  SdpaBackward(const Problem& p, Isa) {
    const View q = p.input(kQ), k = p.input(kK);
    batch_ = q.dim(0), heads_ = q.dim(1), groups_ = k.dim(1), s_ = q.dim(2), t_ = k.dim(2);
    d_ = q.dim(3), e_ = p.input(kV).dim(3);
    type_ = q.dtype, lse_type_ = p.input(kLse).dtype;
    for (size_t i : {kQ, kK, kV, kMask, kY, kLse, kDy}) {
      if (p.has_input(i)) take(p.input(i), in_[i]);
    }
    for (size_t i = 0; i < 3; ++i) take(p.output(i), out_[i]);
    if (p.has_input(kMask)) mask_ = p.input(kMask).dtype;
    if (p.has_input(kLast)) last_ = p.input(kLast).dtype;
    scale_ = p.attr_float("scale", d_ ? 1.0 / std::sqrt(static_cast<double>(d_)) : 1.0);
    causal_ = p.attr_int("is_causal", 0) != 0;
    work_ = work(p), threads_ = thread_limit();
  }

  uint64_t workspace_bytes() const { return static_cast<uint64_t>(threads_) * scratch_doubles() * 8; }

  rm_status* launch(const rm_launch& l) const {
    Rows in[kInputs], out[3];
    for (size_t i = 0; i < kInputs; ++i) in[i] = rows_at(in_[i], l.inputs[i]);
    for (size_t i = 0; i < 3; ++i) out[i] = rows_at(out_[i], l.outputs[i]);
    int64_t last = std::numeric_limits<int64_t>::max();
    if (last_ != DType::invalid) last = *static_cast<const int64_t*>(l.inputs[kLast]);
    const int64_t tasks = batch_ * groups_;
    auto* memory = static_cast<double*>(l.workspace);
    parallel_ranges(tasks, threads_for(work_, tasks, threads_), 1,
                    [&](int64_t begin, int64_t end, int thread) {
                      double* scratch = memory + thread * static_cast<int64_t>(scratch_doubles());
                      for (int64_t i = begin; i < end; ++i) {
                        visit(type_, [&](auto x) {
                          if constexpr (kIsFloat<decltype(x)>) {
                            group<decltype(x)>(in, out, i / groups_, i % groups_, last, scratch);
                          }
                          return 0;
                        });
                      }
                    });
    return nullptr;
  }

 private:
  struct Strides {
    int64_t of[4] = {};
  };

  static double work(const Problem& p) {
    const View q = p.input(kQ);
    return static_cast<double>(q.numel() * p.input(kK).dim(2)) * 5;
  }
  static void take(const View& v, Strides& to) {
    for (int i = 0; i < v.rank(); ++i) to.of[i] = v.stride[static_cast<size_t>(i)];
  }
  static Rows rows_at(const Strides& s, const void* at) {
    return {static_cast<const char*>(at), {s.of[0], s.of[1], s.of[2], s.of[3]}};
  }
  // K, V and their gradients; a row of q, dq, dy and y.
  uint64_t scratch_doubles() const {
    return static_cast<uint64_t>(2 * t_ * (d_ + e_) + 2 * (d_ + e_) + 8);
  }

  double mask_at(const Rows& m, int64_t b, int64_t h, int64_t s, int64_t t) const {
    if (mask_ != DType::boolean) {
      return visit(mask_, [&](auto x) { return read<decltype(x)>(m, b, h, s, t); });
    }
    const bool open = reinterpret_cast<const uint8_t*>(m.at)[b * m.stride[0] + h * m.stride[1] +
                                                             s * m.stride[2] + t * m.stride[3]] != 0;
    return open ? 0.0 : -std::numeric_limits<double>::infinity();
  }

  /// All queries of one group of heads: its keys and values get sums over them.
  template <class T>
  void group(const Rows* in, const Rows* out, int64_t b, int64_t g, int64_t last,
             double* scratch) const {
    double *k = scratch, *v = k + t_ * d_, *dk = v + t_ * e_, *dv = dk + t_ * d_;
    double *q = dv + t_ * e_, *dq = q + d_, *dy = dq + d_, *y = dy + e_;
    for (int64_t t = 0; t < t_; ++t) {
      for (int64_t i = 0; i < d_; ++i) k[t * d_ + i] = read<T>(in[kK], b, g, t, i);
      for (int64_t i = 0; i < e_; ++i) v[t * e_ + i] = read<T>(in[kV], b, g, t, i);
    }
    std::fill(dk, q, 0.0);
    const int64_t share = heads_ / groups_;
    for (int64_t h = g * share; h < (g + 1) * share; ++h) {
      for (int64_t s = 0; s < s_; ++s) {
        for (int64_t i = 0; i < d_; ++i) q[i] = read<T>(in[kQ], b, h, s, i), dq[i] = 0;
        for (int64_t i = 0; i < e_; ++i) {
          dy[i] = read<T>(in[kDy], b, h, s, i), y[i] = read<T>(in[kY], b, h, s, i);
        }
        const double lse = visit(lse_type_, [&](auto x) { return read<decltype(x)>(in[kLse], b, h, s, 0); });
        const double mean = dot(dy, y, e_);
        const int64_t end = std::min(causal_ ? s + 1 : t_, std::min(t_, last < t_ ? last + 1 : t_));
        for (int64_t t = 0; t < end; ++t) {
          double score = dot(q, k + t * d_, d_) * scale_;
          if (mask_ != DType::invalid) score += mask_at(in[kMask], b, h, s, t);
          // A row that sees no key has shares of none.
          const double w = std::isinf(lse) && lse < 0 ? 0.0 : std::exp(score - lse);
          if (w == 0) continue;
          const double ds = w * (dot(dy, v + t * e_, e_) - mean) * scale_;
          add_scaled(dq, ds, k + t * d_, d_);
          add_scaled(dk + t * d_, ds, q, d_);
          add_scaled(dv + t * e_, w, dy, e_);
        }
        for (int64_t i = 0; i < d_; ++i) write<T>(out[0], b, h, s, i, dq[i]);
      }
    }
    for (int64_t t = 0; t < t_; ++t) {
      for (int64_t i = 0; i < d_; ++i) write<T>(out[1], b, g, t, i, dk[t * d_ + i]);
      for (int64_t i = 0; i < e_; ++i) write<T>(out[2], b, g, t, i, dv[t * e_ + i]);
    }
  }

  int64_t batch_, heads_, groups_, s_, t_, d_, e_;
  DType type_, lse_type_, mask_ = DType::invalid, last_ = DType::invalid;
  Strides in_[kInputs], out_[3];
  double scale_, work_;
  bool causal_;
  int threads_ = 1;
};

}  // namespace

std::span<const rm_kernel> sdpa_backward_rows() { return plain_rows<SdpaBackward>(); }

}  // namespace rm::cpu
