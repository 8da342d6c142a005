// Every gemm row this machine can run, against sums in double, over ordinary and hostile problems.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <omp.h>
#include <time.h>

#include <algorithm>
#include <random>
#include <tuple>

#include "harness.hpp"

namespace gemm_test {
namespace {

struct Spec {
  DLDataType dtype = kF32;
  std::vector<int64_t> lead;  // leading axes of a and c
  int64_t m = 1, n = 1, k = 1;
  bool batched_b = false, trans_b = true, constant_b = true, bias = false, residual = false;
  std::string activation = "none";
  double alpha = 1.0;
  int64_t gap = 0;         // extra elements between the rows of a, residual and c
  bool scattered = false;  // a's last axis is not dense, leading axes do not fold
  bool turned = false;     // the residual is a transposed view
  double special = 0.0;    // share of NaN and Inf in the data
};

std::string describe(const Spec& s) {
  std::string lead;
  for (int64_t d : s.lead) lead += std::to_string(d) + "x";
  return lead + std::to_string(s.m) + "x" + std::to_string(s.n) + "x" + std::to_string(s.k) +
         " bits=" + std::to_string(s.dtype.bits) + " code=" + std::to_string(s.dtype.code) +
         (s.trans_b ? " trans_b" : "") + (s.batched_b ? " batched_b" : "") +
         (s.constant_b ? " constant" : "") + (s.bias ? " bias" : "") +
         (s.residual ? " residual" : "") + " " + s.activation +
         " alpha=" + std::to_string(s.alpha) + " gap=" + std::to_string(s.gap) +
         (s.scattered ? " scattered" : "") + (s.turned ? " turned" : "") + " special=" + std::to_string(s.special);
}

using Random = std::mt19937_64;

void fill(Tensor& t, Random& random, double special) {
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform(0, 1);
  const bool integer = t.dtype.code == kDLInt;
  for (int64_t i = 0; i < t.elements; ++i) {
    double x = integer ? std::floor(uniform(random) * 7 - 3) : normal(random);
    if (!integer && uniform(random) < special) {
      const double kinds[] = {NAN, INFINITY, -INFINITY};
      x = kinds[random() % 3];
    }
    set(t.dtype, t.data(), i, x);
  }
}

/// Row-major strides with `gap` unused elements after each row (last axis dense).
std::vector<int64_t> gapped(const std::vector<int64_t>& dims, int64_t gap) {
  std::vector<int64_t> steps(dims.size());
  steps.back() = 1;
  int64_t step = std::max<int64_t>(dims.back(), 1) + gap;
  for (size_t i = dims.size() - 1; i-- > 0; step *= std::max<int64_t>(dims[i], 1)) steps[i] = step;
  return steps;
}

struct Operands {
  Tensor a, b, bias, residual, c;
};

Operands make_operands(const Spec& s, Random& random) {
  const auto with_lead = [&](int64_t rows, int64_t cols) {
    std::vector<int64_t> dims = s.lead;
    dims.push_back(rows), dims.push_back(cols);
    return dims;
  };
  const auto a_dims = with_lead(s.m, s.k), c_dims = with_lead(s.m, s.n);
  std::vector<int64_t> a_steps = gapped(a_dims, s.gap), c_steps = gapped(c_dims, s.gap);
  if (s.scattered) {
    // a as a transposed view; c with its leading axis innermost but one (heads inside tokens).
    std::swap(a_steps[a_steps.size() - 1], a_steps[a_steps.size() - 2]);
    a_steps[a_steps.size() - 1] = std::max<int64_t>(s.m, 1) + s.gap;
    a_steps[a_steps.size() - 2] = 1;
    int64_t step = (std::max<int64_t>(s.m, 1) + s.gap) * std::max<int64_t>(s.k, 1);
    for (size_t i = s.lead.size(); i-- > 0; step *= s.lead[i]) a_steps[i] = step;
    step = std::max<int64_t>(s.n, 1) + s.gap;
    for (size_t i = s.lead.size(); i-- > 0; step *= std::max<int64_t>(s.lead[i], 1))
      c_steps[i] = step;
    c_steps[c_steps.size() - 2] = step;
  }
  const auto b_dims = s.batched_b
                          ? with_lead(s.trans_b ? s.n : s.k, s.trans_b ? s.k : s.n)
                          : std::vector<int64_t>{s.trans_b ? s.n : s.k, s.trans_b ? s.k : s.n};
  std::vector<int64_t> residual_steps = c_steps;
  if (s.turned) {
    residual_steps = gapped(with_lead(s.n, s.m), s.gap);
    std::swap(residual_steps[residual_steps.size() - 1], residual_steps[residual_steps.size() - 2]);
  }
  Operands o{Tensor(s.dtype, a_dims, a_steps), Tensor(s.dtype, b_dims), Tensor(s.dtype, {s.n}),
             Tensor(s.dtype, c_dims, residual_steps), Tensor(s.dtype, c_dims, c_steps)};
  fill(o.a, random, s.special), fill(o.b, random, s.special / 4);
  fill(o.bias, random, s.special), fill(o.residual, random, s.special);
  return o;
}

Problem make_problem(const Spec& s, Operands& o) {
  return {&o.a,
          &o.b,
          s.bias ? &o.bias : nullptr,
          s.residual ? &o.residual : nullptr,
          &o.c,
          s.trans_b,
          s.activation,
          s.alpha,
          s.constant_b};
}

double activate(const std::string& name, double x) {
  if (name == "relu") return x < 0 ? 0 : x;
  if (name == "gelu") return x * 0.5 * std::erfc(-x * std::sqrt(0.5));
  if (name == "gelu_tanh") {
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  }
  if (name == "silu") return x / (1 + std::exp(-x));
  if (name == "tanh") return std::tanh(x);
  if (name == "sigmoid") return 1 / (1 + std::exp(-x));
  return x;
}

struct Expected {
  double value, tolerance;
};

/// Forward error of a K-term sum in the accumulator's precision, carried through an activation of
/// slope <= 1.13, plus one rounding to the result's type.
Expected reference(const Spec& s, const Operands& o, std::vector<int64_t> at) {
  const int64_t n = at.back(), m = at[at.size() - 2];
  std::vector<int64_t> lead(at.begin(), at.end() - 2);
  double sum = 0, magnitude = 0;
  std::vector<int64_t> a_index = lead, b_index = s.batched_b ? lead : std::vector<int64_t>{};
  a_index.insert(a_index.end(), {m, 0});
  b_index.insert(b_index.end(), {s.trans_b ? n : 0, s.trans_b ? 0 : n});
  const int64_t a_at = o.a.at(a_index), b_at = o.b.at(b_index);
  const int64_t a_step = o.a.strides.back();
  const int64_t b_step = o.b.strides[o.b.strides.size() - (s.trans_b ? 1 : 2)];
  for (int64_t k = 0; k < s.k; ++k) {
    const double x = get(s.dtype, o.a.data(), a_at + k * a_step);
    const double y = get(s.dtype, o.b.data(), b_at + k * b_step);
    sum += x * y, magnitude += std::fabs(x * y);
  }
  const double bias = s.bias ? get(s.dtype, o.bias.data(), n) : 0;
  const double residual = s.residual ? get(s.dtype, o.residual.data(), o.residual.at(at)) : 0;
  const double before = s.alpha * sum + bias;
  const double value = activate(s.activation, before) + residual;
  const double unit = s.dtype.bits == 64 ? 0x1p-53 : s.dtype.code == kDLInt ? 0 : 0x1p-24;
  const double inner = unit * ((double(s.k) + 2) * std::fabs(s.alpha) * magnitude +
                               std::fabs(bias) + std::fabs(before));
  const double tolerance = 1.2 * inner + 8 * unit * (std::fabs(value) + std::fabs(residual)) +
                           unit_roundoff(s.dtype) * std::fabs(value) + 1e-38 +
                           (s.dtype.code == kDLFloat && s.dtype.bits == 16 ? 0x1p-24 : 0);
  return {value, tolerance};
}

/// Visits every index of c.
template <class Visit>
void for_each_index(const std::vector<int64_t>& shape, Visit visit) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return;
  std::vector<int64_t> at(shape.size(), 0);
  for (;;) {
    visit(at);
    size_t axis = shape.size();
    while (axis-- > 0 && ++at[axis] == shape[axis]) at[axis] = 0;
    if (axis == size_t(-1)) return;
  }
}

/// The first wrong element as text; empty when all are right. Also finds writes outside c.
std::string compare(const Spec& s, const Operands& o, const std::vector<uint8_t>& untouched,
                    bool lenient_inf) {
  std::string wrong;
  const size_t bytes = s.dtype.bits / 8;
  std::vector<bool> written(static_cast<size_t>(o.c.elements), false);
  for_each_index(o.c.shape, [&](const std::vector<int64_t>& at) {
    const int64_t offset = o.c.at(at);
    written[static_cast<size_t>(offset)] = true;
    if (!wrong.empty()) return;
    const Expected e = reference(s, o, at);
    const double got = get(s.dtype, o.c.data(), offset);
    // oneDNN's gelu makes NaN of infinity: not a number either way.
    const bool same = std::isnan(e.value)                  ? std::isnan(got)
                      : lenient_inf && std::isinf(e.value) ? !std::isfinite(got)
                      : std::isinf(e.value)                ? got == e.value
                                            : std::fabs(got - e.value) <= e.tolerance;
    // Past the largest finite number of a 16-bit type the double reference stays finite.
    const bool overflow = std::isinf(got) && std::fabs(e.value) > 65000 && s.dtype.bits == 16;
    if (same || overflow) return;
    wrong = "element " + std::to_string(offset) + ": expected " + std::to_string(e.value) + " +- " +
            std::to_string(e.tolerance) + ", got " + std::to_string(got);
  });
  for (int64_t i = 0; i < o.c.elements && wrong.empty(); ++i) {
    const size_t at = static_cast<size_t>(i);
    if (!written[at] &&
        std::memcmp(o.c.memory.get() + at * bytes, untouched.data() + at * bytes, bytes) != 0) {
      wrong = "element " + std::to_string(i) + " lies outside c and was written";
    }
  }
  return wrong;
}

/// Runs one row on the operands; whether it took the problem.
bool run_row(const rm_kernel& row, const Spec& s, Operands& o,
             const std::vector<uint8_t>& untouched) {
  const Prepared prepared(row, make_problem(s, o));
  if (!prepared.supported()) return false;
  std::memcpy(o.c.data(), untouched.data(), untouched.size());
  prepared.launch();
  INFO(text(row.name), ": ", describe(s));
  CHECK_MESSAGE(prepared.workspace_kept(), "wrote behind its workspace");
  const std::string wrong = compare(s, o, untouched, text(row.name) == "gemm_onednn");
  CHECK_MESSAGE(wrong.empty(), wrong);
  return true;
}

std::vector<uint8_t> random_result(const Spec& s, Operands& o, Random& random) {
  fill(o.c, random, 0);
  const size_t bytes = static_cast<size_t>(o.c.elements) * (s.dtype.bits / 8);
  return {o.c.memory.get(), o.c.memory.get() + bytes};
}

/// Runs one spec on one row; whether the row took it.
bool run_on(const rm_kernel& row, const Spec& s, Random& random) {
  Operands o = make_operands(s, random);
  return run_row(row, s, o, random_result(s, o, random));
}

/// Runs one spec on every row; returns how many rows took it.
int run_everywhere(const Spec& s, Random& random) {
  Operands o = make_operands(s, random);
  const std::vector<uint8_t> untouched = random_result(s, o, random);
  int taken = 0;
  for (const rm_kernel* row : gemm_rows()) taken += run_row(*row, s, o, untouched);
  return taken;
}

const char* const kActivationNames[] = {"none", "relu", "gelu",   "gelu_tanh",
                                        "silu", "tanh", "sigmoid"};

template <class T, size_t N>
T pick(const T (&from)[N], Random& random) {
  return from[random() % N];
}

}  // namespace

