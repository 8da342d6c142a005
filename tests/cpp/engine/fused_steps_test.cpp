// Steps that a device does as one: programs give what they give step by step, whatever was fused, and
// only what a kernel takes is fused. The kernels here are naive ones of the test.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "backend/registry.hpp"
#include "engine/bind_symbols.hpp"
#include "engine_support.hpp"
#include "rm/plugin.hpp"

using namespace rm;
using namespace rm::engine_test;
using engine::Program;
using ops::HostTensor;

namespace {

struct Shape {
  bool present = false;
  std::vector<int64_t> dims, strides;
  int64_t size() const {
    int64_t n = 1;
    for (int64_t d : dims) n *= d;
    return n;
  }
};

/// Made of a problem, which is gone when the kernel runs.
struct State {
  std::vector<Shape> in, out;
  std::map<std::string, double> numbers;
  std::string activation;
};

// What the table's rows are asked for; tests change it.
struct Allowed {
  size_t weights = 3;
  bool norm = true, gate = true, attention = true, updates = true;
  int64_t rows = 8;
  bool centred = true, plain = true;  // layer norms; attention without angles
};
Allowed allowed;

double last_stable = -1;  // the attribute of the append_sdpa that ran last

Shape shape_of(const rm_tensor* t) {
  if (t == nullptr) return {};
  return {true, {t->shape, t->shape + t->ndim}, {t->strides, t->strides + t->ndim}};
}

State state_of(const rm_problem& p) {
  State s;
  for (size_t i = 0; i < p.num_inputs; ++i) s.in.push_back(shape_of(p.inputs[i]));
  for (size_t i = 0; i < p.num_outputs; ++i) s.out.push_back(shape_of(p.outputs[i]));
  for (size_t i = 0; i < p.num_attrs; ++i) {
    const std::string name(p.attrs[i].name.data, p.attrs[i].name.size);
    if (p.attrs[i].kind == RM_ATTR_INT) s.numbers[name] = static_cast<double>(p.attrs[i].i);
    if (p.attrs[i].kind == RM_ATTR_FLOAT) s.numbers[name] = p.attrs[i].f;
    if (p.attrs[i].kind == RM_ATTR_STRING) s.activation.assign(p.attrs[i].s.data, p.attrs[i].s.size);
  }
  return s;
}

/// Operands of a weight and its bias, of `linears` and of `quant_linears`.
size_t each(const State& s) { return s.numbers.count("bits") != 0 ? 3 : 2; }

int takes_linears(const rm_problem* p, const rm_device_info*, rm_str*) {
  const State s = state_of(*p);
  if (s.in[0].size() > allowed.rows * s.in[0].dims.back()) return 0;
  const size_t weights = (s.in.size() - 4) / each(s);
  if (s.numbers.at("centred") != 0 && !allowed.centred) return 0;
  if (s.numbers.at("gated") != 0 && !allowed.gate) return 0;
  return weights <= allowed.weights && (allowed.norm || !s.in[1].present);
}
int takes_all(const rm_problem*, const rm_device_info*, rm_str*) { return 1; }
int takes_attention(const rm_problem* p, const rm_device_info*, rm_str*) {
  return allowed.attention && (p->inputs[3] != nullptr || allowed.plain);
}

rm_status* prepare(const rm_problem* p, const rm_device_info*, uint32_t, rm_kernel_state** out) {
  *out = reinterpret_cast<rm_kernel_state*>(new State(state_of(*p)));
  return nullptr;
}
void release(rm_kernel_state* s) { delete reinterpret_cast<State*>(s); }
double cost(const rm_problem*, const rm_device_info*, uint32_t) { return 1; }

/// y = x w^T + bias of one row.
std::vector<double> product(const std::vector<double>& x, const float* w, const Shape& shape,
                            const float* bias) {
  std::vector<double> y;
  for (int64_t n = 0; n < shape.dims[0]; ++n) {
    double sum = bias != nullptr ? bias[n] : 0.0;
    for (size_t k = 0; k < x.size(); ++k) {
      sum += x[k] * w[n * shape.strides[0] + static_cast<int64_t>(k) * shape.strides[1]];
    }
    y.push_back(sum);
  }
  return y;
}

/// A weight of integers in pairs, the operand `at`, and its scales, in float32.
std::vector<float> widened(const rm_launch* l, const State& s, size_t at, int64_t k) {
  const auto* bytes = static_cast<const uint8_t*>(l->inputs[at]);
  const auto* scales = static_cast<const float*>(l->inputs[at + 1]);
  const int64_t n = s.in[at].dims[0], pitch = s.in[at].dims[1];
  const auto group = static_cast<int64_t>(s.numbers.at("group"));
  std::vector<float> w;
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t i = 0; i < k; ++i) {
      const uint8_t byte = bytes[r * pitch + (s.numbers.at("bits") == 8 ? i : i / 2)];
      const int q = s.numbers.at("bits") == 8 ? static_cast<int8_t>(byte) : (byte >> (i % 2 * 4) & 15) - 8;
      w.push_back(static_cast<float>(q) * scales[i / group * n + r]);
    }
  }
  return w;
}

/// x, q, scales, no zero points, bias, residual.
rm_status* quant_linear(const rm_launch* l) {
  const State& s = *reinterpret_cast<const State*>(l->state);
  const auto in = [&](size_t i) { return static_cast<const float*>(l->inputs[i]); };
  const int64_t k = s.in[0].dims.back();
  const std::vector<float> w = widened(l, s, 1, k);
  size_t at = 0;
  for (int64_t m = 0; m < s.in[0].size() / k; ++m) {
    const std::vector<double> x(in(0) + m * k, in(0) + (m + 1) * k);
    const Shape shape{true, {s.in[1].dims[0], k}, {k, 1}};
    for (const double y : product(x, w.data(), shape, s.in[4].present ? in(4) : nullptr)) {
      const double v = s.activation == "silu" ? y / (1 + std::exp(-y)) : y;
      static_cast<float*>(l->outputs[0])[at] = static_cast<float>(s.in[5].present ? v + in(5)[at] : v);
      ++at;
    }
  }
  return nullptr;
}

