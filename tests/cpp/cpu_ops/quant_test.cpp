// quantize against its reference bit for bit; quant_linear against sums in double.
#include <doctest/doctest.h>
#include <omp.h>

#include <array>
#include <cmath>
#include <cstring>
#include <tuple>

#include "harness.hpp"
#include "ir/text.hpp"
#include "ops/evaluate.hpp"
#include "ops/linear/quantized.hpp"
#include "ops/registry.hpp"

using namespace rm::test;
namespace ops = rm::ops;
namespace ir = rm::ir;

namespace {

struct Case {
  int64_t m, n, k, bits, group;
  bool symmetric, bias, residual;
  std::string activation;
  int64_t x_bits = 16;  // 8: weights in tiles, up to 8 or 16 rows of x rounded to 8 bits
  int64_t tile = x_bits == 8 ? 8 : 1;
  bool largest = false;  // integers of the weight and of x at the ends of their ranges
};

std::string text_of(const Case& c) {
  return std::to_string(c.m) + "x" + std::to_string(c.n) + "x" + std::to_string(c.k) +
         " bits=" + std::to_string(c.bits) + " group=" + std::to_string(c.group) +
         " x_bits=" + std::to_string(c.x_bits) + " tile=" + std::to_string(c.tile) +
         (c.symmetric ? " symmetric" : "") + (c.bias ? " bias" : "") +
         (c.residual ? " residual" : "") + " " + c.activation;
}

/// A weight that was quantised by the plugin's kernel.
struct Weight {
  Tensor q, scale, zero;
  Weight(const Case& c, const Tensor& w)
      : q(c.bits == 8 ? Type::i8 : Type::u8, {c.n, (c.k + 63) / 64 * 8 * c.bits}),
        scale(Type::f16, {c.n, (c.k + c.group - 1) / c.group}),
        zero(Type::f16, {c.n, (c.k + c.group - 1) / c.group}) {
    Call call{"quantize", {&w}, {&q, &scale}, attributes(c)};
    call.attrs.push_back(integer("symmetric", c.symmetric));
    if (!c.symmetric) call.outputs.push_back(&zero);
    for (const rm_kernel* row : rows("quantize")) {
      if (supports(*row, call)) REQUIRE(run(*row, call).code == RM_OK);
    }
  }
  static std::vector<Attr> attributes(const Case& c) {
    return {integer("bits", c.bits), integer("group", c.group), integer("tile", c.tile),
            integer("x_bits", c.x_bits)};
  }
};

ops::QuantLayout layout(const Case& c) { return {c.k, c.bits, c.group, c.n, c.tile}; }

/// Row r of the quantised weight as numbers.
std::vector<double> dequantised(const Case& c, const Weight& w, int64_t r) {
  std::vector<double> out;
  const auto* bytes = static_cast<const uint8_t*>(w.q.data());
  for (int64_t i = 0; i < c.k; ++i) {
    const int64_t g = layout(c).scale_at(r, i / c.group);
    const double zero = c.symmetric ? (c.bits == 4 ? 8 : 0) : w.zero[g];
    out.push_back((layout(c).get(bytes, r, i) - zero) * w.scale[g]);
  }
  return out;
}

/// Row i of x as few rows of it are read with x_bits 8: integers of blocks of 32, ties to even.
std::vector<double> rounded(const Case& c, const Tensor& x, int64_t i) {
  std::vector<double> out;
  for (int64_t from = 0; from < c.k; from += 32) {
    float most = 0;
    const int64_t to = std::min(from + 32, c.k);
    for (int64_t j = from; j < to; ++j) most = std::max(most, std::fabs(float(x[i * c.k + j])));
    const float inverse = most > 0 ? 127.f / most : 0.f;
    for (int64_t j = from; j < to; ++j) {
      const volatile float scaled = float(x[i * c.k + j]) * inverse;
      out.push_back(double(std::nearbyint(scaled)) * double(most / 127.f));
    }
  }
  return out;
}

double activate(const std::string& name, double x) {
  if (name == "silu") return x / (1 + std::exp(-x));
  if (name == "gelu") return x * 0.5 * std::erfc(-x * std::sqrt(0.5));
  return x;
}

struct Wanted {
  std::vector<double> value, tolerance;
};

/// Whether a kernel rounds m rows of x to 8 bits where it may.
bool rounds_rows(const std::string& row, int64_t m) {
  const bool few = row.find("amx_int8") != std::string::npos || row.find("_few_") != std::string::npos;
  return m <= (few ? 16 : 8);
}

/// What a product should be where x is read `rounds` to 8 bits.
Wanted wanted(const Case& c, Type type, const Tensor& x, const Weight& weight,
              const std::vector<std::vector<double>>& rows, const Tensor& bias,
              const Tensor& residual, bool rounds) {
  Wanted want;
  for (int64_t i = 0; i < c.m; ++i) {
    const std::vector<double> read = rounds ? rounded(c, x, i) : std::vector<double>();
    for (int64_t r = 0; r < c.n; ++r) {
      double sum = 0, magnitude = 0, rounding = 0, squares = 0;
      for (int64_t from = 0; from < c.k; from += c.group) {  // in which x is rounded
        double most = 0, weights = 0;
        for (int64_t j = from; j < std::min(from + c.group, c.k); ++j) {
          const double v = rounds ? read[size_t(j)] : x[i * c.k + j];
          const double u = rows[size_t(r)][size_t(j)];
          sum += v * u, magnitude += std::fabs(v * u), squares += v * u * v * u;
          const double q = c.bits == 4
                               ? 15 * std::fabs(weight.scale[layout(c).scale_at(r, j / c.group)])
                               : 0;  // n x - z x is summed apart
          magnitude += std::fabs(v) * q;
          most = std::max(most, std::fabs(v)), weights += std::fabs(u);
        }
        rounding += rounds ? 0 : most / 65278 * weights;
      }
      const double before = sum + (c.bias ? bias[r] : 0);
      const double value =
          activate(c.activation, before) + (c.residual ? residual[i * c.n + r] : 0);
      want.value.push_back(value);
      // Beside many rows of bf16 a weight may be rounded to bf16: random errors of at most 2^-9 each.
      const bool narrow = type == Type::bf16 && c.m > 8;
      want.tolerance.push_back((narrow ? 4 * 0x1p-9 * std::sqrt(squares) : 0) + 1.2 * rounding + 0x1p-22 * magnitude + 0x1p-21 * std::fabs(before) +
                          2 * epsilon(type) * std::fabs(value) + 1e-7);
    }
  }
  return want;
}

void check(const Case& c, Type type, std::mt19937& rng, bool scrambled) {
  CAPTURE(text_of(c));
  CAPTURE(name(type));
  Tensor w(type, {c.n, c.k}), bias(type, {c.n}), residual(type, {c.m, c.n}), y(type, {c.m, c.n});
  w.normal(rng, 0.1), bias.normal(rng), residual.normal(rng);
  Tensor x = scrambled ? Tensor::scrambled(type, {c.m, c.k}, rng) : Tensor(type, {c.m, c.k});
  x.normal(rng);
  if (c.largest) {
    // Of 4 bits -8 and 7, of 8 bits 127 and -127 by rows.
    w.fill([&](int64_t i) { return c.bits == 4 ? (i % 32 == 5 ? -8 : 7) : i / c.k % 2 ? -1 : 1; });
    x.fill([&](int64_t i) { return i / c.k % 3 == 1 ? -4 : 4; });
  }
  const Weight weight(c, w);
  Call call{"quant_linear",
            {&x, &weight.q, &weight.scale, c.symmetric ? nullptr : &weight.zero,
             c.bias ? &bias : nullptr, c.residual ? &residual : nullptr},
            {&y},
            Weight::attributes(c)};
  call.attrs.push_back(text("activation", c.activation));
  std::vector<std::vector<double>> rows;
  for (int64_t r = 0; r < c.n; ++r) rows.push_back(dequantised(c, weight, r));
  const Wanted exact = wanted(c, type, x, weight, rows, bias, residual, false);
  const Wanted rounded = wanted(c, type, x, weight, rows, bias, residual, c.x_bits == 8);
  on_every_row(call, [&](const std::string& row) {
    const Wanted& want = rounds_rows(row, c.m) ? rounded : exact;
    std::string wrong;
    for (int64_t i = 0; i < y.numel() && wrong.empty(); ++i) {
      const double expected = want.value[size_t(i)], allowed = want.tolerance[size_t(i)];
      if (std::fabs(y[i] - expected) <= allowed) continue;
      wrong = "element " + std::to_string(i) + ": expected " + std::to_string(expected) + " +- " +
              std::to_string(allowed) + ", got " + std::to_string(y[i]);
    }
    INFO(row);
    CHECK_MESSAGE(wrong.empty(), wrong);
  });
}

}  // namespace