TEST_CASE("every row agrees with sums in double on random shapes, types and epilogues") {
  Random random(20261121);
  const int64_t ms[] = {1, 2, 3, 4, 5, 6, 7, 11, 13, 16, 29, 64, 131};
  const int64_t ns[] = {1, 7, 8, 15, 16, 17, 31, 33, 48, 64, 100, 129};
  const int64_t ks[] = {1, 2, 3, 17, 64, 127, 256, 257, 300, 513, 770};
  const DLDataType types[] = {kF32, kF32, kBF16, kF16};
  for (int round = 0; round < 250; ++round) {
    Spec s;
    s.dtype = pick(types, random);
    s.m = pick(ms, random), s.n = pick(ns, random), s.k = pick(ks, random);
    s.trans_b = random() % 4 != 0, s.constant_b = random() % 3 != 0;
    s.bias = random() % 2, s.residual = random() % 2;
    s.activation = pick(kActivationNames, random);
    const double alphas[] = {1.0, 1.0, 0.125, -1.5, 0.0};
    s.alpha = pick(alphas, random);
    const int64_t gaps[] = {0, 0, 1, 13, 1000};
    s.gap = pick(gaps, random);
    CHECK(run_everywhere(s, random) >= 2);
  }
}

/// Sizes on both sides of every edge that a row names for an axis, and of twice the edge.
std::vector<int64_t> sizes_around_edges(const rm_kernel& row, char axis) {
  std::vector<int64_t> sizes = {1, 2, 3};
  for (size_t i = 0; i < row.num_edges; ++i) {
    if (row.edges[i].axis != static_cast<uint32_t>(axis)) continue;
    const int64_t edge = row.edges[i].size;
    for (int64_t size : {edge - 1, edge, edge + 1, 2 * edge - 1, 2 * edge, 2 * edge + 1}) {
      if (size > 0) sizes.push_back(size);
    }
  }
  return sizes;
}

