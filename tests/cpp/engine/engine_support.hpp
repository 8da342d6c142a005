// What the tests of the engine share: the CPU plugin's kernels, tensors with random values, outputs
// in host memory, and a program text with its weights.
#pragma once

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/program.hpp"
#include "ops/evaluate.hpp"

namespace rm::engine_test {

std::shared_ptr<const select::KernelTable> cpu_kernels();
/// The CPU as a device would describe itself where another launch costs something.
const rm_device_info& cpu_that_launches();

class HostOutputs : public engine::OutputAllocator {
 public:
  std::map<size_t, size_t> reused;
  std::vector<ops::HostTensor> tensors = std::vector<ops::HostTensor>(8);
  void reuse(size_t index, size_t input) override { reused[index] = input; }
  void* allocate(size_t index, const ir::Layout& layout) override;
};

ops::HostTensor random_tensor(std::mt19937& rng, ir::DType dtype, ir::Dims dims,
                              int64_t max_int = 10);
engine::TensorView view(const ops::HostTensor& t);
/// A copy that lives as long as somebody has its owner.
engine::OwnedTensor owned(const ops::HostTensor& t);
/// Requires equal types.
double max_difference(const ops::HostTensor& a, const ops::HostTensor& b);

struct Case {
  ir::Graph graph;
  std::map<std::string, ops::HostTensor, std::less<>> weights;
  std::map<std::string, engine::OwnedTensor> weight_tensors() const;
};

/// The checked graph of a text, with random weights.
Case load(const std::string& text, std::mt19937& rng);

}  // namespace rm::engine_test
