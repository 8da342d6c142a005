// Rows of sdpa_backward: blocks of registers and caches (backward.cpp) for what training steps have, and
// the definition in f64 for every shape, stride and type, not made for speed.
#include <cmath>
#include <limits>
#include <vector>

#include "common/parallel.hpp"
#include "common/plain_vec.hpp"
#include "common/row.hpp"
#include "ops/sdpa/backward.hpp"
#include "ops/sdpa/read_shape.hpp"
#include "ops/sdpa/rows.hpp"

namespace rm::cpu {
RM_CPU_TABLE(SdpaBackwardTable, sdpa_backward_table)
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

bool is_minus_infinity(double x) { return std::isinf(x) && x < 0; }

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
          const double added = mask_ != DType::invalid ? mask_at(in[kMask], b, h, s, t) : 0.0;
          // A row that sees no key has shares of none; what lies at a closed one may be no number.
          if (is_minus_infinity(added) || is_minus_infinity(lse)) continue;
          const double w = std::exp(dot(q, k + t * d_, d_) * scale_ + added - lse);
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

/// A group of heads is one thread's: its sums over queries have one order.
class BlockedSdpaBackward {
 public:
  static constexpr const char* kOp = "sdpa_backward";
  static constexpr const char* kAlgorithm = "blocked";

  static const char* reject(const Problem& p) {
    if (const char* why = SdpaBackward::reject(p)) return why;
    if (p.input(kQ).dtype == DType::f64) return "blocked: f32, bf16 and f16 only";
    if (p.input(kLse).dtype != DType::f32) return "blocked: the log-sum-exp is not f32";
    for (size_t i = 0; i < 3; ++i) {
      if (p.output(i).dtype != p.input(kQ).dtype) return "mixed types";
    }
    return nullptr;
  }
  static double cost_ns(const Problem& p) { return 1000 + flops(p) / 50; }
  static std::vector<rm_edge> edges(Isa isa) {
    const SdpaBackwardTable& k = *RM_CPU_PICK(isa, sdpa_backward_table);
    return {{'S', 0, k.rows},      {'S', 0, k.row_block}, {'T', 0, k.rows},   {'T', 0, k.columns},
            {'T', 0, k.key_block}, {'D', 0, k.columns},   {'E', 0, k.columns}};
  }

  BlockedSdpaBackward(const Problem& p, Isa isa)
      : kernels_(*RM_CPU_PICK(isa, sdpa_backward_table)), flops_(flops(p)) {
    shape_.forward = read_sdpa_shape(p, p.input(kY));
    take_strides(p.input(kLse), shape_.lse);
    take_strides(p.input(kDy), shape_.dy);
    take_strides(p.output(0), shape_.dq);
    take_strides(p.output(1), shape_.dk);
    take_strides(p.output(2), shape_.dv);
    has_mask_ = p.has_input(kMask), has_last_ = p.has_input(kLast);
    tasks_ = shape_.forward.batch * shape_.forward.groups;
    threads_ = static_cast<int>(std::clamp<int64_t>(tasks_, 1, thread_limit()));
    scratch_ = kernels_.scratch_bytes(shape_);
  }

  uint64_t workspace_bytes() const { return scratch_ * static_cast<uint64_t>(threads_); }

  rm_status* launch(const rm_launch& l) const {
    const SdpaData forward{l.inputs[kQ], l.inputs[kK], l.inputs[kV],
                           has_mask_ ? l.inputs[kMask] : nullptr, const_cast<void*>(l.inputs[kY]),
                           const_cast<void*>(l.inputs[kLse])};
    SdpaBackwardData data{forward, l.inputs[kDy], l.outputs[0], l.outputs[1], l.outputs[2],
                          shape_.forward.t};
    if (has_last_) {
      data.keys = std::clamp<int64_t>(*static_cast<const int64_t*>(l.inputs[kLast]) + 1, 0, data.keys);
    }
    const int64_t groups = shape_.forward.groups;
    parallel_tasks(tasks_, threads_for(flops_ / 40, tasks_, threads_), [&](int64_t i, int thread) {
      kernels_.run(shape_, data, i / groups, i % groups,
                   static_cast<char*>(l.workspace) + scratch_ * static_cast<uint64_t>(thread));
    });
    return nullptr;
  }

 private:
  static double flops(const Problem& p) {
    const View q = p.input(kQ);
    const double keys = static_cast<double>(p.input(kK).dim(2)) *
                        (p.attr_int("is_causal", 0) != 0 ? 0.6 : 1.0);
    const auto depth = static_cast<double>(3 * q.dim(3) + 2 * p.input(kV).dim(3) + 16);
    return 2 * static_cast<double>(q.dim(0) * q.dim(1) * q.dim(2)) * keys * depth;
  }

  SdpaBackwardShape shape_{};
  const SdpaBackwardTable& kernels_;
  double flops_;
  int64_t tasks_;
  uint64_t scratch_;
  bool has_mask_, has_last_;
  int threads_;
};

}  // namespace

std::span<const rm_kernel> sdpa_backward_rows() {
  static const std::vector<rm_kernel> rows = [] {
    std::vector<rm_kernel> out;
    // The definition alone serves every problem of the schema.
    for (rm_kernel row : isa_rows<BlockedSdpaBackward>()) {
      row.traits &= ~static_cast<uint32_t>(RM_KERNEL_FALLBACK);
      out.push_back(row);
    }
    const std::span<const rm_kernel> plain = plain_rows<SdpaBackward>();
    out.insert(out.end(), plain.begin(), plain.end());
    return out;
  }();
  return rows;
}

}  // namespace rm::cpu