TEST_CASE("every row agrees with sums in double on sizes around the edges it names itself") {
  const unsigned seed = 20261123;
  MESSAGE("seed ", seed);
  Random random(seed);
  constexpr int64_t kMostProducts = 400'000;
  for (const rm_kernel* row : gemm_rows()) {
    INFO(text(row->name));
    const std::string name = text(row->name);
    const bool own = name.find("direct") != name.npos || name.find("packed") != name.npos || name.find("split") != name.npos;
    CHECK((row->num_edges > 0) == own);
    if (!own) continue;
    const std::vector<int64_t> ms = sizes_around_edges(*row, 'M');
    const std::vector<int64_t> ns = sizes_around_edges(*row, 'N');
    const std::vector<int64_t> ks = sizes_around_edges(*row, 'K');
    const DLDataType types[] = {kF32, kBF16, kF16};
    int runs = 0;
    for (int round = 0; round < 400 && runs < 60; ++round) {
      Spec s;
      s.dtype = pick(types, random);
      s.m = ms[random() % ms.size()], s.n = ns[random() % ns.size()];
      s.k = ks[random() % ks.size()];
      if (s.m * s.n * s.k > kMostProducts) continue;
      s.bias = random() % 2, s.residual = random() % 2, s.gap = random() % 2 ? 0 : 3;
      s.constant_b = random() % 2;
      const bool ran = run_on(*row, s, random);
      if (!ran) continue;
      ++runs;
    }
    if (runs == 0) MESSAGE(name, " was not run: this machine cannot");
  }
}

