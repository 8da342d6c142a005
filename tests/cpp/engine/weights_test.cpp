// Who owns weights, and what a swap of weights means for the runs around it. A kernel of our own
// calls the test back in the middle of preparing and of running, so no race has to be won.
#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

#include "engine_support.hpp"
#include "ops/host_tensor.hpp"

using namespace rm;
using namespace rm::engine_test;
using engine::OwnedTensor;
using engine::Program;
using ops::HostTensor;

namespace {

std::function<void()> while_preparing, while_running;

// Copies operand 1, four floats.
const rm_kernel* hook_row() {
  static const rm_kernel row = [] {
    rm_kernel k{};
    k.struct_size = sizeof k;
    k.op = {"aten.hook", 9};
    k.name = {"aten_hook", 9};
    k.num_configs = 1;
    k.traits = RM_KERNEL_FALLBACK;
    k.prepare = [](const rm_problem*, const rm_device_info*, uint32_t,
                   rm_kernel_state** out) -> rm_status* {
      if (while_preparing) while_preparing();
      *out = nullptr;
      return nullptr;
    };
    k.launch = [](const rm_launch* launch) -> rm_status* {
      if (while_running) while_running();
      std::memcpy(launch->outputs[0], launch->inputs[1], 4 * sizeof(float));
      return nullptr;
    };
    return k;
  }();
  return &row;
}

std::shared_ptr<const select::KernelTable> kernels() {
  auto table = std::make_shared<select::KernelTable>();
  table->add("test", hook_row(), nullptr);
  return table;
}

ir::Graph graph() {
  std::mt19937 rng(1);
  return load(
             "rmir 1\nsym s0 [1,64]\ninput %0 \"x\" : f32[s0]\nweight %1 \"w\" : f32[4]\n"
             "%2 = aten.hook(%0, %1) : f32[4]\nreturn %2\n",
             rng)
      .graph;
}

std::map<std::string, OwnedTensor> weight(double value) {
  return {{"w", owned(ops::from_doubles({ir::DType::kF32, {4}}, {value, value, value, value}))}};
}

double run(Program& program, int64_t size = 3) {
  HostTensor x = ops::zeros({ir::DType::kF32, {size}});
  HostOutputs outputs;
  program.run({view(x)}, outputs);
  return ops::to_doubles(outputs.tensors[0])[0];
}

struct Hooks {
  ~Hooks() { while_preparing = while_running = nullptr; }
};

}  // namespace

TEST_CASE("weights swapped while a shape is prepared are what every later call uses") {
  Hooks reset;
  Program program(graph(), kernels());
  program.set_weights(weight(1));
  while_preparing = [&] {
    while_preparing = nullptr;
    program.set_weights(weight(2));
  };
  const double meanwhile = run(program);
  CHECK((meanwhile == 1 || meanwhile == 2));
  CHECK(run(program) == 2);
}

TEST_CASE("a run keeps the weights it started with, and nobody keeps them after it") {
  Hooks reset;
  Program program(graph(), kernels());
  std::map<std::string, OwnedTensor> first = weight(1);
  const std::weak_ptr<const void> old = first["w"].owner;
  program.set_weights(first);
  first.clear();
  CHECK(run(program) == 1);
  while_running = [&] {
    while_running = nullptr;
    program.set_weights(weight(2));
    CHECK_FALSE(old.expired());
  };
  CHECK(run(program) == 1);
  CHECK(old.expired());
  CHECK(run(program) == 2);
}

TEST_CASE("replaced weights are dropped at once when no run uses them") {
  Program program(graph(), kernels());
  std::map<std::string, OwnedTensor> first = weight(1);
  const std::weak_ptr<const void> old = first["w"].owner;
  program.set_weights(first);
  first.clear();
  for (int64_t size = 1; size < 5; ++size) CHECK(run(program, size) == 1);
  program.set_weights(weight(2));
  CHECK(old.expired());
}

TEST_CASE("weights that are refused leave the old ones in place") {
  Program program(graph(), kernels());
  program.set_weights(weight(1));
  CHECK_THROWS(program.set_weights({}));
  CHECK(run(program) == 1);
}

TEST_CASE("threads run many shapes while others swap weights") {
  std::mt19937 rng(31);
  Case c = load(
      "rmir 1\nsym s0 [1,64]\ninput %0 \"x\" : f32[s0,32]\nweight %1 \"w\" : f32[64,32]\n"
      "weight %2 \"b\" : f32[64]\n%3 = linear(%0, %1, %2) : f32[s0,64]\nreturn %3\n",
      rng);
  Program program(c.graph, cpu_kernels(), {}, engine::Packing::kLater);
  // Weights of equal elements: a result made from two generations would show.
  auto constant = [&](double value) {
    std::map<std::string, OwnedTensor> out;
    for (const auto& [name, t] : c.weights) {
      std::vector<double> values(static_cast<size_t>(t.size()), name == "w" ? value : 0);
      out[name] = owned(ops::from_doubles(t.type, values));
    }
    return out;
  };
  program.set_weights(constant(1));
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0}, runs{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; !stop; ++round) {
        HostTensor x = ops::zeros({ir::DType::kF32, {1 + (round + t) % 7, 32}});
        x = ops::from_doubles(x.type, std::vector<double>(static_cast<size_t>(x.size()), 1));
        HostOutputs outputs;
        program.run({view(x)}, outputs);
        const std::vector<double> y = ops::to_doubles(outputs.tensors[0]);
        for (double v : y) wrong += v != y[0] || (v != 32 && v != 64) ? 1 : 0;
        ++runs;
      }
    });
  }
  for (int swap = 0; swap < 200 || runs < 200; ++swap) program.set_weights(constant(1 + swap % 2));
  stop = true;
  for (auto& t : threads) t.join();
  CHECK(wrong == 0);
}