TEST_CASE("quant_linear equals sums over the dequantised weight for every layout") {
  std::mt19937 rng(51);
  const int64_t ms[] = {1, 2, 3, 8, 9, 33}, ns[] = {1, 3, 16, 40, 130, 300};
  const int64_t ks[] = {1, 31, 32, 33, 64, 96, 100, 127, 256, 300, 704};
  const int64_t groups[] = {32, 64, 128};
  const Type types[] = {Type::f32, Type::bf16, Type::f16};
  const char* const activations[] = {"none", "silu", "gelu"};
  for (int round = 0; round < 120; ++round) {
    const Case c{ms[rng() % 6],     ns[rng() % 6],     ks[rng() % 11],
                 rng() % 2 ? 8 : 4, groups[rng() % 3], rng() % 2 == 0,
                 rng() % 2 == 0,    rng() % 2 == 0,    activations[rng() % 3]};
    check(c, types[rng() % 3], rng, rng() % 3 == 0);
  }
}

TEST_CASE("quant_linear on tiles reads few rows of x in 8 bits, and many as they are") {
  std::mt19937 rng(57);
  const int64_t ms[] = {1, 2, 3, 8, 9, 33, 71}, ns[] = {1, 7, 8, 13, 16, 40, 130, 300};
  const int64_t ks[] = {1, 31, 32, 33, 64, 96, 100, 127, 256, 300, 704};
  const int64_t groups[] = {32, 64, 128};
  const Type types[] = {Type::f32, Type::bf16, Type::f16};
  const char* const activations[] = {"none", "silu", "gelu"};
  for (int round = 0; round < 120; ++round) {
    const Case c{ms[rng() % 7],
                 ns[rng() % 8],
                 ks[rng() % 11],
                 rng() % 2 ? 8 : 4,
                 groups[rng() % 3],
                 true,
                 rng() % 2 == 0,
                 rng() % 2 == 0,
                 activations[rng() % 3],
                 rng() % 4 ? 8 : 16,
                 8};
    check(c, types[rng() % 3], rng, rng() % 3 == 0);
  }
}