TEST_CASE("a sum longer than one pass is right in the columns behind the last four") {
  Random random(20261124);
  for (const rm_kernel* row : gemm_rows()) {
    for (int64_t m : {1, 2, 7, 32}) {
      for (int64_t n : {1, 2, 3, 5, 10, 18}) {
        Spec s;
        s.m = m, s.n = n, s.k = 2050;
        run_on(*row, s, random);
      }
    }
  }
}

TEST_CASE("leading axes, batched right operands and scattered strides give the same sums") {
  Random random(7);
  const std::vector<std::vector<int64_t>> leads = {{}, {1}, {3}, {2, 5}, {4, 1, 2}};
  const int64_t ms[] = {1, 4, 9, 33}, ns[] = {1, 20, 64}, ks[] = {1, 40, 129};
  for (int round = 0; round < 200; ++round) {
    Spec s;
    s.dtype = round % 3 == 0 ? kBF16 : kF32;
    s.lead = leads[random() % leads.size()];
    s.m = pick(ms, random), s.n = pick(ns, random), s.k = pick(ks, random);
    s.batched_b = !s.lead.empty() && random() % 2, s.trans_b = random() % 2;
    s.constant_b = random() % 2, s.scattered = random() % 2;
    s.bias = random() % 2, s.residual = random() % 2;
    s.gap = random() % 2 ? 0 : 5;
    CHECK(run_everywhere(s, random) >= 2);
  }
}

TEST_CASE("a residual that is a transposed view is added by the rows that pack") {
  Random random(19);
  const std::vector<std::vector<int64_t>> leads = {{}, {4}, {2, 3}};
  const int64_t ms[] = {2, 7, 14, 15, 64, 97}, ns[] = {2, 15, 16, 31, 32, 33, 80}, ks[] = {0, 1, 40, 800};
  for (int round = 0; round < 60; ++round) {
    Spec s;
    const DLDataType types[] = {kF32, kBF16, kF16};
    s.dtype = pick(types, random), s.lead = leads[random() % leads.size()];
    s.m = pick(ms, random), s.n = pick(ns, random), s.k = pick(ks, random);
    s.residual = s.turned = true, s.bias = random() % 2, s.gap = random() % 2 ? 0 : 5;
    s.constant_b = random() % 2, s.activation = pick(kActivationNames, random);
    Operands o = make_operands(s, random);
    const std::vector<uint8_t> untouched = random_result(s, o, random);
    int packed = 0;
    for (const rm_kernel* row : gemm_rows()) {
      const bool took = run_row(*row, s, o, untouched);
      packed += took && text(row->name).find("packed") != std::string::npos;
    }
    CHECK(packed >= 1);
  }
}

TEST_CASE("empty results are not written and an empty sum gives act(bias) + residual") {
  Random random(1);
  for (const char* activation : kActivationNames) {
    for (DLDataType type : {kF32, kBF16, kF16}) {
      for (int64_t m : {0, 1, 9}) {
        for (int64_t n : {0, 1, 37}) {
          for (int64_t k : {0, 5}) {
            Spec s;
            s.dtype = type, s.m = m, s.n = n, s.k = k;
            s.bias = s.residual = true, s.activation = activation, s.constant_b = random() % 2;
            run_everywhere(s, random);
          }
        }
      }
    }
  }
  Spec none;
  none.lead = {0, 2}, none.m = 3, none.n = 5, none.k = 4;
  run_everywhere(none, random);
}

TEST_CASE("NaN and infinity reach exactly the elements they belong to") {
  Random random(99);
  const int64_t ms[] = {1, 3, 8, 40}, ns[] = {1, 16, 50}, ks[] = {1, 8, 300};
  for (int round = 0; round < 120; ++round) {
    Spec s;
    s.dtype = round % 2 ? kF32 : kBF16;
    s.m = pick(ms, random), s.n = pick(ns, random), s.k = pick(ks, random);
    s.special = 0.01, s.bias = random() % 2, s.residual = random() % 2;
    s.activation = pick(kActivationNames, random);
    run_everywhere(s, random);
  }
}

