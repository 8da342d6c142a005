// A backend of one kernel, for the conformance suite: softmax over the last axis of contiguous f32.
// KERNEL_WRONG gives it a bug the suite must find.
#include <cmath>
#include <cstring>

#include "rm/kernels.h"
#include "rm/plugin.hpp"

namespace plugin = rm::plugin;

namespace {

struct State {
  int64_t rows, columns;
  bool log;
};

int supports(const rm_problem* problem, const rm_device_info*, rm_str* why_not) {
  const auto no = [&](const char* why) {
    *why_not = plugin::str(why);
    return 0;
  };
  if (problem->num_inputs != 1 || problem->num_outputs != 1) return no("one operand, one result");
  for (const rm_tensor* t : {problem->inputs[0], problem->outputs[0]}) {
    if (t->dtype.code != kDLFloat || t->dtype.bits != 32 || t->ndim < 1) return no("f32 only");
    int64_t stride = 1;
    for (int i = t->ndim - 1; i >= 0; stride *= t->shape[i--]) {
      if (t->shape[i] != 1 && t->strides[i] != stride) return no("contiguous only");
    }
  }
  return 1;
}

rm_status* prepare(const rm_problem* problem, const rm_device_info*, uint32_t,
                   rm_kernel_state** out) {
  return plugin::guard([&] {
    auto state = std::make_unique<State>(State{1, 1, false});
    const rm_tensor& x = *problem->inputs[0];
    state->columns = x.shape[x.ndim - 1];
    for (int i = 0; i + 1 < x.ndim; ++i) state->rows *= x.shape[i];
    for (size_t i = 0; i < problem->num_attrs; ++i) {
      const auto* attr = reinterpret_cast<const rm_attr*>(
          reinterpret_cast<const char*>(problem->attrs) + i * problem->attr_stride);
      if (plugin::view(attr->name) == "log") state->log = attr->i != 0;
    }
    *out = reinterpret_cast<rm_kernel_state*>(state.release());
  });
}

void release(rm_kernel_state* state) { delete reinterpret_cast<State*>(state); }

rm_status* launch(const rm_launch* launch) {
  const State& state = *reinterpret_cast<const State*>(launch->state);
  const auto* x = static_cast<const float*>(launch->inputs[0]);
  auto* y = static_cast<float*>(launch->outputs[0]);
  for (int64_t r = 0; r < state.rows; ++r, x += state.columns, y += state.columns) {
    float largest = -INFINITY, sum = 0;
    for (int64_t i = 0; i < state.columns; ++i) largest = std::fmax(largest, x[i]);
#ifdef KERNEL_WRONG
    const int64_t counted = state.columns - 1;  // forgets the last column
#else
    const int64_t counted = state.columns;
#endif
    for (int64_t i = 0; i < counted; ++i) sum += std::exp(x[i] - largest);
    for (int64_t i = 0; i < state.columns; ++i) {
      const float shifted = x[i] - largest;
      y[i] = state.log ? shifted - std::log(sum) : std::exp(shifted) / sum;
    }
  }
  return nullptr;
}

double cost_ns(const rm_problem*, const rm_device_info*, uint32_t) { return 1000; }

struct KernelDevice final : plugin::Device {
  rm_device_info info() const override {
    rm_device_info out{};
    out.struct_size = sizeof out;
    out.dl_device_type = kDLCPU;
    out.alignment = 64;
    out.name = plugin::str("A CPU with softmax");
    out.arch = plugin::str("any");
    return out;
  }
  std::string fingerprint() const override { return "one kernel"; }
};

struct KernelBackend final : plugin::Backend {
  std::string_view name() const override { return "onekernel"; }
  std::string_view version() const override { return "1.0"; }
  std::string_view build_id() const override { return ""; }
  int probe_score() noexcept override { return 1; }
  size_t device_count() override { return 1; }
  std::unique_ptr<plugin::Device> device_open(size_t index) override {
    if (index != 0) throw plugin::Error(RM_NOT_FOUND, "[onekernel] expected device 0");
    return std::make_unique<KernelDevice>();
  }
  const void* extension(std::string_view name) noexcept override {
    if (name != RM_KERNELS_EXTENSION) return nullptr;
    static const rm_kernel row{sizeof(rm_kernel),
                               plugin::str("softmax"),
                               plugin::str("softmax_plain"),
                               plugin::str("1"),
                               RM_KERNEL_FALLBACK | RM_KERNEL_DETERMINISTIC,
                               1,
                               &supports,
                               &cost_ns,
                               &prepare,
                               &release,
                               nullptr,
                               nullptr,
                               nullptr,
                               &launch};
    static const rm_kernels table{sizeof(rm_kernels), &row, 1, sizeof(rm_kernel)};
    return &table;
  }
};

}  // namespace

RM_EXPORT_BACKEND(KernelBackend)