/// Row `m`.
void linears_row(const rm_launch* l, const State& s, int64_t m) {
  const auto in = [&](size_t i) { return static_cast<const float*>(l->inputs[i]); };
  std::vector<double> x;
  double squares = 0, mean = 0;
  const int64_t width = s.in[0].dims.back();
  for (int64_t k = 0; k < width && s.numbers.at("centred") != 0; ++k) {
    mean += in(0)[m * width + k] / static_cast<double>(width);
  }
  for (int64_t k = 0; k < width; ++k) {
    x.push_back(in(0)[m * width + k] - mean);
    squares += x.back() * x.back();
  }
  if (s.in[1].present) {
    const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) + s.numbers.at("eps"));
    for (size_t k = 0; k < x.size(); ++k) {
      x[k] *= scale * (in(1)[k] + s.numbers.at("weight_offset"));
      if (s.in[2].present) x[k] += in(2)[k];
    }
  }
  std::vector<std::vector<double>> y;
  for (size_t i = 4; i < s.in.size(); i += each(s)) {
    const size_t at = i + each(s) - 1;
    const float* bias = s.in[at].present ? in(at) : nullptr;
    if (each(s) == 2) {
      Shape weight = s.in[i];
      if (s.numbers.at("trans_b") == 0) {  // its columns are the rows
        std::swap(weight.dims[0], weight.dims[1]), std::swap(weight.strides[0], weight.strides[1]);
      }
      y.push_back(product(x, in(i), weight, bias));
      continue;
    }
    const auto k = static_cast<int64_t>(x.size());
    const std::vector<float> w = widened(l, s, i, k);
    y.push_back(product(x, w.data(), {true, {s.in[i].dims[0], k}, {k, 1}}, bias));
  }
  const auto act = [&](double v) {
    if (s.activation == "gelu_tanh") return v / (1 + std::exp(-1.59576912160573 * (v + 0.044715 * v * v * v)));
    return s.activation == "silu" ? v / (1 + std::exp(-v)) : v;
  };
  for (size_t o = 0; o < s.out.size(); ++o) {
    const size_t row = static_cast<size_t>(m) * y[o].size();
    for (size_t n = 0; n < y[o].size(); ++n) {
      double v = act(y[o][n]);
      if (s.numbers.at("gated") != 0) v *= y[1][n];
      if (s.in[3].present) v += in(3)[row + n];
      static_cast<float*>(l->outputs[o])[row + n] = static_cast<float>(v);
    }
  }
}

rm_status* linears(const rm_launch* l) {
  const State& s = *reinterpret_cast<const State*>(l->state);
  for (int64_t m = 0; m < s.in[0].size() / s.in[0].dims.back(); ++m) linears_row(l, s, m);
  return nullptr;
}

rm_status* append_sdpa(const rm_launch* l) {
  const State& s = *reinterpret_cast<const State*>(l->state);
  last_stable = s.numbers.at("stable");
  const auto at = [&](size_t i, int64_t b, int64_t h, int64_t d) {
    const std::vector<int64_t>& st = s.in[i].strides;
    return static_cast<double>(
        static_cast<const float*>(l->inputs[i])[b * st[0] + h * st[1] + d * st[3]]);
  };
  const int64_t dim = s.in[0].dims[3], heads = s.in[0].dims[1], groups = s.in[1].dims[1];
  const auto rotated = [&](size_t i, int64_t b, int64_t h, int64_t d) {
    if (!s.in[3].present) return at(i, b, h, d);
    const int64_t half = dim / 2, other = d < half ? d + half : d - half;
    return at(i, b, h, d) * at(3, b, 0, d) +
           (d < half ? -1.0 : 1.0) * at(i, b, h, other) * at(4, b, 0, d);
  };
  const int64_t position = *static_cast<const int64_t*>(l->inputs[5]);
  const auto cache = [&](size_t o, int64_t b, int64_t g, int64_t t, int64_t d) -> float& {
    const std::vector<int64_t>& st = s.out[o].strides;
    return static_cast<float*>(l->outputs[o])[b * st[0] + g * st[1] + t * st[2] + d * st[3]];
  };
  for (int64_t b = 0; b < s.in[0].dims[0]; ++b) {
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t d = 0; d < dim; ++d) {
        cache(1, b, g, position, d) = static_cast<float>(rotated(1, b, g, d));
        cache(2, b, g, position, d) = static_cast<float>(at(2, b, g, d));
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t g = h / (heads / groups);
      const int64_t keys = s.numbers.at("ends") != 0 ? position + 1 : s.out[1].dims[2];
      std::vector<double> score;
      double high = -std::numeric_limits<double>::infinity(), total = 0;
      for (int64_t t = 0; t < keys; ++t) {
        double sum = 0;
        for (int64_t d = 0; d < dim; ++d) sum += rotated(0, b, h, d) * cache(1, b, g, t, d);
        sum *= s.numbers.at("scale");
        if (s.in[6].present) {
          const std::vector<int64_t>& st = s.in[6].strides;
          const bool seen =
              static_cast<const uint8_t*>(l->inputs[6])[b * st[0] + h * st[1] + t * st[3]] != 0;
          if (!seen) sum = -std::numeric_limits<double>::infinity();
        }
        score.push_back(sum);
        high = std::max(high, sum);
      }
      for (double& v : score) total += v = std::exp(v - high);
      for (int64_t d = 0; d < dim; ++d) {
        double sum = 0;
        for (int64_t t = 0; t < keys; ++t) sum += score[static_cast<size_t>(t)] * cache(2, b, g, t, d);
        const std::vector<int64_t>& st = s.out[0].strides;
        static_cast<float*>(l->outputs[0])[b * st[0] + h * st[1] + d * st[3]] =
            static_cast<float>(sum / total);
      }
    }
  }
  return nullptr;
}