/// The row of that name; null where there is none.
const rm_kernel* row_named(const std::string& name) {
  for (const rm_kernel* row : gemm_rows()) {
    if (text(row->name) == name) return row;
  }
  return nullptr;
}

/// Root of the mean squared error of a row's results, each relative to the sum of its products' magnitudes; -1 where the
/// row does not take them.
double error_of(const char* name, const Spec& s, Operands& o) {
  const rm_kernel* row = row_named(name);
  if (!row) return -1;
  const Prepared prepared(*row, make_problem(s, o));
  if (!prepared.supported()) return -1;
  prepared.launch();
  double sum = 0;
  for_each_index(o.c.shape, [&](const std::vector<int64_t>& at) {
    double value = 0, magnitude = 0;
    for (int64_t k = 0; k < s.k; ++k) {
      const double x = get(kF32, o.a.data(), o.a.at({at[0], k}));
      const double y = get(kF32, o.b.data(), o.b.at({s.trans_b ? at[1] : k, s.trans_b ? k : at[1]}));
      value += x * y, magnitude += std::fabs(x * y);
    }
    const double off = (get(kF32, o.c.data(), o.c.at(at)) - value) / magnitude;
    sum += off * off;
  });
  return std::sqrt(sum / double(s.m * s.n));
}

TEST_CASE("products of parts are as near as multiply-adds of f32") {
  Random random(20261128);
  for (int64_t k : {1, 20, 256, 1030}) {
    for (double spread : {0.0, 3.0, 12.0}) {
      Spec s;
      s.m = 45, s.n = 50, s.k = k, s.constant_b = false, s.trans_b = random() % 2;
      Operands o = make_operands(s, random);
      std::normal_distribution<double> normal;
      for (Tensor* t : {&o.a, &o.b}) {  // magnitudes that differ by powers of two
        for (int64_t i = 0; i < t->elements; ++i) {
          set(kF32, t->data(), i, get(kF32, t->data(), i) * std::exp2(std::round(spread * normal(random))));
        }
      }
      const double split = error_of("gemm_split_amx", s, o), chain = error_of("gemm_packed_avx512", s, o);
      if (split < 0 || chain < 0) {
        MESSAGE("not run: this machine cannot");
        return;
      }
      INFO(describe(s), " spread ", spread, ": ", split, " against ", chain);
      CHECK(split <= 2 * chain + 0x1p-27);
    }
  }
}

TEST_CASE("where magnitudes leave the limits of the parts, results are those of multiply-adds") {
  Random random(20261129);
  const rm_kernel *split = row_named("gemm_split_amx"), *packed = row_named("gemm_packed_avx512");
  if (!split || !packed) return;
  const double odd[] = {NAN, INFINITY, -INFINITY, 3.4e38, 0x1p127, -0x1p126};
  for (int round = 0; round < 40; ++round) {
    Spec s;
    const int64_t sizes[] = {1, 16, 33, 70, 300};
    s.m = pick(sizes, random), s.n = pick(sizes, random), s.k = pick(sizes, random);
    s.constant_b = false, s.trans_b = random() % 2, s.bias = random() % 2, s.scattered = random() % 2;
    Operands o = make_operands(s, random);
    Tensor& odd_one = random() % 2 ? o.a : o.b;
    const int kind = round % 4;
    for (int64_t i = 0; i < odd_one.elements; ++i) {
      if (kind == 1) set(kF32, odd_one.data(), i, get(kF32, odd_one.data(), i) * 0x1p-120);
      if (kind == 2) set(kF32, odd_one.data(), i, get(kF32, odd_one.data(), i) * 0x1p70);
    }
    for (Tensor* t : {&o.a, &o.b}) {  // products that are infinite or below all normal numbers, of operands that are neither
      for (int64_t i = 0; i < t->elements && kind >= 2; ++i) {
        set(kF32, t->data(), i, get(kF32, t->data(), i) * (kind == 2 ? 0x1p60 : 0x1p-50));
      }
    }
    if (kind == 0) set(kF32, odd_one.data(), int64_t(random() % uint64_t(odd_one.elements)), pick(odd, random));
    const Prepared parts(*split, make_problem(s, o)), chain(*packed, make_problem(s, o));
    if (!parts.supported() || !chain.supported()) return;
    const size_t bytes = size_t(o.c.elements) * 4;
    std::memset(o.c.data(), 0, bytes);
    parts.launch();
    const std::string first(o.c.memory.get(), bytes);
    std::memset(o.c.data(), 0, bytes);
    chain.launch();
    INFO(describe(s), " kind ", kind);
    CHECK((first == std::string(o.c.memory.get(), bytes)));
    CHECK(parts.workspace_kept());
  }
}