TEST_CASE("quant_linear of 1 to 18 rows in 8 bits at the edges of matrix tiles") {
  std::mt19937 rng(59);
  const int64_t ns[] = {8, 15, 16, 17, 24, 31, 32, 33, 47, 56, 65}, ks[] = {32, 64, 65, 127, 128, 129, 192, 320};
  for (int64_t m = 1; m <= 18; ++m) {
    for (int64_t bits : {8, 4}) {
      const Case c{m, ns[rng() % 11], ks[rng() % 8], bits, int64_t{32} << rng() % 3, true, true, true, "none", 8};
      check(c, std::array{Type::f32, Type::bf16, Type::f16}[rng() % 3], rng, m % 3 == 0);
    }
  }
}

TEST_CASE("quant_linear of 1 to 33 rows in 8 bits on random sizes with tails of tiles and groups") {
  std::mt19937 rng(61);
  for (int round = 0; round < 120; ++round) {
    const Case c{1 + int64_t(rng() % 33),
                 1 + int64_t(rng() % 90),
                 1 + int64_t(rng() % 500),
                 rng() % 2 ? 8 : 4,
                 int64_t{32} << rng() % 3,
                 true,
                 rng() % 2 == 0,
                 rng() % 2 == 0,
                 std::array{"none", "silu", "gelu"}[rng() % 3],
                 8};
    check(c, std::array{Type::f32, Type::bf16, Type::f16}[rng() % 3], rng, rng() % 3 == 0);
  }
}

TEST_CASE("quant_linear in 8 bits of the largest integers overflows nowhere") {
  std::mt19937 rng(62);
  for (int64_t m : {1, 2, 3, 8, 9, 16}) {
    for (int64_t bits : {8, 4}) {
      check({m, 43, 512, bits, 128, true, false, false, "none", 8, 8, true}, Type::f32, rng, false);
    }
  }
}

