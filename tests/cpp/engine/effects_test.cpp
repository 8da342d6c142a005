// Nodes that draw random numbers run at every call, also over constants; pure ones run once.
#include <doctest/doctest.h>

#include "engine_support.hpp"
#include "ops/host_tensor.hpp"

using namespace rm;
using namespace rm::engine_test;
using engine::Program;

namespace {

// Counts its launches and writes the count.
float launches = 0;

std::shared_ptr<const select::KernelTable> counting_kernels() {
  static const rm_kernel row = [] {
    rm_kernel k{};
    k.struct_size = sizeof k;
    k.op = {"aten.*", 6};
    k.name = {"count", 5};
    k.num_configs = 1;
    k.traits = RM_KERNEL_FALLBACK;
    k.prepare = [](const rm_problem*, const rm_device_info*, uint32_t,
                   rm_kernel_state** out) -> rm_status* {
      *out = nullptr;
      return nullptr;
    };
    k.launch = [](const rm_launch* launch) -> rm_status* {
      *static_cast<float*>(launch->outputs[0]) = ++launches;
      return nullptr;
    };
    return k;
  }();
  static const rm_kernel copy = [] {
    rm_kernel k = row;
    k.op = {"copy", 4};
    k.launch = [](const rm_launch* launch) -> rm_status* {
      *static_cast<float*>(launch->outputs[0]) = *static_cast<const float*>(launch->inputs[0]);
      return nullptr;
    };
    return k;
  }();
  auto table = std::make_shared<select::KernelTable>();
  table->add("test", &row, nullptr);
  table->add("test", &copy, nullptr);
  return table;
}

double run(Program& program) {
  HostOutputs outputs;
  program.run({}, outputs);
  return ops::to_doubles(outputs.tensors[0])[0];
}

ir::Graph graph(const std::string& attributes) {
  std::mt19937 rng(1);
  return load("rmir 1\nweight %0 \"w\" : f32[1]\n%1 = aten.draw.default(%0)" + attributes +
                  " : f32[1]\nreturn %1\n",
              rng)
      .graph;
}

const std::map<std::string, engine::OwnedTensor> kWeights = {
    {"w", owned(ops::zeros({ir::DType::kF32, {1}}))}};

}  // namespace

TEST_CASE("an operator that may draw random numbers runs at every call") {
  Program random(graph(""), counting_kernels());
  random.set_weights(kWeights);
  launches = 0;
  for (int call = 1; call <= 3; ++call) CHECK(run(random) == call);
}

TEST_CASE("an operator that says it is pure runs once over constants") {
  Program pure(graph(" {pure=1}"), counting_kernels());
  pure.set_weights(kWeights);
  launches = 0;
  for (int call = 1; call <= 3; ++call) CHECK(run(pure) == 1);
  CHECK(launches == 1);
}