int takes_adams(const rm_problem*, const rm_device_info*, rm_str*) { return allowed.updates; }

rm_status* adams(const rm_launch* l) {
  const State& s = *reinterpret_cast<const State*>(l->state);
  const auto in = [&](size_t i) { return static_cast<const float*>(l->inputs[i]); };
  const float* number = in(0);
  if (s.in[1].present && !*static_cast<const bool*>(l->inputs[1])) return nullptr;  // it is in place
  for (size_t i = 2, y = 0; i < s.in.size(); i += 4, y += 3) {
    auto* p = static_cast<float*>(l->outputs[y]);
    auto* m = static_cast<float*>(l->outputs[y + 1]);
    auto* v = static_cast<float*>(l->outputs[y + 2]);
    for (int64_t k = 0; k < s.in[i].size(); ++k) {
      const float g = in(i + 1)[k];
      m[k] = in(i + 2)[k] + (g - in(i + 2)[k]) * number[2];
      v[k] = in(i + 3)[k] * number[3] + g * g * number[4];
      p[k] = in(i)[k] - m[k] / (std::sqrt(v[k]) / number[7] + number[5]) * number[6];
    }
  }
  return nullptr;
}

/// The CPU's kernels and the test's own for some operators.
std::shared_ptr<const select::KernelTable> kernels_with(const std::vector<std::string>& operators) {
  auto table = std::make_shared<select::KernelTable>();
  Backend& cpu = backend::registry().load(RM_CPU_PLUGIN);
  static std::vector<rm_kernel>& rows = *new std::vector<rm_kernel>();
  if (rows.empty()) {
    const auto add = [](const char* op, auto supports, auto launch) {
      rm_kernel k{};
      k.struct_size = sizeof k, k.op = k.name = plugin::str(op), k.digest = plugin::str("1");
      k.num_configs = 1, k.supports = supports, k.cost_ns = cost, k.prepare = prepare;
      k.release = release, k.launch = launch;
      rows.push_back(k);
    };
    add("linears", takes_linears, linears);
    add("quant_linears", takes_linears, linears);
    add("quant_linear", takes_all, quant_linear);
    add("append_sdpa", takes_attention, append_sdpa);
    add("adams", takes_adams, adams);
  }
  for (const rm_kernel& k : cpu.kernels()) table->add("cpu", &k, &cpu.get_device_info(0));
  for (const rm_kernel& k : rows) {
    const std::string op(k.op.data, k.op.size);
    if (std::find(operators.begin(), operators.end(), op) == operators.end()) continue;
    table->add("test", &k, &cpu.get_device_info(0));
  }
  return table;
}

std::shared_ptr<const select::KernelTable> fusing_kernels() {
  return kernels_with({"linears", "append_sdpa"});
}

// A layer of a decoder's step: norms, products, rotation, the cache and attention to it.
std::string step_program(int64_t batch, const std::string& mask) {
  const std::string b = std::to_string(batch);
  return "rmir 1\nsym s0 [2,64]\ninput %0 \"x\" : f32[" + b + ",1,32]\ninput %1 \"length\" : i64[]\n" +
         "input %2 \"open\" : bool[" + b + ",1,1,s0]\n" + "input %3 \"keys\" : f32[" + b +
         ",2,s0,8] donated\n" + "input %4 \"values\" : f32[" + b + ",2,s0,8] donated\n" +
         "input %5 \"cos\" : f32[" + b + ",1,1,8]\ninput %6 \"sin\" : f32[" + b +
         ",1,1,8]\n"
         "weight %7 \"n1\" : f32[32]\nweight %8 \"q\" : f32[32,32]\nweight %9 \"k\" : f32[16,32]\n"
         "weight %10 \"v\" : f32[16,32]\nweight %11 \"o\" : f32[32,32]\nweight %12 \"n2\" : f32[32]\n"
         "weight %13 \"gate\" : f32[48,32]\nweight %14 \"up\" : f32[48,32]\n"
         "weight %15 \"down\" : f32[32,48]\nweight %16 \"kb\" : f32[16]\n"
         "literal %17 : i64[1] = 0000000000000000\n"
         "%18 = add(%1, %17) : i64[1]\n%19 = iota() {start=<0>, step=1} : i64[s0]\n"
         "%20 = reshape(%18) {shape=<1,1,1,1>} : i64[1,1,1,1]\n"
         "%21 = reshape(%19) {shape=<1,1,1,s0>} : i64[1,1,1,s0]\n" +
         mask +
         "%25 = rms_norm(%0, %7) {eps=0x1p-10, weight_offset=0x1p+0} : f32[" + b + ",1,32]\n" +
         "%26 = gemm(%25, %8, _, _) {activation=\"none\", trans_b=1} : f32[" + b + ",1,32]\n" +
         "%27 = gemm(%25, %9, %16, _) {activation=\"none\", trans_b=1} : f32[" + b + ",1,16]\n" +
         "%28 = gemm(%25, %10, _, _) {activation=\"none\", trans_b=1} : f32[" + b + ",1,16]\n" +
         "%29 = reshape(%26) {shape=<" + b + ",4,1,8>} : f32[" + b + ",4,1,8]\n" +
         "%30 = reshape(%27) {shape=<" + b + ",2,1,8>} : f32[" + b + ",2,1,8]\n" +
         "%31 = reshape(%28) {shape=<" + b + ",2,1,8>} : f32[" + b + ",2,1,8]\n" +
         "%32 = rope(%29, %5, %6) {interleaved=0} : f32[" + b + ",4,1,8]\n" +
         "%33 = rope(%30, %5, %6) {interleaved=0} : f32[" + b + ",2,1,8]\n" +
         "%34 = index_copy(%3, %18, %33) {axis=2} : f32[" + b + ",2,s0,8]\n" +
         "%35 = index_copy(%4, %18, %31) {axis=2} : f32[" + b + ",2,s0,8]\n" +
         "%36 = sdpa(%32, %34, %35, %24) {is_causal=0, scale=0x1p-2} : f32[" + b + ",4,1,8]\n" +
         "%37 = reshape(%36) {shape=<" + b + ",1,32>} : f32[" + b + ",1,32]\n" +
         "%38 = gemm(%37, %11, _, %0) {activation=\"none\", trans_b=1} : f32[" + b + ",1,32]\n" +
         "%39 = rms_norm(%38, %12) {eps=0x1p-10} : f32[" + b + ",1,32]\n" +
         "%40 = gemm(%39, %13, _, _) {activation=\"silu\", trans_b=1} : f32[" + b + ",1,48]\n" +
         "%41 = gemm(%39, %14, _, _) {activation=\"none\", trans_b=1} : f32[" + b + ",1,48]\n" +
         "%42 = mul(%40, %41) : f32[" + b + ",1,48]\n" +
         "%43 = gemm(%42, %15, _, %38) {activation=\"none\", trans_b=1} : f32[" + b + ",1,32]\n" +
         "return %43, %34, %35\n";
}