TEST_CASE("kernels of quant_linear that read x in 8 bits give the same bits, alone and in a batch") {
  std::mt19937 rng(60);
  for (auto [m, n, k] : {std::tuple<int64_t, int64_t, int64_t>{16, 333, 352}, {5, 75, 100}, {2, 40, 64}}) {
    for (int64_t bits : {8, 4}) {
      const Case c{m, n, k, bits, bits == 8 ? 128 : 32, true, false, false, "none", 8};
      Tensor w(Type::f32, {n, k}), x(Type::bf16, {m, k}), y(Type::bf16, {m, n});
      w.normal(rng), x.normal(rng);
      const Weight weight(c, w);
      std::vector<double> alone;  // by the kernels of one row
      for (int64_t i = 0; i < m; ++i) {
        Tensor one(Type::bf16, {1, k}), z(Type::bf16, {1, n});
        one.fill([&](int64_t j) { return x[i * k + j]; });
        const Call call{"quant_linear", {&one, &weight.q, &weight.scale}, {&z}, Weight::attributes(c)};
        for (const rm_kernel* row : rows("quant_linear")) {
          const std::string name(row->name.data, row->name.size);
          if (name.find("avx2") == std::string::npos || !supports(*row, call)) continue;
          REQUIRE(run(*row, call).code == RM_OK);
          for (int64_t j = 0; j < n; ++j) alone.push_back(z[j]);
          break;
        }
      }
      if (alone.empty()) continue;
      const Call call{"quant_linear", {&x, &weight.q, &weight.scale}, {&y}, Weight::attributes(c)};
      for (const rm_kernel* row : rows("quant_linear")) {
        const std::string name(row->name.data, row->name.size);
        const bool vectors = name.find("avx") != std::string::npos || name.find("amx_int8") != std::string::npos;
        if (!vectors || !rounds_rows(name, m) || !supports(*row, call)) continue;
        CAPTURE(name);
        for (int threads : {1, 2, 3}) {
          omp_set_num_threads(threads);
          REQUIRE(run(*row, call).code == RM_OK);
          int64_t differing = 0;
          for (int64_t i = 0; i < m * n; ++i) differing += y[i] != alone[size_t(i)];
          CHECK(differing == 0);
        }
        omp_set_num_threads(omp_get_num_procs());
      }
    }
  }
}

TEST_CASE("empty operands of quant_linear are legal") {
  std::mt19937 rng(52);
  for (int64_t bits : {8, 4}) {
    check({0, 9, 40, bits, 32, true, true, true, "none", 8}, Type::f32, rng, false);
    check({3, 0, 40, bits, 32, true, false, false, "none", 8}, Type::f32, rng, false);
    check({3, 9, 0, bits, 32, true, true, true, "silu", 8}, Type::f32, rng, false);
  }
  for (int64_t bits : {8, 4}) {
    check({0, 5, 40, bits, 32, true, true, true, "none"}, Type::f32, rng, false);
    check({3, 0, 40, bits, 32, true, false, false, "none"}, Type::f32, rng, false);
    check({3, 5, 0, bits, 32, true, true, true, "silu"}, Type::f32, rng, false);
    check({12, 5, 0, bits, 32, false, true, false, "none"}, Type::f32, rng, false);
  }
}