TEST_CASE("integers and double precision run on the plain loop") {
  Random random(5);
  for (DLDataType type : {kF64, kI64, kI32, kI8}) {
    for (bool trans_b : {false, true}) {
      Spec s;
      s.dtype = type, s.lead = {2}, s.m = 7, s.n = 9, s.k = 6, s.trans_b = trans_b;
      s.bias = s.residual = true, s.activation = "relu";
      CHECK(run_everywhere(s, random) >= 1);
    }
  }
}

TEST_CASE("any number of threads gives the same bits, and so does any number of rows") {
  Random random(31);
  for (DLDataType type : {kF32, kBF16, kF16}) {
    for (int64_t m : {1, 3, 7, 7, 32, 64, 64, 200, 200, 700}) {
      Spec s;
      s.dtype = type, s.m = m, s.n = 333, s.k = 600, s.bias = true, s.activation = "gelu";
      s.constant_b = random() % 2;
      Operands o = make_operands(s, random);
      for (const rm_kernel* row : gemm_rows()) {
        if (!(row->traits & RM_KERNEL_DETERMINISTIC)) continue;
        const int before = omp_get_max_threads();
        omp_set_num_threads(5);
        const Prepared prepared(*row, make_problem(s, o));
        if (!prepared.supported()) continue;
        INFO(text(row->name), ": ", describe(s));
        std::string first;
        for (int threads : {1, 2, 3, 5}) {
          omp_set_num_threads(threads);
          prepared.launch();
          const std::string bits(o.c.memory.get(), size_t(o.c.elements) * (type.bits / 8));
          if (first.empty()) first = bits;
          CHECK((bits == first));
        }
        omp_set_num_threads(before);
        // The last row alone. A library may choose another algorithm for one row; ours may not.
        if (text(row->name).find("packed") == std::string::npos &&
            text(row->name).find("direct") == std::string::npos &&
            text(row->name).find("split") == std::string::npos) {
          continue;
        }
        Spec one = s;
        one.m = 1;
        Operands single{Tensor(type, {1, s.k}), Tensor(type, {s.n, s.k}), Tensor(type, {s.n}),
                        Tensor(type, {1, s.n}), Tensor(type, {1, s.n})};
        const size_t width = type.bits / 8;
        std::memcpy(single.a.data(), o.a.memory.get() + size_t((m - 1) * s.k) * width,
                    size_t(s.k) * width);
        std::memcpy(single.b.data(), o.b.data(), size_t(s.k * s.n) * width);
        std::memcpy(single.bias.data(), o.bias.data(), size_t(s.n) * width);
        Prepared(*row, make_problem(one, single)).launch();
        CHECK(std::memcmp(single.c.data(), first.data() + size_t((m - 1) * s.n) * width,
                          size_t(s.n) * width) == 0);
      }
    }
  }
}

TEST_CASE("a transposed a is copied in several rows or lines at a time beside a large b") {
  // Beside a b of 1 MiB and more a small a (the first) is copied by all threads for each other, and each packs its
  // own panels; a larger one is copied by lines, a block of rows and of k at a time. Batches and shares of threads
  // end within a copy's rows, and nothing behind the last line may be read.
  Random random(41);
  const int before = omp_get_max_threads();
  for (const auto& [lead, m, k] : {std::tuple{int64_t{3}, int64_t{37}, int64_t{1031}}, {1, 1100, 1030}, {2, 523, 1024}}) {
    Spec s;
    s.lead = {lead}, s.m = m, s.n = 256, s.k = k, s.trans_b = false, s.constant_b = false, s.scattered = true;
    for (int threads : {1, 2, 7}) {
      omp_set_num_threads(threads);
      for (const rm_kernel* row : gemm_rows()) {
        if (text(row->name).find("packed") != std::string::npos) run_on(*row, s, random);
      }
    }
  }
  omp_set_num_threads(before);
}

TEST_CASE("a transposed a costs little more than a plain one") {
  // The gradient of a weight of 1024 features. Row by row its copy took three times as long as the product.
  Random random(43);
  const int before = omp_get_max_threads();
  omp_set_num_threads(1);
  const auto now = [] {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
  };
  for (const rm_kernel* row : gemm_rows()) {
    if (text(row->name).find("packed") == std::string::npos) continue;
    double least[2] = {1e30, 1e30};
    for (bool transposed : {false, true}) {
      Spec s;
      s.m = 1024, s.n = 256, s.k = 1024, s.trans_b = false, s.constant_b = false, s.scattered = transposed;
      Operands o = make_operands(s, random);
      const Prepared prepared(*row, make_problem(s, o));
      if (!prepared.supported()) continue;
      for (int round = 0; round < 6; ++round) {
        const double start = now();
        prepared.launch();
        least[transposed] = std::min(least[transposed], now() - start);
      }
    }
    INFO(text(row->name), " plain ", least[0], " ms, transposed ", least[1], " ms");
    CHECK(least[1] < 2 * least[0]);
  }
  omp_set_num_threads(before);
}

