// Products with the element-wise step behind them, and slopes of several products in one step: programs
// give what they give step by step. The kernels here are naive ones of the test.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "backend/registry.hpp"
#include "engine_support.hpp"
#include "ops/registry.hpp"
#include "rm/plugin.hpp"

using namespace rm;
using namespace rm::engine_test;
using engine::Program;
using ops::HostTensor;

namespace {

struct View {
  bool present = false;
  std::vector<int64_t> dims, strides;
};

/// Made of a problem, which is gone when the kernel runs.
struct State {
  std::vector<View> in, out;
  bool rows = false;  // of b: trans_b
  ir::Attrs program;
};

// What the rows are asked for; tests change it.
int64_t most_rows = 1 << 20;  // of a slope's operands

View view_of(const rm_tensor* t) {
  if (t == nullptr) return {};
  return {true, {t->shape, t->shape + t->ndim}, {t->strides, t->strides + t->ndim}};
}

rm_status* prepare(const rm_problem* p, const rm_device_info*, uint32_t, rm_kernel_state** out) {
  auto* s = new State();
  for (size_t i = 0; i < p->num_inputs; ++i) s->in.push_back(view_of(p->inputs[i]));
  for (size_t i = 0; i < p->num_outputs; ++i) s->out.push_back(view_of(p->outputs[i]));
  for (size_t i = 0; i < p->num_attrs; ++i) {
    const rm_attr& a = p->attrs[i];
    const std::string name(a.name.data, a.name.size);
    if (name == "trans_b") s->rows = a.i != 0;
    if (name == "code") s->program["code"] = ir::Ints(a.ints, a.ints + a.count);
    if (name == "imm") s->program["imm"] = std::vector<double>(a.floats, a.floats + a.count);
  }
  *out = reinterpret_cast<rm_kernel_state*>(s);
  return nullptr;
}
void release(rm_kernel_state* s) { delete reinterpret_cast<State*>(s); }
double cost(const rm_problem*, const rm_device_info*, uint32_t) { return 1; }
int takes(const rm_problem* p, const rm_device_info*, rm_str*) { return p->inputs[0]->shape[0] <= most_rows; }

float get(const rm_launch* l, const State& s, size_t i, int64_t row, int64_t column) {
  const std::vector<int64_t>& st = s.in[i].strides;
  return static_cast<const float*>(l->inputs[i])[row * st[0] + column * st[1]];
}

rm_status* gemm_ewise(const rm_launch* l) {
  const State& s = *reinterpret_cast<const State*>(l->state);
  const int64_t m = s.out[0].dims[0], n = s.out[0].dims[1], k = s.in[0].dims[1];
  const ir::TensorType type{ir::DType::kF32, {m, n}};
  std::vector<HostTensor> values;
  std::vector<double> of(static_cast<size_t>(m * n));
  for (size_t i = 1; i < s.in.size(); ++i) {
    for (int64_t e = 0; e < m * n; ++e) {
      double v = i == 1 ? 0 : get(l, s, i, e / n, e % n);
      for (int64_t c = 0; i == 1 && c < k; ++c) {
        v += get(l, s, 0, e / n, c) * (s.rows ? get(l, s, 1, e % n, c) : get(l, s, 1, c, e % n));
      }
      of[static_cast<size_t>(e)] = v;
    }
    values.push_back(ops::from_doubles(type, of));
  }
  ir::Node node;
  node.op = "ewise", node.attrs = s.program;
  std::vector<const HostTensor*> operands;
  for (const HostTensor& t : values) operands.push_back(&t);
  const HostTensor made = ops::get("ewise").reference(node, operands, {type})[0];
  std::copy_n(made.bytes.data(), made.bytes.size(), static_cast<char*>(l->outputs[0]));
  return nullptr;
}

rm_status* slopes(const rm_launch* l) {
  const State& s = *reinterpret_cast<const State*>(l->state);
  for (size_t i = 0; i < s.in.size(); i += 2) {
    const int64_t m = s.in[i].dims[0], n = s.in[i].dims[1], k = s.in[i + 1].dims[1];
    for (int64_t j = 0; j < n; ++j) {
      float column = 0;
      for (int64_t r = 0; r < m; ++r) column += get(l, s, i, r, j);
      if (s.out[i + 1].present) static_cast<float*>(l->outputs[i + 1])[j] = column;
      for (int64_t c = 0; c < k; ++c) {
        float sum = 0;
        for (int64_t r = 0; r < m; ++r) sum += get(l, s, i, r, j) * get(l, s, i + 1, r, c);
        static_cast<float*>(l->outputs[i])[j * k + c] = sum;
      }
    }
  }
  return nullptr;
}

std::shared_ptr<const select::KernelTable> fusing_kernels() {
  auto table = std::make_shared<select::KernelTable>();
  Backend& cpu = backend::registry().load(RM_CPU_PLUGIN);
  static std::vector<rm_kernel>& rows = *new std::vector<rm_kernel>();
  if (rows.empty()) {
    const auto add = [](const char* op, auto launch) {
      rm_kernel k{};
      k.struct_size = sizeof k, k.op = k.name = plugin::str(op), k.digest = plugin::str("1");
      k.num_configs = 1, k.supports = takes, k.cost_ns = cost, k.prepare = prepare;
      k.release = release, k.launch = launch;
      rows.push_back(k);
    };
    add("gemm_ewise", gemm_ewise);
    add("slopes", slopes);
  }
  for (const rm_kernel& k : cpu.kernels()) table->add("cpu", &k, &cpu.get_device_info(0));
  for (const rm_kernel& k : rows) table->add("test", &k, &cpu.get_device_info(0));
  return table;
}

/// The backward of `layers` products and their activations: slopes of weights and biases. `early`: the
/// first slope of a weight is changed where it was made, and its new value read behind the others.
std::string backward(int layers, bool early) {
  std::string text = "rmir 1\ninput %0 \"g\" : f32[6,8]\n";
  int next = 1;
  const auto value = [](int i) { return "%" + std::to_string(i); };
  for (int i = 0; i < layers; ++i) {
    text += "input " + value(next++) + " \"x" + std::to_string(i) + "\" : f32[6,8]\n";
    text += "input " + value(next++) + " \"w" + std::to_string(i) + "\" : f32[8,8]\n";
  }
  std::string g = "%0", results;
  for (int i = 0; i < layers; ++i) {
    const std::string x = value(1 + 2 * i), w = value(2 + 2 * i);
    text += value(next) + " = permute(" + g + ") {axes=[1,0]} : f32[8,6]\n";
    text += value(next + 1) + " = gemm(" + value(next) + ", " + x +
            ", _, _) {activation=\"none\", trans_b=0} : f32[8,8]\n";
    text += value(next + 2) + " = reduce(" + g + ") {axes=[0], keepdim=0, kind=\"sum\"} : f32[8]\n";
    results += ", " + value(next + 1) + (i % 2 == 0 ? ", " + value(next + 2) : "");
    const std::string first = value(next + 1);
    next += 3;
    if (early && i == 0) {
      text += value(next) + " = gemm(" + first + ", " + w + ", _, _) {activation=\"none\", trans_b=0} : f32[8,8]\n";
      results += ", " + value(next++);
    }
    text += value(next) + " = gemm(" + g + ", " + w + ", _, _) {activation=\"none\", trans_b=" +
            std::to_string(i % 2) + "} : f32[6,8]\n";
    // 0 where x is at most 0.
    text += value(next + 1) + " = ewise(" + x + ", " + value(next) +
            ") {code=[0,0,0,-1,-1,52,0,0,2,-1,70,0,3,2,1], imm=f[0x0p+0]} : f32[6,8]\n";
    g = value(next + 1);
    next += 2;
  }
  return text + "return " + g + results + "\n";
}

std::pair<std::vector<HostTensor>, std::map<std::string, int64_t>> results_of(
    const Case& c, const std::shared_ptr<const select::KernelTable>& kernels,
    const std::vector<HostTensor>& inputs) {
  Program program(c.graph, kernels);
  std::vector<engine::TensorView> views;
  for (const HostTensor& t : inputs) views.push_back(view(t));
  HostOutputs outputs;
  outputs.tensors.resize(64);
  program.run(views, outputs);
  return {outputs.tensors, program.report().kernels};
}

int64_t count(const std::map<std::string, int64_t>& kernels, const std::string& name) {
  const auto it = kernels.find(name);
  return it == kernels.end() ? 0 : it->second;
}

}  // namespace