const char* const kRangeOnly =
    "%22 = le(%21, %20) : bool[1,1,1,s0]\n%23 = reshape(%22) {shape=<1,1,1,s0>} : bool[1,1,1,s0]\n"
    "%24 = reshape(%23) {shape=<1,1,1,s0>} : bool[1,1,1,s0]\n";

std::string with_padding(int64_t batch) {
  const std::string b = std::to_string(batch);
  return "%22 = ge(%20, %21) : bool[1,1,1,s0]\n%23 = and(%2, %22) : bool[" + b +
         ",1,1,s0]\n%24 = reshape(%23) {shape=<" + b + ",1,1,s0>} : bool[" + b + ",1,1,s0]\n";
}

struct Found {
  HostTensor result, keys, values;
  std::map<std::string, int64_t> kernels;
};

Found run(const Case& c, const std::shared_ptr<const select::KernelTable>& kernels,
          std::vector<HostTensor> inputs) {
  Program program(c.graph, kernels);
  program.set_weights(c.weight_tensors());
  std::vector<engine::TensorView> views;
  for (const HostTensor& t : inputs) views.push_back(view(t));
  HostOutputs outputs;
  program.run(views, outputs);
  CHECK(outputs.reused.size() == 2);  // the caches stay where they are
  return {outputs.tensors[0], inputs[3], inputs[4], program.report().kernels};
}

/// What is fused of the layer, and that it changes no result.
std::map<std::string, int64_t> compare(int64_t batch, const std::string& mask, std::mt19937& rng) {
  const Case c = load(step_program(batch, mask), rng);
  std::map<std::string, int64_t> kernels;
  for (int64_t capacity : {16, 33}) {
    for (int64_t position : {int64_t{0}, capacity / 2, capacity - 1}) {
      std::vector<HostTensor> inputs{
          random_tensor(rng, ir::DType::kF32, {batch, 1, 32}),
          ops::from_doubles({ir::DType::kI64, {}}, {static_cast<double>(position)}),
          random_tensor(rng, ir::DType::kBool, {batch, 1, 1, capacity}),
          random_tensor(rng, ir::DType::kF32, {batch, 2, capacity, 8}),
          random_tensor(rng, ir::DType::kF32, {batch, 2, capacity, 8}),
          random_tensor(rng, ir::DType::kF32, {batch, 1, 1, 8}),
          random_tensor(rng, ir::DType::kF32, {batch, 1, 1, 8})};
      for (int64_t b = 0; b < batch; ++b) inputs[2].bytes[static_cast<size_t>(b * capacity + position)] = 1;
      const Found alone = run(c, cpu_kernels(), inputs), fused = run(c, fusing_kernels(), inputs);
      CHECK(max_difference(alone.result, fused.result) < 1e-4);
      CHECK(max_difference(alone.keys, fused.keys) < 1e-5);
      CHECK(max_difference(alone.values, fused.values) < 1e-5);
      kernels = fused.kernels;
    }
  }
  return kernels;
}

int64_t count(const std::map<std::string, int64_t>& kernels, const std::string& part) {
  int64_t n = 0;
  for (const auto& [name, steps] : kernels) n += name.find(part) != std::string::npos ? steps : 0;
  return n;
}

}  // namespace

TEST_CASE("a layer of one row becomes five steps, with the results of all") {
  std::mt19937 rng(1);
  allowed = {};
  for (const std::string& mask : {std::string(kRangeOnly), with_padding(1)}) {
    const auto kernels = compare(1, mask, rng);
    CHECK(count(kernels, "test/linears") == 2);  // q, k, v; gate and up; each with its norm
    CHECK(count(kernels, "test/append_sdpa") == 1);
    CHECK(count(kernels, "gemm") == 2);
    CHECK(count(kernels, "rms_norm") == 0);
    CHECK(count(kernels, "rope") == 0);
    CHECK(count(kernels, "index_copy") == 0);
    CHECK(last_stable == 1);
  }
}

