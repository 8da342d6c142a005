// The table of uniform: checks and launches.
#include "_shim/alias_shim.hpp"
#include "uniform/api.hpp"
#include "uniform/kernels/uniform_any.cuh"

namespace rm::cuda_ops {
namespace {

Status launch_philox(const Uniform& p, Workspace, Stream stream) {
  const UniformArgs a{static_cast<const std::int64_t*>(p.state.data), p.state.stride[0], p.y.data,
                      numel(p.y)};
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>(ceil_div(a.size, 1024), 1 << 20));
  if (p.y.dtype == DType::f64) {
    return launch_overlapped("uniform", uniform_philox<double>, blocks, 256, 0, stream, a);
  }
  return launch_overlapped("uniform", uniform_philox<float>, blocks, 256, 0, stream, a);
}

constexpr KernelRow<Uniform> kRows[] = {
    {"uniform_philox_any", "any problem", [](const Uniform&) -> const char* { return nullptr; },
     [](const Uniform& p) { return move_us(4.0 * static_cast<double>(numel(p.y))); },
     launch_philox},
};

}  // namespace

std::span<const KernelRow<Uniform>> uniform_rows() { return kRows; }

Status legal(const Uniform& p) {
  const bool state = p.state.dtype == DType::i64 && p.state.rank == 1 && p.state.shape[0] == 2;
  if (!state || (p.y.dtype != DType::f32 && p.y.dtype != DType::f64) || !is_contiguous(p.y)) {
    return invalid(
        "[uniform] expected a state of two int64 and a dense result of float32 or float64, got "
        "others");
  }
  return check_memory("uniform", {{"y", &p.y}}, {{"state", &p.state}});
}

Status uniform(const Uniform& p, const char* kernel, Stream stream) {
  if (Status s = legal(p); !s) return s;
  if (numel(p.y) == 0) return {};
  const KernelRow<Uniform>* row = nullptr;
  if (Status s = select_row<Uniform>("uniform", kRows, p, kernel, &row); !s) return s;
  return row->launch(p, {}, stream);
}

}  // namespace rm::cuda_ops