TEST_CASE("slopes of several products and sums of their columns become one step of twelve at most") {
  std::mt19937 rng(7);
  for (const auto& [layers, early, steps] :
       {std::tuple(1, false, 1), std::tuple(4, false, 1), std::tuple(4, true, 2), std::tuple(15, false, 2)}) {
    CAPTURE(layers);
    CAPTURE(early);
    const Case c = load(backward(layers, early), rng);
    std::vector<HostTensor> inputs{random_tensor(rng, ir::DType::kF32, {6, 8})};
    for (int i = 0; i < layers; ++i) {
      inputs.push_back(random_tensor(rng, ir::DType::kF32, {6, 8}));
      inputs.push_back(random_tensor(rng, ir::DType::kF32, {8, 8}));
      std::vector<double> w = ops::to_doubles(inputs.back());
      for (double& v : w) v *= 0.05;
      inputs.back() = ops::from_doubles(inputs.back().type, w);
    }
    most_rows = 1 << 20;
    const auto [plain, alone] = results_of(c, cpu_kernels(), inputs);
    const auto [fused, kernels] = results_of(c, fusing_kernels(), inputs);
    for (size_t i = 0; i < c.graph.outputs.size(); ++i) {
      CAPTURE(i);
      CHECK(max_difference(plain[i], fused[i]) < 2e-4);
    }
    CHECK(count(kernels, "test/slopes") == steps);
    CHECK(count(kernels, "test/gemm_ewise") == layers);
    most_rows = 5;  // what no kernel takes stays as it was
    const auto [same, left] = results_of(c, fusing_kernels(), inputs);
    for (size_t i = 0; i < c.graph.outputs.size(); ++i) CHECK(max_difference(plain[i], same[i]) == 0);
    CHECK(count(left, "test/slopes") == 0);
    CHECK(left == alone);
  }
  most_rows = 1 << 20;
}
