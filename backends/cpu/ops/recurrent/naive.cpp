#include "ops/recurrent/naive.hpp"

#include <algorithm>
#include <cmath>

#include "common/plain_vec.hpp"

namespace rm::cpu::recurrent {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// One row of the batch; the state is kept in double.
template <class T>
struct Row {
  const RecurrentProblem& r;
  const T *x, *w, *bias, *proj;
  double *h, *c, *made, *sums;

  void step(int64_t t) const {
    const auto at = [&](int64_t gate, int64_t j) {
      return get(x[t * r.in[kX].t + (gate * r.hidden + j) * r.in[kX].n]);
    };
    for (int64_t n = 0; n < r.gates * r.hidden; ++n) {
      sums[n] = r.has_bias ? get(bias[n * r.in[kBias].n]) : 0.0;
      for (int64_t k = 0; k < r.out; ++k) sums[n] += get(w[n * r.in[kW].b + k * r.in[kW].n]) * h[k];
    }
    for (int64_t j = 0; j < r.hidden; ++j) {
      const auto gate = [&](int64_t g) { return at(g, j) + sums[g * r.hidden + j]; };
      if (r.cell == Cell::lstm) {
        c[j] = sigmoid(gate(1)) * c[j] + sigmoid(gate(0)) * std::tanh(gate(2));
        made[j] = sigmoid(gate(3)) * std::tanh(c[j]);
      } else if (r.cell == Cell::gru) {
        const double n = std::tanh(at(2, j) + sigmoid(gate(0)) * sums[2 * r.hidden + j]);
        made[j] = n + sigmoid(gate(1)) * (h[j] - n);
      } else {
        made[j] = r.cell == Cell::tanh ? std::tanh(gate(0)) : gate(0) < 0 ? 0 : gate(0);
      }
    }
    for (int64_t k = 0; k < r.out; ++k) {
      if (!r.has_proj) {
        h[k] = made[k];
        continue;
      }
      h[k] = 0;
      for (int64_t j = 0; j < r.hidden; ++j) {
        h[k] += get(proj[k * r.in[kProj].b + j * r.in[kProj].n]) * made[j];
      }
    }
  }
};

template <class T>
const T* pointer(const rm_launch& l, size_t input, int64_t offset = 0) {
  return l.inputs[input] ? static_cast<const T*>(l.inputs[input]) + offset : nullptr;
}

template <class T>
void run(const RecurrentProblem& r, const rm_launch& l) {
  double* h = static_cast<double*>(l.workspace);
  double *c = h + r.out, *made = c + r.hidden, *sums = made + r.hidden;
  for (int64_t b = 0; b < r.batch; ++b) {
    const Row<T> row{r,           pointer<T>(l, kX, b * r.in[kX].b),
                     pointer<T>(l, kW), r.has_bias ? pointer<T>(l, kBias) : nullptr,
                     r.has_proj ? pointer<T>(l, kProj) : nullptr, h, c, made, sums};
    for (int64_t k = 0; k < r.out; ++k) {
      h[k] = get(pointer<T>(l, kH)[b * r.in[kH].b + k * r.in[kH].n]);
    }
    for (int64_t j = 0; r.is_lstm() && j < r.hidden; ++j) {
      c[j] = get(pointer<T>(l, kC)[b * r.in[kC].b + j * r.in[kC].n]);
    }
    for (int64_t n = 0; n < r.steps; ++n) {
      const int64_t t = r.reverse ? r.steps - 1 - n : n;
      row.step(t);
      T* y = static_cast<T*>(l.outputs[0]) + t * r.y.t + b * r.y.b;
      for (int64_t k = 0; k < r.out; ++k) put(h[k], y + k * r.y.n);
    }
    T* last = static_cast<T*>(l.outputs[1]) + b * r.h.b;
    for (int64_t k = 0; k < r.out; ++k) put(h[k], last + k * r.h.n);
    for (int64_t j = 0; r.is_lstm() && j < r.hidden; ++j) {
      put(c[j], static_cast<T*>(l.outputs[2]) + b * r.c.b + j * r.c.n);
    }
  }
}

}  // namespace

uint64_t NaiveSteps::workspace_bytes() const {
  return static_cast<uint64_t>(r_.out + (2 + r_.gates) * r_.hidden) * sizeof(double);
}

void NaiveSteps::launch(const rm_launch& l) const {
  with_type(r_.type, [&](auto type) { run<decltype(type)>(r_, l); });
}

}  // namespace rm::cpu::recurrent