TEST_CASE("quantize equals its reference bit for bit, also on groups without a usable scale") {
  std::mt19937 rng(53);
  for (int round = 0; round < 60; ++round) {
    const int64_t groups[] = {32, 64, 128}, ks[] = {1, 32, 33, 65, 200};
    const Case c{1,
                 1 + int64_t(rng() % 20),
                 ks[rng() % 5],
                 rng() % 2 ? 8 : 4,
                 groups[rng() % 3],
                 round % 4 == 1 || rng() % 2 == 0,
                 false,
                 false,
                 "none",
                 round % 4 == 1 ? 8 : 16};
    CAPTURE(text_of(c));
    Tensor w(Type::f32, {c.n, c.k});
    w.normal(rng, std::pow(10.0, int(rng() % 9) - 4));
    if (round % 3 == 0) w.fill([&](int64_t i) { return i % c.k < 40 ? 0.0 : w[i]; });
    // Both ends equally far: the first one decides the sign of the scale of 4 bits.
    if (round % 5 == 0) w.fill([&](int64_t) { return double(int64_t(rng() % 5) - 2); });
    if (round % 4 == 0) w.set(int64_t(rng() % uint64_t(w.numel())), round % 8 ? NAN : INFINITY);
    const Weight got(c, w);
    const std::string n = std::to_string(c.n), k = std::to_string(c.k);
    const std::string g = std::to_string(layout(c).groups());
    const std::string q = std::string(c.bits == 8 ? "i8[" : "u8[") + n + "," +
                          std::to_string(layout(c).row_bytes()) + "]";
    const std::string s = "f16[" + n + "," + g + "]";
    ir::Graph graph = ir::parse(
        "rmir 1\ninput %0 \"w\" : f32[" + n + "," + k + "]\n%1, %2" + (c.symmetric ? "" : ", %3") +
        " = quantize(%0) {bits=" + std::to_string(c.bits) + ", group=" + std::to_string(c.group) +
        ", symmetric=" + (c.symmetric ? "1" : "0") + ", tile=" + std::to_string(c.tile) +
        "} : " + q + ", " + s + (c.symmetric ? "" : ", " + s) + "\nreturn %1, %2" +
        (c.symmetric ? "" : ", %3") + "\n");
    ops::infer_and_check(graph);
    ops::HostTensor in = ops::zeros({ir::DType::kF32, {c.n, c.k}});
    std::memcpy(in.bytes.data(), w.data(), in.bytes.size());
    const auto want = ops::evaluate(graph, {in}, {});
    CHECK(std::memcmp(want[0].bytes.data(), got.q.data(), want[0].bytes.size()) == 0);
    const auto same = [](const ops::HostTensor& a, const Tensor& b) {
      const std::vector<double> x = ops::to_doubles(a);
      for (size_t i = 0; i < x.size(); ++i) {
        const double y = b[static_cast<int64_t>(i)];
        if (!(x[i] == y || (std::isnan(x[i]) && std::isnan(y)))) return false;
      }
      return true;
    };
    CHECK(same(want[1], got.scale));
    if (!c.symmetric) CHECK(same(want[2], got.zero));
  }
}

TEST_CASE("a quantised weight is within half a step of the weight") {
  std::mt19937 rng(54);
  for (int64_t bits : {8, 4}) {
    for (bool symmetric : {true, false}) {
      const Case c{1, 7, 300, bits, 64, symmetric, false, false, "none"};
      Tensor w(Type::f32, {c.n, c.k});
      w.normal(rng);
      const Weight got(c, w);
      for (int64_t r = 0; r < c.n; ++r) {
        const auto row = dequantised(c, got, r);
        for (int64_t i = 0; i < c.k; ++i) {
          const double step = std::fabs(got.scale[r * layout(c).groups() + i / c.group]);
          // The largest value of the other sign may lie a step beyond 4 bits' range.
          const double most = bits == 4 && symmetric ? 1.01 : 0.51 + (bits == 8 ? 0.07 : 0.02);
          CHECK(std::fabs(row[size_t(i)] - w[r * c.k + i]) <= most * step);
        }
      }
    }
  }
}

TEST_CASE("NaN in x makes its row NaN and no other, whatever the number of rows") {
  std::mt19937 rng(55);
  for (auto [m, x_bits] : {std::pair{2, 16}, {2, 8}, {12, 8}}) {
    for (int64_t bits : {8, 4}) {
      const Case c{m, 44, 96, bits, 32, true, false, false, "none", x_bits};
      Tensor w(Type::f32, {c.n, c.k}), x(Type::f32, {m, c.k}), y(Type::f32, {m, c.n});
      w.normal(rng), x.normal(rng);
      const Weight weight(c, w);
      x.set(c.k + 5, NAN);
      on_every_row({"quant_linear", {&x, &weight.q, &weight.scale}, {&y}, Weight::attributes(c)},
                   [&](const std::string&) {
                     for (int64_t i = 0; i < y.numel(); ++i) {
                       CHECK(std::isnan(y[i]) == (i / c.n == 1));
                     }
                   });
    }
  }
}