TEST_CASE("copies of a's rows for many threads take little more than a itself") {
  // The gradient of a weight: a is the transpose of what lies in memory, so that it is copied.
  Random random(37);
  Spec s;
  s.m = 192, s.n = 96, s.k = 2048, s.trans_b = false, s.constant_b = false, s.scattered = true;
  Operands o = make_operands(s, random);
  const uint64_t a_bytes = uint64_t(s.m * s.k) * 4, b_bytes = uint64_t(s.n * s.k) * 4;
  const int before = omp_get_max_threads();
  for (const rm_kernel* row : gemm_rows()) {
    if (text(row->name).find("packed") == std::string::npos) continue;
    std::string first;
    for (int most : {2, 16, 48}) {
      omp_set_num_threads(most);
      const Prepared prepared(*row, make_problem(s, o));
      if (!prepared.supported()) continue;
      INFO(text(row->name), " prepared for ", most, " threads: ", prepared.workspace_bytes());
      CHECK(prepared.workspace_bytes() < 3 * (a_bytes + b_bytes));
      for (int threads : {1, 3, most}) {  // fewer than prepared for: in more pieces
        omp_set_num_threads(threads);
        prepared.launch();
        const std::string bits(o.c.memory.get(), size_t(o.c.elements) * 4);
        if (first.empty()) first = bits;
        CHECK((bits == first));
      }
      CHECK(prepared.workspace_kept());
    }
  }
  omp_set_num_threads(before);
}

TEST_CASE("activations stay within a few units in the last place over their whole range") {
  // K = 1 and b = 1 pass a straight through to the activation.
  std::vector<float> xs = {0.f, -0.f, 1e-30f, -1e-30f, 88.f, -88.f, 1e30f, -1e30f};
  for (float x = -20; x <= 20; x += 0.00137f) xs.push_back(x);
  for (const rm_kernel* row : gemm_rows()) {
    for (const char* activation : kActivationNames) {
      Spec s;
      s.m = int64_t(xs.size()), s.n = 1, s.k = 1, s.activation = activation;
      Operands o{Tensor(kF32, {s.m, 1}), Tensor(kF32, {1, 1}), Tensor(kF32, {1}),
                 Tensor(kF32, {s.m, 1}), Tensor(kF32, {s.m, 1})};
      std::memcpy(o.a.data(), xs.data(), xs.size() * 4);
      set(kF32, o.b.data(), 0, 1.0);
      const Prepared prepared(*row, make_problem(s, o));
      if (!prepared.supported()) continue;
      prepared.launch();
      double worst = 0;
      float worst_x = 0;
      for (size_t i = 0; i < xs.size(); ++i) {
        const double want = activate(activation, xs[i]), got = get(kF32, o.c.data(), int64_t(i));
        // Below the normal range results may be flushed to zero.
        const double ulp = std::max(std::fabs(want) * 0x1p-23, 0x1p-149);
        // tanh-gelu's double formula itself cancels for negative x: judge it absolutely there.
        const double floor = std::string(activation) == "gelu_tanh" ? 1e-7 : 0x1p-126;
        const double error = std::max(0.0, std::fabs(got - want) - floor) / ulp;
        if (error > worst) worst = error, worst_x = xs[i];
      }
      INFO(text(row->name), " ", activation, " worst at ", worst_x);
      const bool library = text(row->name).find("onednn") != std::string::npos;
      if (!library) CHECK(worst <= 4.5);
    }
  }
}

TEST_CASE("direct rows read weights with any row stride and take up to 32 rows of a") {
  Random random(17);
  const int64_t ms[] = {1, 2, 3, 4, 5, 8, 9, 31, 32}, ns[] = {1, 3, 16, 63, 64, 129, 300};
  const int64_t ks[] = {1, 15, 16, 31, 33, 100, 511};
  int taken = 0;
  for (int round = 0; round < 60; ++round) {
    Spec s;
    const DLDataType types[] = {kF32, kBF16, kF16};
    s.dtype = pick(types, random);
    s.m = pick(ms, random), s.n = pick(ns, random), s.k = pick(ks, random);
    s.bias = random() % 2, s.residual = random() % 2, s.gap = random() % 2 ? 3 : 0;
    s.activation = pick(kActivationNames, random), s.alpha = random() % 2 ? 1.0 : -0.75;
    Operands o = make_operands(s, random);
    o.b = Tensor(s.dtype, {s.n, s.k}, {s.k + 5, 1});  // a slice of a wider matrix
    fill(o.b, random, 0), fill(o.c, random, 0);
    const size_t bytes = static_cast<size_t>(o.c.elements) * (s.dtype.bits / 8);
    const std::vector<uint8_t> untouched(o.c.memory.get(), o.c.memory.get() + bytes);
    for (const rm_kernel* row : gemm_rows()) {
      if (text(row->name).find("direct") == std::string::npos) continue;
      const Prepared prepared(*row, make_problem(s, o));
      if (!prepared.supported()) continue;
      ++taken;
      CHECK(prepared.packed_bytes() == 0);
      std::memcpy(o.c.data(), untouched.data(), bytes);
      prepared.launch();
      const std::string wrong = compare(s, o, untouched, false);
      INFO(text(row->name), ": ", describe(s));
      CHECK_MESSAGE(wrong.empty(), wrong);
    }
  }
  CHECK(taken >= 60);
}