namespace {

/// A layer as GPT-2 has it: layer norms, one product for q, k and v, no rotation. `shift`: the first norm has
/// a bias, and products do.
std::string centred_program(bool shift, bool rows) {
  const auto weight = [&](const std::string& at, const std::string& name, int n, int k) {
    return "weight " + at + " \"" + name + "\" : f32[" + std::to_string(rows ? n : k) + "," + std::to_string(rows ? k : n) + "]\n";
  };
  const std::string end = std::string("trans_b=") + (rows ? "1" : "0") + "}";
  const std::string bias = shift ? "%9" : "_", norm_bias = shift ? "%8" : "_";
  return std::string("rmir 1\nsym s0 [2,64]\ninput %0 \"x\" : f32[1,1,32]\ninput %1 \"length\" : i64[]\n") +
         "input %2 \"open\" : bool[1,1,1,s0]\ninput %3 \"keys\" : f32[1,4,s0,8] donated\n"
         "input %4 \"values\" : f32[1,4,s0,8] donated\ninput %5 \"cos\" : f32[1,1,1,8]\n"
         "input %6 \"sin\" : f32[1,1,1,8]\nweight %7 \"n1\" : f32[32]\nweight %8 \"nb\" : f32[32]\n"
         "weight %9 \"qkvb\" : f32[96]\n" +
         weight("%10", "qkv", 96, 32) + weight("%11", "o", 32, 32) + "weight %12 \"n2\" : f32[32]\n" +
         weight("%13", "fc", 128, 32) + "weight %14 \"fcb\" : f32[128]\n" + weight("%15", "down", 32, 128) +
         "weight %16 \"ob\" : f32[32]\n"
         "literal %17 : i64[1] = 0000000000000000\n"
         "%18 = add(%1, %17) : i64[1]\n%19 = iota() {start=<0>, step=1} : i64[s0]\n"
         "%20 = reshape(%18) {shape=<1,1,1,1>} : i64[1,1,1,1]\n"
         "%21 = reshape(%19) {shape=<1,1,1,s0>} : i64[1,1,1,s0]\n" +
         with_padding(1) + "%25 = layer_norm(%0, %7, " + norm_bias + ") {eps=0x1p-10} : f32[1,1,32]\n" +
         "%26 = gemm(%25, %10, " + bias + ", _) {activation=\"none\", " + end + " : f32[1,1,96]\n" +
         "%27 = slice(%26) {axis=2, start=<0>, step=1, stop=<32>} : f32[1,1,32]\n"
         "%28 = slice(%26) {axis=2, start=<32>, step=1, stop=<64>} : f32[1,1,32]\n"
         "%29 = slice(%26) {axis=2, start=<64>, step=1, stop=<96>} : f32[1,1,32]\n"
         "%30 = reshape(%27) {shape=<1,4,1,8>} : f32[1,4,1,8]\n"
         "%31 = reshape(%28) {shape=<1,4,1,8>} : f32[1,4,1,8]\n"
         "%32 = reshape(%29) {shape=<1,4,1,8>} : f32[1,4,1,8]\n"
         "%34 = index_copy(%3, %18, %31) {axis=2} : f32[1,4,s0,8]\n"
         "%35 = index_copy(%4, %18, %32) {axis=2} : f32[1,4,s0,8]\n"
         "%36 = sdpa(%30, %34, %35, %24) {is_causal=0, scale=0x1p-2} : f32[1,4,1,8]\n"
         "%37 = reshape(%36) {shape=<1,1,32>} : f32[1,1,32]\n"
         "%38 = gemm(%37, %11, %16, %0) {activation=\"none\", " + end + " : f32[1,1,32]\n"
         "%39 = layer_norm(%38, %12, %8) {eps=0x1p-10} : f32[1,1,32]\n"
         "%40 = gemm(%39, %13, %14, _) {activation=\"gelu_tanh\", " + end + " : f32[1,1,128]\n"
         "%43 = gemm(%40, %15, %16, %38) {activation=\"none\", " + end + " : f32[1,1,32]\n"
         "return %43, %34, %35\n";
}

}  // namespace

TEST_CASE("a layer with layer norms and without rotation becomes five steps too") {
  std::mt19937 rng(7);
  for (const auto& [shift, rows] : {std::pair{true, true}, {false, true}, {true, false}}) {
    const Case c = load(centred_program(shift, rows), rng);
    for (const auto& [centred, plain] : {std::pair{true, true}, {false, true}, {true, false}}) {
      allowed = {};
      allowed.centred = centred, allowed.plain = plain;
      std::vector<HostTensor> inputs{
          random_tensor(rng, ir::DType::kF32, {1, 1, 32}), ops::from_doubles({ir::DType::kI64, {}}, {5.0}),
          random_tensor(rng, ir::DType::kBool, {1, 1, 1, 16}), random_tensor(rng, ir::DType::kF32, {1, 4, 16, 8}),
          random_tensor(rng, ir::DType::kF32, {1, 4, 16, 8}), random_tensor(rng, ir::DType::kF32, {1, 1, 1, 8}),
          random_tensor(rng, ir::DType::kF32, {1, 1, 1, 8})};
      inputs[2].bytes[5] = 1;
      const Found alone = run(c, cpu_kernels(), inputs), fused = run(c, fusing_kernels(), inputs);
      CHECK(max_difference(alone.result, fused.result) < 1e-4);
      CHECK(max_difference(alone.keys, fused.keys) < 1e-5);
      CHECK(max_difference(alone.values, fused.values) < 1e-5);
      CHECK(count(fused.kernels, "test/linears") == (centred ? 2 : 0));
      CHECK(count(fused.kernels, "layer_norm") == (centred ? 0 : 2));
      CHECK(count(fused.kernels, "gemm") == (centred ? 2 : 4));
      CHECK(count(fused.kernels, "test/append_sdpa") == (plain ? 1 : 0));
      CHECK(count(fused.kernels, "index_copy") == (plain ? 0 : 2));
    }
  }
  allowed = {};
}

