// The order of the work: steps one after the other, in each all panels, in each all rows.
//
// Invariant: a step reads the state of the step before and writes another one, so threads that share
// the panels of a step wait for each other once a step (twice with a projection). Tiles of rows are
// the same however many threads there are, and so are the results.
#include "ops/recurrent/steps.hpp"

#include <algorithm>
#include <utility>

#include "common/parallel.hpp"
#include "common/plain_vec.hpp"
#include "rm/plugin.hpp"

namespace rm::cpu::recurrent {
namespace {

constexpr double kFlopsPerNs = 25;        // of one thread: only how many threads are worth it
constexpr double kWorthWaitingNs = 4000;  // of a thread a step: waiting for the others takes 0.5 us

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int type_index(DType t) { return t == DType::f32 ? 0 : t == DType::bf16 ? 1 : 2; }

}  // namespace

/// One launch: its buffers, all f32.
struct Steps::Run {
  const Steps& s;
  const rm_launch& l;
  const char *w, *proj;
  float *state[2], *c, *made, *bias;

  template <class T>
  void begin() const {
    const RecurrentProblem& r = s.r_;
    std::fill(state[0], state[0] + r.batch * s.ld_h_, 0.f);
    for (int64_t b = 0; b < r.batch; ++b) {
      const auto* h = static_cast<const T*>(l.inputs[kH]) + b * r.in[kH].b;
      for (int64_t k = 0; k < r.out; ++k) {
        state[0][b * s.ld_h_ + k] = static_cast<float>(get(h[k * r.in[kH].n]));
      }
    }
    std::fill(bias, bias + r.gates * s.ld_c_, 0.f);
    for (int64_t g = 0; r.has_bias && g < r.gates; ++g) {
      const auto* from = static_cast<const T*>(l.inputs[kBias]) + g * r.hidden * r.in[kBias].n;
      for (int64_t j = 0; j < r.hidden; ++j) {
        bias[g * s.ld_c_ + j] = static_cast<float>(get(from[j * r.in[kBias].n]));
      }
    }
    if (!r.is_lstm()) return;
    std::fill(c, c + r.batch * s.ld_c_, 0.f);
    for (int64_t b = 0; b < r.batch; ++b) {
      const auto* from = static_cast<const T*>(l.inputs[kC]) + b * r.in[kC].b;
      for (int64_t j = 0; j < r.hidden; ++j) {
        c[b * s.ld_c_ + j] = static_cast<float>(get(from[j * r.in[kC].n]));
      }
    }
  }

  template <class T>
  void end() const {
    const RecurrentProblem& r = s.r_;
    const float* last = state[r.steps % 2];
    for (int64_t b = 0; b < r.batch; ++b) {
      auto* h = static_cast<T*>(l.outputs[1]) + b * r.h.b;
      for (int64_t k = 0; k < r.out; ++k) put(last[b * s.ld_h_ + k], h + k * r.h.n);
      if (!r.is_lstm()) continue;
      auto* to = static_cast<T*>(l.outputs[2]) + b * r.c.b;
      for (int64_t j = 0; j < r.hidden; ++j) put(c[b * s.ld_c_ + j], to + j * r.c.n);
    }
  }

  /// Panels [p0, p1) of step `n` for rows [b0, b1).
  void gates(int64_t n, int64_t p0, int64_t p1, int64_t b0, int64_t b1) const {
    const RecurrentProblem& r = s.r_;
    const int64_t t = r.reverse ? r.steps - 1 - n : n, bytes = dtype_bytes(r.type);
    StepArgs a{};
    a.hidden = r.hidden;
    a.depth = r.out;
    a.h = state[n % 2] + b0 * s.ld_h_;
    a.ld_h = s.ld_h_;
    a.rows = b1 - b0;
    a.x_row = r.in[kX].b;
    a.ld_c = s.ld_c_;
    a.ld_made = r.has_proj ? s.ld_c_ : s.ld_h_;
    a.y_row = r.y.b;
    float* to = r.has_proj ? made : state[(n + 1) % 2];
    const char* x = static_cast<const char*>(l.inputs[kX]) + (t * r.in[kX].t + b0 * a.x_row) * bytes;
    char* y = static_cast<char*>(l.outputs[0]) + (t * r.y.t + b0 * a.y_row) * bytes;
    for (int64_t p = p0; p < p1; ++p) {
      a.first = p * s.k_.width;
      a.units = std::min(s.k_.width, r.hidden - a.first);
      a.panel = w + p * s.w_.panel_bytes;
      a.x = x + a.first * bytes;
      a.bias = bias + a.first;
      a.c = r.is_lstm() ? c + b0 * s.ld_c_ + a.first : nullptr;
      a.made = to + b0 * a.ld_made + a.first;
      a.y = r.has_proj ? nullptr : y + a.first * bytes;
      s.k_.step[type_index(r.type)][static_cast<int>(r.cell)](a);
    }
  }

  void project(int64_t n, int64_t p0, int64_t p1, int64_t b0, int64_t b1) const {
    const RecurrentProblem& r = s.r_;
    const int64_t t = r.reverse ? r.steps - 1 - n : n, bytes = dtype_bytes(r.type);
    StepArgs a{};
    a.depth = r.hidden;
    a.h = made + b0 * s.ld_c_;
    a.ld_h = s.ld_c_;
    a.rows = b1 - b0;
    a.ld_made = s.ld_h_;
    a.y_row = r.y.b;
    char* y = static_cast<char*>(l.outputs[0]) + (t * r.y.t + b0 * a.y_row) * bytes;
    for (int64_t p = p0; p < p1; ++p) {
      a.first = p * s.k_.width;
      a.units = std::min(s.k_.width, r.out - a.first);
      a.panel = proj + p * s.proj_.panel_bytes;
      a.made = state[(n + 1) % 2] + b0 * s.ld_h_ + a.first;
      a.y = y + a.first * bytes;
      s.k_.step[type_index(r.type)][static_cast<int>(Cell::project)](a);
    }
  }

