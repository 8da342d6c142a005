// Fills in the kernel rows: panels by instruction set, then the plain loop.
#include "ops/recurrent/rows.hpp"

#include <stdexcept>
#include <vector>

#include "common/row.hpp"
#include "ops/recurrent/naive.hpp"
#include "ops/recurrent/steps.hpp"

namespace rm::cpu {
namespace recurrent {
RM_CPU_TABLE(KernelSet, recurrent_kernels)
namespace {

constexpr double kGflops[] = {6, 20, 30};  // of one thread, by level: only orders the rows

template <Isa kIsa>
struct Panels {
  using Kernel = Steps;
  static const KernelSet& kernels() { return *RM_CPU_PICK(kIsa, recurrent_kernels); }
  static const char* reject(const RecurrentProblem& r) {
    if (!supported(kIsa)) return kNoSuchIsa;
    return Steps::reject(r);
  }
  static double gflops() { return kGflops[static_cast<int>(kIsa)]; }
  static Kernel* make(const RecurrentProblem& r) { return new Steps(r, kernels()); }
  static std::vector<rm_edge> edges() {
    return {{'M', 0, kernels().rows}, {'N', 0, kernels().width}, {'K', 0, kernels().width}};
  }
};

struct Naive {
  using Kernel = NaiveSteps;
  static const char* reject(const RecurrentProblem& r) { return NaiveSteps::reject(r); }
  static double gflops() { return 0.5; }
  static Kernel* make(const RecurrentProblem& r) { return new NaiveSteps(r); }
};

/// One of the above over a decoded problem, which throws where operands are outside the schema.
template <class Of>
struct Row {
  using State = typename Of::Kernel;
  static const char* why_not(const rm_problem& p, const rm_device_info*) {
    return Of::reject(decode(p));
  }
  static double cost_ns(const rm_problem& p, const rm_device_info*) {
    const RecurrentProblem r = decode(p);
    return 1000 + static_cast<double>(r.steps) * (100 + r.step_flops() / Of::gflops());
  }
  static State* make(const rm_problem& p, const rm_device_info*) {
    const RecurrentProblem r = decode(p);
    if (const char* why = Of::reject(r)) throw std::invalid_argument(why);
    return Of::make(r);
  }
  static std::span<const rm_edge> edges()
    requires requires { Of::edges(); }
  {
    static const std::vector<rm_edge> edges = Of::edges();
    return edges;
  }
};

template <class Of>
rm_kernel make_row(const char* name, uint32_t traits = 0) {
  return plugin::kernel_row<Row<Of>>("recurrent", name, build_id(),
                                     traits | RM_KERNEL_DETERMINISTIC);
}

}  // namespace
}  // namespace recurrent

std::span<const rm_kernel> recurrent_rows() {
  namespace r = recurrent;
  static const std::vector<rm_kernel> rows = {
#if RM_CPU_X86
      // No row for AVX-512: nobody has run one on a processor that has it.
      r::make_row<r::Panels<Isa::avx2>>("recurrent_steps_avx2"),
#endif
      r::make_row<r::Panels<Isa::baseline>>("recurrent_steps_baseline"),
      r::make_row<r::Naive>("recurrent_naive", RM_KERNEL_FALLBACK)};
  return rows;
}

}  // namespace rm::cpu