TEST_CASE("a rotation whose angles differ stays a step, and attention takes its result") {
  std::mt19937 rng(8);
  allowed = {};
  std::string text = step_program(1, kRangeOnly);
  const std::string from = "rope(%30, %5, %6)";
  text.replace(text.find(from), from.size(), "rope(%30, %6, %5)");
  const Case c = load(text, rng);
  std::vector<HostTensor> inputs{random_tensor(rng, ir::DType::kF32, {1, 1, 32}),
                                 ops::from_doubles({ir::DType::kI64, {}}, {5.0}),
                                 random_tensor(rng, ir::DType::kBool, {1, 1, 1, 16}),
                                 random_tensor(rng, ir::DType::kF32, {1, 2, 16, 8}),
                                 random_tensor(rng, ir::DType::kF32, {1, 2, 16, 8}),
                                 random_tensor(rng, ir::DType::kF32, {1, 1, 1, 8}),
                                 random_tensor(rng, ir::DType::kF32, {1, 1, 1, 8})};
  const Found alone = run(c, cpu_kernels(), inputs), fused = run(c, fusing_kernels(), inputs);
  CHECK(max_difference(alone.result, fused.result) < 1e-4);
  CHECK(max_difference(alone.keys, fused.keys) < 1e-5);
  CHECK(count(fused.kernels, "rope") == 2);
  CHECK(count(fused.kernels, "test/append_sdpa") == 1);
}

TEST_CASE("attention is told whether something else of the plan writes the caches") {
  std::mt19937 rng(4);
  allowed = {};
  std::string text = step_program(1, kRangeOnly);
  for (size_t at = 0; (at = text.find(" donated", at)) != std::string::npos;) text.erase(at, 8);
  const Case c = load(text, rng);  // whose caches are the caller's: the plan updates copies
  std::vector<HostTensor> inputs{random_tensor(rng, ir::DType::kF32, {1, 1, 32}),
                                 ops::from_doubles({ir::DType::kI64, {}}, {5.0}),
                                 random_tensor(rng, ir::DType::kBool, {1, 1, 1, 16}),
                                 random_tensor(rng, ir::DType::kF32, {1, 2, 16, 8}),
                                 random_tensor(rng, ir::DType::kF32, {1, 2, 16, 8}),
                                 random_tensor(rng, ir::DType::kF32, {1, 1, 1, 8}),
                                 random_tensor(rng, ir::DType::kF32, {1, 1, 1, 8})};
  Program program(c.graph, fusing_kernels());
  program.set_weights(c.weight_tensors());
  std::vector<engine::TensorView> views;
  for (const HostTensor& t : inputs) views.push_back(view(t));
  HostOutputs outputs;
  last_stable = -1;
  program.run(views, outputs);
  CHECK(count(program.report().kernels, "test/append_sdpa") == 1);
  CHECK(last_stable == 0);
}

TEST_CASE("products of up to eight rows become one step where the device takes so many") {
  std::mt19937 rng(2);
  for (const auto& [rows, taken, steps] : {std::tuple{3, 8, 2}, {8, 8, 2}, {9, 16, 0}, {3, 1, 0}}) {
    allowed = {};
    allowed.rows = taken;
    for (const std::string& mask : {std::string(kRangeOnly), with_padding(rows)}) {
      const auto kernels = compare(rows, mask, rng);
      CHECK(count(kernels, "test/linears") == steps);
      CHECK(count(kernels, "test/append_sdpa") == 1);
      CHECK(count(kernels, "rms_norm") == 2 - steps);
    }
  }
  allowed = {};
}

TEST_CASE("what no kernel takes is fused in part or stays as it was") {
  std::mt19937 rng(3);
  allowed = {3, false, true, true};
  auto kernels = compare(1, kRangeOnly, rng);
  CHECK(count(kernels, "test/linears") == 2);
  CHECK(count(kernels, "rms_norm") == 2);
  allowed = {3, true, false, true};
  kernels = compare(1, kRangeOnly, rng);
  CHECK(count(kernels, "test/linears") == 1);
  CHECK(count(kernels, "rms_norm") == 1);
  allowed = {0, true, true, true};
  kernels = compare(1, kRangeOnly, rng);
  CHECK(count(kernels, "test/linears") == 0);
  CHECK(count(kernels, "gemm") == 7);
  allowed = {};
}

TEST_CASE("a norm, a product or a cache that others read is not fused away") {
  std::mt19937 rng(4);
  allowed = {};
  const std::string whole = step_program(1, kRangeOnly);
  const std::string end = "return %43, %34, %35\n";
  const std::string body = whole.substr(0, whole.size() - end.size());
  struct Variant {
    const char* more;
    const char* kept;
  };
  const Variant variants[] = {
      {"%44 = exp(%25) : f32[1,1,32]\nreturn %43, %34, %35, %44\n", "rms_norm"},
      {"return %43, %34, %35, %41\n", "gemm"},
      {"return %43, %34, %35, %33\n", "rope"},
  };
  for (const Variant& v : variants) {
    CAPTURE(v.kept);
    const Case c = load(body + v.more, rng);
    std::vector<HostTensor> inputs{random_tensor(rng, ir::DType::kF32, {1, 1, 32}),
                                   ops::from_doubles({ir::DType::kI64, {}}, {5.0}),
                                   random_tensor(rng, ir::DType::kBool, {1, 1, 1, 16}),
                                   random_tensor(rng, ir::DType::kF32, {1, 2, 16, 8}),
                                   random_tensor(rng, ir::DType::kF32, {1, 2, 16, 8}),
                                   random_tensor(rng, ir::DType::kF32, {1, 1, 1, 8}),
                                   random_tensor(rng, ir::DType::kF32, {1, 1, 1, 8})};
    const Found alone = run(c, cpu_kernels(), inputs);
    const Found fused = run(c, fusing_kernels(), inputs);
    CHECK(max_difference(alone.result, fused.result) < 1e-4);
    CHECK(count(fused.kernels, v.kept) > (std::string(v.kept) == "gemm" ? 2 : 0));
  }
}