TEST_CASE("quant_linear gives the same bits on any number of threads and for any few rows") {
  std::mt19937 rng(56);
  for (auto [bits, x_bits] : {std::pair{8, 16}, {4, 16}, {8, 8}, {4, 8}}) {
    const Case c{8, 333, 256, bits, 32, true, false, false, "none", x_bits};
    Tensor w(Type::f32, {c.n, c.k}), x(Type::f32, {c.m, c.k}), one(Type::f32, {1, c.k});
    Tensor y(Type::f32, {c.m, c.n}), z(Type::f32, {1, c.n});
    w.normal(rng), x.normal(rng);
    one.fill([&](int64_t i) { return x[5 * c.k + i]; });
    const Weight weight(c, w);
    const int threads = omp_get_max_threads();
    for (const rm_kernel* row : rows("quant_linear")) {
      const Call call{"quant_linear", {&x, &weight.q, &weight.scale}, {&y}, Weight::attributes(c)};
      if (!supports(*row, call)) continue;
      std::vector<double> first;
      for (int count : {1, 2, 5}) {
        omp_set_num_threads(count);
        REQUIRE(run(*row, call).code == RM_OK);
        for (int64_t i = 0; i < y.numel(); ++i) {
          if (count == 1) first.push_back(y[i]);
          CHECK(y[i] == first[size_t(i)]);
        }
      }
      omp_set_num_threads(threads);
      const Call lone{"quant_linear", {&one, &weight.q, &weight.scale}, {&z}, Weight::attributes(c)};
      if (!supports(*row, lone)) continue;  // a batch's kernel: compared with one row's below
      REQUIRE(run(*row, lone).code == RM_OK);
      for (int64_t i = 0; i < c.n; ++i) CHECK(z[i] == first[size_t(5 * c.n + i)]);
    }
  }
}

TEST_CASE("quant_linear beside many rows of bf16 is the same for any number of threads and rows") {
  std::mt19937 rng(58);
  // The last two: k in parts that share sums.
  for (auto [bits, tile, rows_of_x, k] : {std::tuple{8, 8, 75, 352}, {4, 8, 75, 352}, {8, 1, 75, 352},
                                         {4, 1, 75, 352}, {8, 8, 275, 608}, {4, 8, 267, 1000}}) {
    const Case c{rows_of_x, 333, k, bits, 32, true, true, true, "silu", tile == 8 ? 8 : 16, tile};
    Tensor w(Type::bf16, {c.n, c.k}), x(Type::bf16, {c.m, c.k}), bias(Type::bf16, {c.n});
    Tensor r(Type::bf16, {c.m, c.n}), y(Type::bf16, {c.m, c.n});
    w.normal(rng), x.normal(rng), bias.normal(rng), r.normal(rng);
    const Weight weight(c, w);
    auto attrs = Weight::attributes(c);
    attrs.push_back(text("activation", c.activation));
    const int threads = omp_get_max_threads();
    for (const rm_kernel* row : rows("quant_linear")) {
      const Call call{"quant_linear", {&x, &weight.q, &weight.scale, nullptr, &bias, &r}, {&y}, attrs};
      if (!supports(*row, call)) continue;
      CAPTURE(std::string(row->name.data, row->name.size));
      std::vector<double> first;
      for (int count : {1, 2, 5}) {
        omp_set_num_threads(count);
        REQUIRE(run(*row, call).code == RM_OK);
        for (int64_t i = 0; i < y.numel(); ++i) {
          if (count == 1) first.push_back(y[i]);
          CHECK(y[i] == first[size_t(i)]);
        }
      }
      omp_set_num_threads(threads);
      for (int64_t m : {9, 16, 17, 48}) {  // the last m rows alone
        const int64_t from = c.m - m;
        Tensor xs(Type::bf16, {m, c.k}), rs(Type::bf16, {m, c.n}), ys(Type::bf16, {m, c.n});
        xs.fill([&](int64_t i) { return x[from * c.k + i]; });
        rs.fill([&](int64_t i) { return r[from * c.n + i]; });
        REQUIRE(run(*row, {"quant_linear", {&xs, &weight.q, &weight.scale, nullptr, &bias, &rs},
                           {&ys}, attrs}).code == RM_OK);
        for (int64_t i = 0; i < ys.numel(); ++i) CHECK(ys[i] == first[size_t(from * c.n + i)]);
      }
    }
  }
}
