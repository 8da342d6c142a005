// Widens operands to one of three classes (f64, f32, i64), sums in that class, rounds once.
#include "ops/gemm/naive.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/parallel.hpp"

namespace rm::cpu::gemm {
namespace {

float float_from_bf16(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

uint16_t bf16_from_float(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (f != f) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float float_from_f16(uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  const float sign = h & 0x8000 ? -1.f : 1.f;
  if (exponent == 31) {
    return fraction ? std::numeric_limits<float>::quiet_NaN()
                    : sign * std::numeric_limits<float>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
}

uint16_t f16_from_float(float f) {
  const uint16_t sign = std::signbit(f) ? 0x8000 : 0;
  const float magnitude = std::fabs(f);
  if (f != f) return sign | 0x7e00;
  if (magnitude >= 65520.f) return sign | 0x7c00;
  int exponent = -14;
  if (magnitude >= 0x1p-14f) exponent = std::ilogb(magnitude);
  // nearbyint rounds to even in the default mode; a carry into the exponent is right as it is.
  const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  if (magnitude < 0x1p-14f) return static_cast<uint16_t>(sign | units);
  return static_cast<uint16_t>(sign | (((exponent + 15) << 10) + units - 1024));
}

template <class C>
C load(DType t, const void* base, int64_t i) {
  switch (t) {
    case DType::f32:
      return static_cast<C>(static_cast<const float*>(base)[i]);
    case DType::f64:
      return static_cast<C>(static_cast<const double*>(base)[i]);
    case DType::bf16:
      return static_cast<C>(float_from_bf16(static_cast<const uint16_t*>(base)[i]));
    case DType::f16:
      return static_cast<C>(float_from_f16(static_cast<const uint16_t*>(base)[i]));
    case DType::i64:
      return static_cast<C>(static_cast<const int64_t*>(base)[i]);
    case DType::i32:
      return static_cast<C>(static_cast<const int32_t*>(base)[i]);
    case DType::i16:
      return static_cast<C>(static_cast<const int16_t*>(base)[i]);
    case DType::i8:
      return static_cast<C>(static_cast<const int8_t*>(base)[i]);
    case DType::u64:
      return static_cast<C>(static_cast<const uint64_t*>(base)[i]);
    case DType::u32:
      return static_cast<C>(static_cast<const uint32_t*>(base)[i]);
    case DType::u16:
      return static_cast<C>(static_cast<const uint16_t*>(base)[i]);
    default:
      return static_cast<C>(static_cast<const uint8_t*>(base)[i]);
  }
}

template <class C>
void put(DType t, void* base, int64_t i, C x) {
  switch (t) {
    case DType::f32:
      static_cast<float*>(base)[i] = static_cast<float>(x);
      break;
    case DType::f64:
      static_cast<double*>(base)[i] = static_cast<double>(x);
      break;
    case DType::bf16:
      static_cast<uint16_t*>(base)[i] = bf16_from_float(static_cast<float>(x));
      break;
    case DType::f16:
      static_cast<uint16_t*>(base)[i] = f16_from_float(static_cast<float>(x));
      break;
    case DType::i64:
      static_cast<int64_t*>(base)[i] = static_cast<int64_t>(x);
      break;
    case DType::i32:
      static_cast<int32_t*>(base)[i] = static_cast<int32_t>(x);
      break;
    case DType::i16:
      static_cast<int16_t*>(base)[i] = static_cast<int16_t>(x);
      break;
    case DType::i8:
      static_cast<int8_t*>(base)[i] = static_cast<int8_t>(x);
      break;
    case DType::u64:
      static_cast<uint64_t*>(base)[i] = static_cast<uint64_t>(x);
      break;
    case DType::u32:
      static_cast<uint32_t*>(base)[i] = static_cast<uint32_t>(x);
      break;
    case DType::u16:
      static_cast<uint16_t*>(base)[i] = static_cast<uint16_t>(x);
      break;
    case DType::boolean:
      static_cast<uint8_t*>(base)[i] = x != C{};
      break;
    default:
      static_cast<uint8_t*>(base)[i] = static_cast<uint8_t>(x);
      break;
  }
}

double activate(Activation a, double x) {
  switch (a) {
    case kRelu:
      return x < 0 ? 0.0 : x;
    case kGelu:
      return 0.5 * x * std::erfc(x * -0.70710678118654752440);
    case kGeluTanh:
      return 0.5 * x * (1 + std::tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
    case kSilu:
      return x / (1 + std::exp(-x));
    case kTanh:
      return std::tanh(x);
    case kSigmoid:
      return 1 / (1 + std::exp(-x));
    default:
      return x;
  }
}

struct Row {
  const void* b;
  const void* bias;
  const void* residual;
  void* c;
  int64_t residual_at, c_at, b_at;
};

template <class C>
C finish(const GemmProblem& g, C sum, bool has_bias, C bias) {
  if constexpr (std::is_same_v<C, int64_t>) {
    if (g.alpha == std::nearbyint(g.alpha) && g.activation <= kRelu) {
      // Unsigned: wraps around instead of undefined overflow.
      const auto x = static_cast<int64_t>(static_cast<uint64_t>(static_cast<int64_t>(g.alpha)) *
                                              static_cast<uint64_t>(sum) +
                                          static_cast<uint64_t>(bias));
      return g.activation == kRelu ? std::max<int64_t>(x, 0) : x;
    }
    return static_cast<int64_t>(
        activate(g.activation, g.alpha * static_cast<double>(sum) + static_cast<double>(bias)));
  } else {
    C x = g.alpha == 1.0 ? sum : static_cast<C>(g.alpha) * sum;
    if (has_bias) x += bias;
    // In double: the textbook formulas lose digits in f32.
    return static_cast<C>(activate(g.activation, static_cast<double>(x)));
  }
}

template <class C>
C add(C a, C b) {
  if constexpr (std::is_same_v<C, int64_t>) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  } else {
    return a + b;
  }
}

template <class C>
C multiply_add(C a, C b, C sum) {
  if constexpr (std::is_same_v<C, int64_t>) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b) +
                                static_cast<uint64_t>(sum));
  } else {
    return a * b + sum;
  }
}

template <class C>
void run_row(const GemmProblem& g, const C* a, const Row& r) {
  for (int64_t n = 0; n < g.n; ++n) {
    C sum{};
    const int64_t b_at = r.b_at + n * g.col[kB];
    for (int64_t k = 0; k < g.k; ++k) {
      sum = multiply_add(a[k], load<C>(g.dtype[kB], r.b, b_at + k * g.row[kB]), sum);
    }
    const C bias = r.bias ? load<C>(g.dtype[kBias], r.bias, n * g.col[kBias]) : C{};
    C x = finish(g, sum, r.bias != nullptr, bias);
    if (r.residual) {
      x = add(x, load<C>(g.dtype[kResidual], r.residual, r.residual_at + n * g.col[kResidual]));
    }
    put(g.dtype[kC], r.c, r.c_at + n * g.col[kC], x);
  }
}

template <class C>
void run(const GemmProblem& g, int threads, const rm_launch& l) {
  parallel_ranges(g.batch * g.m, threads, 1, [&](int64_t begin, int64_t end, int thread) {
    C* a = reinterpret_cast<C*>(static_cast<char*>(l.workspace) + thread * g.k * 8);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t batch = row / g.m, m = row % g.m;
      const int64_t a_at = g.offset(kA, batch) + m * g.row[kA];
      for (int64_t k = 0; k < g.k; ++k) {
        a[k] = load<C>(g.dtype[kA], l.inputs[kA], a_at + k * g.col[kA]);
      }
      run_row<C>(g, a,
                 {l.inputs[kB], g.has(kBias) ? l.inputs[kBias] : nullptr,
                  g.has(kResidual) ? l.inputs[kResidual] : nullptr, l.outputs[0],
                  g.offset(kResidual, batch) + m * g.row[kResidual],
                  g.offset(kC, batch) + m * g.row[kC], g.offset(kB, batch)});
    }
  });
}

}  // namespace

NaiveGemm::NaiveGemm(GemmProblem problem) : g_(std::move(problem)) {
  threads_ = static_cast<int>(std::clamp<double>(
      g_.flops() / 5e4, 1, std::min<double>(thread_limit(), double(g_.batch * g_.m) + 1)));
}

uint64_t NaiveGemm::workspace_bytes() const { return static_cast<uint64_t>(threads_ * g_.k * 8); }

void NaiveGemm::launch(const rm_launch& l) const {
  if (g_.empty()) return;
  const int threads = std::min(threads_, omp_get_max_threads());
  const auto any = [&](auto test) {
    for (DType t : g_.dtype) {
      if (t != DType::invalid && test(t)) return true;
    }
    return false;
  };
  if (any([](DType t) { return t == DType::f64; })) {
    run<double>(g_, threads, l);
  } else if (any(is_float)) {
    run<float>(g_, threads, l);
  } else {
    run<int64_t>(g_, threads, l);
  }
}

}  // namespace rm::cpu::gemm