namespace {

/// Products of a normalised row with weights of 4 bits in groups of 32, but for `bits` of the third; then
/// a gated pair and the way back.
std::string quantised_program(int64_t rows, int third_bits, const std::string& ending) {
  const std::string m = std::to_string(rows);
  const auto weight = [](int at, const std::string& name, int64_t n, int64_t k, int bits) {
    const std::string size = std::to_string(n);
    return "weight %" + std::to_string(at) + " \"" + name + "\" : " + (bits == 8 ? "i8[" : "u8[") + size + "," +
           std::to_string(k * bits / 8) + "]\nweight %" + std::to_string(at + 1) + " \"" + name + "s\" : f32[" +
           std::to_string(k / 32) + "," + size + "]\n";
  };
  const auto product = [&](int at, const std::string& x, int w, const std::string& rest, const std::string& act,
                           int64_t n, int bits) {
    return "%" + std::to_string(at) + " = quant_linear(" + x + ", %" + std::to_string(w) + ", %" +
           std::to_string(w + 1) + ", _, " + rest + ") {activation=\"" + act + "\", bits=" + std::to_string(bits) +
           ", group=32, pairs=1} : f32[" + m + "," + std::to_string(n) + "]\n";
  };
  return "rmir 1\ninput %0 \"x\" : f32[" + m + ",64]\nweight %1 \"n1\" : f32[64]\nweight %2 \"b\" : f32[16]\n" +
         weight(3, "q", 64, 64, 4) + weight(5, "k", 16, 64, 4) + weight(7, "v", 16, 64, third_bits) +
         weight(9, "gate", 128, 64, 4) + weight(11, "up", 128, 64, 4) + weight(13, "down", 64, 128, 4) +
         "weight %15 \"n2\" : f32[64]\n%16 = rms_norm(%0, %1) {eps=0x1p-10, weight_offset=0x1p+0} : f32[" + m +
         ",64]\n" + product(17, "%16", 3, "_, _", "none", 64, 4) + product(18, "%16", 5, "%2, _", "none", 16, 4) +
         product(19, "%16", 7, "_, _", "none", 16, third_bits) + "%20 = rms_norm(%17, %15) {eps=0x1p-10} : f32[" +
         m + ",64]\n" + product(21, "%20", 9, "_, _", "silu", 128, 4) +
         product(22, "%20", 11, "_, _", "none", 128, 4) + "%23 = mul(%21, %22) : f32[" + m + ",128]\n" +
         product(24, "%23", 13, "_, %17", "none", 64, 4) + ending;
}

/// The kernels of the program where fused steps are asked for; results are those of all steps.
std::map<std::string, int64_t> compare_quantised(int64_t rows, int third_bits, const std::string& ending,
                                                 std::mt19937& rng) {
  const Case c = load(quantised_program(rows, third_bits, ending), rng);
  const HostTensor x = random_tensor(rng, ir::DType::kF32, {rows, 64});
  std::map<std::string, int64_t> kernels;
  std::vector<HostTensor> results[2];
  for (const bool fuses : {false, true}) {
    std::vector<std::string> operators{"quant_linear"};
    if (fuses) operators.emplace_back("quant_linears");
    Program program(c.graph, kernels_with(operators));
    program.set_weights(c.weight_tensors());
    HostOutputs outputs;
    program.run({view(x)}, outputs);
    results[fuses ? 1 : 0] = outputs.tensors;
    kernels = program.report().kernels;
    if (!fuses) CHECK(kernels["test/quant_linear"] == 6);
  }
  for (size_t i = 0; i < 3; ++i) {
    double largest = 1;
    for (double v : ops::to_doubles(results[0][i])) largest = std::max(largest, std::abs(v));
    CHECK(max_difference(results[0][i], results[1][i]) < 1e-4 * largest);
  }
  return kernels;
}

}  // namespace

TEST_CASE("quantised products of one row are fused as others are, where their groups are alike") {
  std::mt19937 rng(5);
  allowed = {};
  const std::string plain = "return %24, %18, %19\n";
  auto kernels = compare_quantised(1, 4, plain, rng);
  CHECK(kernels["test/quant_linears"] == 2);  // q, k, v; gate and up; each with its norm
  CHECK(kernels["test/quant_linear"] == 1);
  CHECK(count(kernels, "rms_norm") == 0);
  // Of other bits: a step of its own, and so is the norm that it reads too.
  kernels = compare_quantised(1, 8, plain, rng);
  CHECK(kernels["test/quant_linears"] == 2);
  CHECK(kernels["test/quant_linear"] == 2);
  CHECK(count(kernels, "rms_norm") == 1);
  // One of two products that are multiplied is a result: the two are a step, the multiplication is not.
  kernels = compare_quantised(1, 4, "return %24, %18, %22\n", rng);
  CHECK(kernels["test/quant_linears"] >= 1);
  CHECK(count(kernels, "ewise") == 1);
  allowed = {3, false, true, true};
  kernels = compare_quantised(1, 4, plain, rng);
  CHECK(kernels["test/quant_linears"] == 2);
  CHECK(count(kernels, "rms_norm") == 2);
  allowed = {0, true, true, true};
  kernels = compare_quantised(1, 4, plain, rng);
  CHECK(kernels["test/quant_linears"] == 0);
  CHECK(kernels["test/quant_linear"] == 6);
  allowed = {};
}