  /// Rows are independent of each other: no thread waits.
  void rows(int64_t b0, int64_t b1) const {
    for (int64_t n = 0; n < s.r_.steps; ++n) {
      gates(n, 0, s.w_.panels, b0, b1);
      if (s.r_.has_proj) project(n, 0, s.proj_.panels, b0, b1);
    }
  }

  void panels(int threads) const {
#pragma omp parallel num_threads(threads)
    {
      const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
      const auto share = [&](int64_t panels, int64_t which) { return panels * which / team; };
      for (int64_t n = 0; n < s.r_.steps; ++n) {
        gates(n, share(s.w_.panels, me), share(s.w_.panels, me + 1), 0, s.r_.batch);
#pragma omp barrier
        if (s.r_.has_proj) {
          project(n, share(s.proj_.panels, me), share(s.proj_.panels, me + 1), 0, s.r_.batch);
#pragma omp barrier
        }
      }
    }
  }
};

const char* Steps::reject(const RecurrentProblem& r) {
  if (r.hidden > 1 && r.in[kX].n != 1) return "steps: the last axis of x must be dense";
  if (r.out > 1 && r.y.n != 1) return "steps: the last axis of y must be dense";
  return nullptr;
}

Steps::Steps(const RecurrentProblem& r, const KernelSet& kernels) : r_(r), k_(kernels) {
  w_ = matrix(r_.gates, r_.hidden, r_.out);
  if (r_.has_proj) proj_ = matrix(1, r_.out, r_.hidden);
  ld_c_ = divide_up(r_.hidden, k_.width) * k_.width;
  ld_h_ = divide_up(r_.out, k_.width) * k_.width;
  for (int i = 0; i < 2; ++i) {
    layout_[i] = "recurrent:" + std::to_string(k_.width) + "x" +
                 std::to_string(i == 0 ? r_.gates : 1);
  }
}

Steps::Matrix Steps::matrix(int64_t gates, int64_t units, int64_t depth) const {
  Matrix m{gates, units, depth, divide_up(units, k_.width), 0};
  m.panel_bytes = depth * gates * k_.width * dtype_bytes(r_.type);
  return m;
}

bool Steps::packs(size_t operand) const {
  return (operand == kW && r_.constant_w) || (operand == kProj && r_.constant_proj);
}

uint64_t Steps::packed_bytes(size_t operand) const {
  return static_cast<uint64_t>(operand == kW ? w_.bytes() : proj_.bytes());
}

void Steps::pack(const Matrix& m, const Strides& s, const void* src, void* dst) const {
  k_.pack[type_index(r_.type)]({src, s.b, s.n, m.gates, m.units, m.depth, dst, 0, m.panels});
}

void Steps::prepack(size_t operand, const rm_tensor& source, void* packed) const {
  pack(operand == kW ? w_ : proj_, r_.in[operand], plugin::address(source), packed);
}

uint64_t Steps::workspace_bytes() const {
  const int64_t floats = r_.batch * (2 * ld_h_ + 2 * ld_c_) + r_.gates * ld_c_;
  return static_cast<uint64_t>(floats) * sizeof(float) +
         static_cast<uint64_t>(r_.constant_w ? 0 : w_.bytes()) +
         static_cast<uint64_t>(r_.constant_proj ? 0 : proj_.bytes());
}

Steps::Split Steps::split() const {
  const double step_ns = r_.step_flops() / kFlopsPerNs;
  const int64_t tiles = divide_up(r_.batch, k_.rows);
  const int by_rows =
      threads_for(step_ns * static_cast<double>(r_.steps), tiles, thread_limit());
  const double worth = std::min<double>(step_ns / kWorthWaitingNs, omp_get_max_threads());
  const int by_panels = static_cast<int>(std::min<double>(worth, static_cast<double>(w_.panels)));
  return by_rows >= by_panels ? Split{by_rows, true} : Split{by_panels, false};
}

void Steps::launch(const rm_launch& l) const {
  if (r_.empty()) return;
  auto* at = static_cast<float*>(l.workspace);
  const auto take = [&](int64_t floats) { return std::exchange(at, at + floats); };
  Run run{*this, l, static_cast<const char*>(l.inputs[kW]), nullptr, {}, nullptr, nullptr, nullptr};
  for (float*& state : run.state) state = take(r_.batch * ld_h_);
  run.c = take(r_.batch * ld_c_);
  run.made = take(r_.batch * ld_c_);
  run.bias = take(r_.gates * ld_c_);
  char* panels = reinterpret_cast<char*>(at);
  if (!r_.constant_w) {
    pack(w_, r_.in[kW], l.inputs[kW], panels);
    run.w = std::exchange(panels, panels + w_.bytes());
  }
  if (r_.has_proj) run.proj = static_cast<const char*>(l.inputs[kProj]);
  if (r_.has_proj && !r_.constant_proj) {
    pack(proj_, r_.in[kProj], l.inputs[kProj], panels);
    run.proj = panels;
  }
  with_type(r_.type, [&](auto type) { run.begin<decltype(type)>(); });
  const Split split = this->split();
  if (split.rows) {
    parallel_ranges(r_.batch, split.threads, k_.rows,
                    [&](int64_t b0, int64_t b1, int) { run.rows(b0, b1); });
  } else {
    run.panels(split.threads);
  }
  with_type(r_.type, [&](auto type) { run.end<decltype(type)>(); });
}

}  // namespace rm::cpu::recurrent
