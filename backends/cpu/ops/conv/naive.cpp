// Every element of y is one sum in the order channel, kernel: f32 for narrow types, f64 for f64.
#include "ops/conv/naive.hpp"

#include <algorithm>
#include <cmath>

#include "common/parallel.hpp"
#include "common/plain_vec.hpp"

namespace rm::cpu::conv {
namespace {

template <class A>
A activate(Activation kind, A v) {
  switch (kind) {
    case kRelu:
      return v < 0 ? A(0) : v;
    case kGelu:
      return v / 2 * (1 + std::erf(v * A(M_SQRT1_2)));
    case kGeluTanh:
      return v / 2 * (1 + std::tanh(A(0.7978845608028654) * (v + A(0.044715) * v * v * v)));
    case kSilu:
      return v / (1 + std::exp(-v));
    case kTanh:
      return std::tanh(v);
    case kSigmoid:
      return 1 / (1 + std::exp(-v));
    case kHardSwish:
      return v * std::min(std::max(v + 3, A(0)), A(6)) / 6;
    default:
      return v;
  }
}

// Where, along one axis, element `at` of y meets element `k` of the kernel in x; -1: nowhere.
int64_t meets(const ConvProblem& c, int axis, int64_t at, int64_t k) {
  int64_t i = 0;
  if (!c.transposed) {
    i = at * c.stride[axis] - c.begin[axis] + k * c.dilation[axis];
  } else {
    const int64_t far = at + c.begin[axis] - k * c.dilation[axis];
    if (far < 0 || far % c.stride[axis] != 0) return -1;
    i = far / c.stride[axis];
  }
  return i >= 0 && i < c.x[axis] ? i : -1;
}

template <class T, class A>
A sum_at(const ConvProblem& c, const T* x, const T* w, const Triple& at) {
  const int64_t w_from = c.step[kW][c.transposed ? 0 : 1];
  A sum = 0;
  for (int64_t i = 0; i < c.from_each(); ++i) {
    for (int64_t k0 = 0; k0 < c.k[0]; ++k0) {
      const int64_t x0 = meets(c, 0, at[0], k0);
      for (int64_t k1 = 0; x0 >= 0 && k1 < c.k[1]; ++k1) {
        const int64_t x1 = meets(c, 1, at[1], k1);
        for (int64_t k2 = 0; x1 >= 0 && k2 < c.k[2]; ++k2) {
          const int64_t x2 = meets(c, 2, at[2], k2);
          if (x2 < 0) continue;
          const auto& s = c.step[kX];
          const auto& t = c.step[kW];
          sum += static_cast<A>(get(x[i * s[1] + x0 * s[2] + x1 * s[3] + x2 * s[4]])) *
                 static_cast<A>(get(w[i * w_from + k0 * t[2] + k1 * t[3] + k2 * t[4]]));
        }
      }
    }
  }
  return sum;
}

template <class T, class A>
void one_row(const ConvProblem& c, const rm_launch& l, int64_t n, int64_t o, int64_t y0, int64_t y1) {
  const int64_t group = o / c.to_each(), inner = o % c.to_each();
  const T* x = static_cast<const T*>(l.inputs[kX]) + n * c.step[kX][0] +
               group * c.from_each() * c.step[kX][1];
  const T* w = static_cast<const T*>(l.inputs[kW]) +
               (c.transposed ? group * c.from_each() * c.step[kW][0] + inner * c.step[kW][1]
                             : o * c.step[kW][0]);
  const auto place = [&](Operand operand, int64_t y2) {
    const auto& s = c.step[operand];
    return n * s[0] + o * s[1] + y0 * s[2] + y1 * s[3] + y2 * s[4];
  };
  for (int64_t y2 = 0; y2 < c.y[2]; ++y2) {
    A v = sum_at<T, A>(c, x, w, {y0, y1, y2});
    if (c.given[kBias]) {
      v += static_cast<A>(get(static_cast<const T*>(l.inputs[kBias])[o * c.step[kBias][0]]));
    }
    if (c.given[kResidual]) {
      v += static_cast<A>(get(static_cast<const T*>(l.inputs[kResidual])[place(kResidual, y2)]));
    }
    put(activate(c.activation, v), static_cast<T*>(l.outputs[0]) + place(kY, y2));
  }
}

}  // namespace

void NaiveConv::launch(const rm_launch& l) const {
  const int64_t rows = c_.batch * c_.to * c_.y[0] * c_.y[1];
  if (c_.y[2] == 0 || rows == 0) return;
  const auto run = [&](auto type, auto sum) {
    using T = decltype(type);
    using A = decltype(sum);
    parallel_ranges(rows, threads_for(c_.flops(), rows, thread_limit()), 1,
                    [&](int64_t begin, int64_t end, int) {
                      for (int64_t r = begin; r < end; ++r) {
                        const int64_t y1 = r % c_.y[1], y0 = r / c_.y[1] % c_.y[0];
                        const int64_t o = r / (c_.y[1] * c_.y[0]) % c_.to;
                        one_row<T, A>(c_, l, r / (c_.y[1] * c_.y[0] * c_.to), o, y0, y1);
                      }
                    });
  };
  switch (c_.dtype) {
    case DType::f32:
      return run(float{}, float{});
    case DType::f64:
      return run(double{}, double{});
    case DType::bf16:
      return run(bf16{}, float{});
    default:
      return run(f16{}, float{});
  }
}

}  // namespace rm::cpu::conv