TEST_CASE("quantised products of several rows stay apart") {
  std::mt19937 rng(6);
  allowed = {};
  allowed.rows = 1;
  auto kernels = compare_quantised(2, 4, "return %24, %18, %19\n", rng);
  CHECK(kernels["test/quant_linears"] == 0);
  CHECK(kernels["test/quant_linear"] == 6);
  allowed = {};
}

namespace {

/// An update of `count` parameters, every third by the second row of numbers. `read`: something reads
/// the new value of the first parameter.
std::string update_program(int count, bool read) {
  std::string text = "rmir 1\ninput %0 \"numbers\" : f32[2,8]\ninput %1 \"apply\" : bool[]\n";
  int next = 2;
  const auto value = [](int i) { return "%" + std::to_string(i); };
  std::vector<std::string> types;
  for (int i = 0; i < count; ++i) {
    types.push_back("f32[" + std::to_string(i + 1) + ",5]");
    for (const char* name : {"g", "p", "m", "v"}) {
      text += "input " + value(next++) + " \"" + name + std::to_string(i) + "\" : " + types.back() +
              (name[0] == 'g' ? "\n" : " donated\n");
    }
  }
  const int rows = next;
  for (int r = 0; r < 2; ++r) {
    text += value(next++) + " = slice(%0) {axis=0, start=<" +
            std::to_string(r) + ">, step=1, stop=<" + std::to_string(r + 1) + ">} : f32[1,8]\n";
    text += value(next) + " = reshape(" + value(next - 1) + ") {shape=<8>} : f32[8]\n";
    ++next;
  }
  std::string results;
  for (int i = 0; i < count; ++i) {
    const std::string numbers = value(rows + (i % 3 == 2 ? 3 : 1)), &t = types[static_cast<size_t>(i)];
    const int g = 2 + 4 * i;
    text += value(next) + ", " + value(next + 1) + ", " + value(next + 2) + " = adam(" + value(g + 1) + ", " +
            value(g) + ", " + value(g + 2) + ", " + value(g + 3) + ", " + numbers + ", _, %1) " +
            "{decay=\"none\", maximize=0} : " + t + ", " + t + ", " + t + "\n";
    const int made = next;
    next += 3;
    for (int k = 0; k < 3; ++k) {
      text += value(next) + " = assign(" + value(g + 1 + k) + ", " + value(made + k) + ") : " + t + "\n";
      results += ", " + value(next++);
    }
    if (read && i == 0) {
      text += value(next) + " = neg(" + value(next - 3) + ") : " + t + "\n";
      results += ", " + value(next++);
    }
  }
  return text + "return " + results.substr(2) + "\n";
}

/// Inputs behind a step of the program, and its kernels.
std::pair<std::vector<HostTensor>, std::map<std::string, int64_t>> updated(
    const Case& c, const std::shared_ptr<const select::KernelTable>& kernels,
    std::vector<HostTensor> inputs) {
  Program program(c.graph, kernels);
  program.set_weights(c.weight_tensors());
  std::vector<engine::TensorView> views;
  for (const HostTensor& t : inputs) views.push_back(view(t));
  HostOutputs outputs;
  program.run(views, outputs);
  return {inputs, program.report().kernels};
}

}  // namespace

TEST_CASE("updates with the same numbers become one step of twelve parameters at most") {
  std::mt19937 rng(5);
  for (const auto& [count, read, fused] : {std::tuple(2, false, 1), std::tuple(7, false, 2), std::tuple(7, true, 2),
                                           std::tuple(20, false, 3), std::tuple(1, false, 0)}) {
    CAPTURE(count);
    const Case c = load(update_program(count, read), rng);
    for (const bool apply : {true, false}) {
      std::vector<HostTensor> inputs;
      inputs.push_back(ops::from_doubles({ir::DType::kF32, {int64_t{2}, int64_t{8}}},
                                         {0, 1, .1, .9, .1, 1e-3, .01, .5, 0, 1, .2, .8, .2, 1e-3, .02, .7}));
      inputs.push_back(ops::from_doubles({ir::DType::kBool, {}}, {apply ? 1.0 : 0.0}));
      for (int i = 0; i < count; ++i) {
        for (int k = 0; k < 4; ++k) {
          HostTensor t = random_tensor(rng, ir::DType::kF32, {i + 1, 5});
          if (k == 3) {  // squares
            std::vector<double> values = ops::to_doubles(t);
            for (double& v : values) v = std::abs(v);
            t = ops::from_doubles(t.type, values);
          }
          inputs.push_back(std::move(t));
        }
      }
      allowed = {};
      const auto [alone, plain] = updated(c, cpu_kernels(), inputs);
      const auto [together, kernels] = updated(c, kernels_with({"adams"}), inputs);
      for (size_t i = 0; i < alone.size(); ++i) CHECK(max_difference(alone[i], together[i]) < 1e-5);
      CHECK((max_difference(alone[3], inputs[3]) > 0) == apply);
      CHECK(::count(kernels, "test/adams") == fused);
      CHECK(::count(plain, "adam") == count);
      // The first one stays where its new value is read before the last.
      if (read) CHECK(::count(kernels, "cpu/adam") == 1);
      allowed.updates = false;
      CHECK(::count(updated(c, kernels_with({"adams"}), inputs).second, "test/adams") == 0);
    }
  }
  allowed = {};
}