TEST_CASE("products on matrix tiles in parts of k are right at their edges, and where rows are pages apart") {
  Random random(18);
  const int64_t ms[] = {161, 177, 191, 192, 193, 241, 256, 257, 272, 289}, ns[] = {32, 33, 63, 65};
  int taken = 0;
  for (int64_t k : {0, 1, 31, 32, 33, 96, 384, 385, 512, 513, 543, 544, 769, 1000, 1024, 1030, 2048}) {
    Spec s;
    s.dtype = kBF16, s.m = pick(ms, random), s.n = pick(ns, random), s.k = k;
    s.bias = random() % 2, s.residual = random() % 2, s.gap = random() % 2 ? 3 : 0;
    s.activation = pick(kActivationNames, random), s.scattered = random() % 4 == 0;
    s.special = random() % 3 ? 0 : 0.0005;
    Operands o = make_operands(s, random);
    o.b = Tensor(s.dtype, {s.n, s.k}, {random() % 2 ? 2048 : std::max<int64_t>(k, 1), 1});
    fill(o.b, random, 0), fill(o.c, random, 0);
    const size_t bytes = static_cast<size_t>(o.c.elements) * 2;
    const std::vector<uint8_t> untouched(o.c.memory.get(), o.c.memory.get() + bytes);
    for (const rm_kernel* row : gemm_rows()) {
      if (text(row->name).find("amx_bf16") == std::string::npos) continue;
      const Prepared prepared(*row, make_problem(s, o));
      if (!prepared.supported()) continue;
      ++taken;
      for (int threads : {1, 2}) {
        omp_set_num_threads(threads);
        std::memcpy(o.c.data(), untouched.data(), bytes);
        prepared.launch();
        const std::string wrong = compare(s, o, untouched, false);
        INFO(text(row->name), ": ", describe(s));
        CHECK_MESSAGE(wrong.empty(), wrong);
        CHECK(prepared.workspace_kept());
      }
      omp_set_num_threads(omp_get_num_procs());
    }
  }
  if (taken == 0) MESSAGE("not run: this machine cannot");
}

TEST_CASE("a weight that may not stay packed gives the bits of a packed one, and no copy of it") {
  Random random(41);
  const int before = omp_get_max_threads();
  for (DLDataType type : {kF32, kBF16, kF16}) {
    for (int64_t m : {2, 9, 150, 1100}) {
      Spec s;
      s.dtype = type, s.m = m, s.n = 1117, s.k = 1033;
      s.bias = true, s.activation = "silu", s.residual = m == 150, s.gap = m == 9 ? 3 : 0;
      s.trans_b = m == 2 || m == 150;
      if (m == 150) s.lead = {2}, s.m = 75;
      Operands o = make_operands(s, random);
      for (const rm_kernel* row : gemm_rows()) {
        if (text(row->name).find("packed") == std::string::npos) continue;
        const Prepared packed(*row, make_problem(s, o));
        if (!packed.supported()) continue;
        INFO(text(row->name), ": ", describe(s));
        const auto bits = [&] {
          return std::string(o.c.memory.get(), size_t(o.c.elements) * (type.bits / 8));
        };
        std::memset(o.c.data(), 0, bits().size());
        packed.launch();
        const std::string expected = bits();
        Problem problem = make_problem(s, o);
        problem.pack_weights = false;
        for (int threads : {1, 2, 5}) {
          omp_set_num_threads(threads);
          const Prepared streamed(*row, problem);
          CHECK(streamed.packed_bytes() == 0);
          std::memset(o.c.data(), 0, expected.size());
          streamed.launch();
          CHECK((bits() == expected));
        }
        omp_set_num_threads(before);
      }
    }
  }
}

TEST_CASE("the layout of a packed weight does not depend on the number of rows") {
  Random random(3);
  for (const rm_kernel* row : gemm_rows()) {
    if (text(row->name).find("packed") == std::string::npos) continue;
    std::string layout;
    for (int64_t m : {1, 8, 64, 300}) {
      Spec s;
      s.m = m, s.n = 96, s.k = 128;
      Operands o = make_operands(s, random);
      const Prepared prepared(*row, make_problem(s, o));
      if (!prepared.supported()) continue;
      if (layout.empty()) layout = prepared.layout();
      CHECK(prepared.layout() == layout);
      CHECK(!layout.empty());
    }
  }
}

TEST_CASE("the last row takes every problem") {
  const auto rows = gemm_rows();
  REQUIRE(!rows.empty());
  CHECK((rows.back()->traits & RM_KERNEL_FALLBACK) != 0);
}

}  // namespace gemm_test
