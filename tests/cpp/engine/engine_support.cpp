#include "engine_support.hpp"

#include <doctest/doctest.h>

#include <cmath>

#include "backend/registry.hpp"
#include "rm/plugin.hpp"
#include "ir/text.hpp"
#include "ops/registry.hpp"

namespace rm::engine_test {

const rm_device_info& cpu_that_launches() {
  static const rm_option cost{plugin::str("launch_ns"), plugin::str("2000")};
  static const rm_device_info& info = *[] {
    auto* out = new rm_device_info(backend::registry().load(RM_CPU_PLUGIN).get_device_info(0));
    out->properties = {&cost, 1};
    return out;
  }();
  return info;
}

std::shared_ptr<const select::KernelTable> cpu_kernels() {
  static const auto table = [] {
    auto t = std::make_shared<select::KernelTable>();
    Backend& cpu = backend::registry().load(RM_CPU_PLUGIN);
    for (const rm_kernel& k : cpu.kernels()) t->add("cpu", &k, &cpu.get_device_info(0));
    return t;
  }();
  return table;
}

void* HostOutputs::allocate(size_t index, const ir::Layout& layout) {
  ir::Dims dims(layout.dims.begin(), layout.dims.end());
  tensors[index] = ops::zeros({layout.dtype, dims});
  return tensors[index].bytes.data();
}

ops::HostTensor random_tensor(std::mt19937& rng, ir::DType dtype, ir::Dims dims, int64_t max_int) {
  ops::HostTensor t = ops::zeros({dtype, std::move(dims)});
  std::vector<double> values(static_cast<size_t>(t.size()));
  std::normal_distribution<double> normal(0, 0.5);
  for (auto& v : values) {
    v = ir::is_floating(dtype) ? normal(rng)
                               : static_cast<double>(rng() % static_cast<uint64_t>(max_int));
  }
  return ops::from_doubles(t.type, values);
}

engine::TensorView view(const ops::HostTensor& t) {
  return {t.bytes.data(), ir::contiguous(t.type)};
}

engine::OwnedTensor owned(const ops::HostTensor& t) {
  auto copy = std::make_shared<const ops::HostTensor>(t);
  return {view(*copy), copy};
}

double max_difference(const ops::HostTensor& a, const ops::HostTensor& b) {
  REQUIRE(a.type.str() == b.type.str());
  auto x = ops::to_doubles(a), y = ops::to_doubles(b);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) worst = std::max(worst, std::abs(x[i] - y[i]));
  return worst;
}

std::map<std::string, engine::OwnedTensor> Case::weight_tensors() const {
  std::map<std::string, engine::OwnedTensor> out;
  for (const auto& [name, t] : weights) out[name] = owned(t);
  return out;
}

Case load(const std::string& text, std::mt19937& rng) {
  Case c{ir::parse(text), {}};
  ops::infer_and_check(c.graph);
  for (ir::ValueId v : c.graph.weights()) {
    const auto& value = c.graph.value(v);
    c.weights[value.name] = random_tensor(rng, value.type.dtype, value.type.dims);
  }
  return c;
}

}  // namespace rm::engine_test
