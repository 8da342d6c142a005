// Fills in the kernel rows: panels by instruction set, then the plain loop.
#include "ops/recurrent/rows.hpp"

#include <vector>

#include "common/decoded_row.hpp"
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

struct Recurrent {
  static constexpr const char* kOp = "recurrent";
  static RecurrentProblem decode(const rm_problem& p) { return recurrent::decode(p); }
  template <class Of>
  static double cost_ns(const RecurrentProblem& r) {
    return 1000 + static_cast<double>(r.steps) * (100 + r.step_flops() / Of::gflops());
  }
};

}  // namespace
}  // namespace recurrent

std::span<const rm_kernel> recurrent_rows() {
  using namespace recurrent;
  static const std::vector<rm_kernel> rows = {
#if RM_CPU_X86
      // No row for AVX-512: nobody has run one on a processor that has it.
      make_decoded_row<Recurrent, Panels<Isa::avx2>>("recurrent_steps_avx2"),
#endif
      make_decoded_row<Recurrent, Panels<Isa::baseline>>("recurrent_steps_baseline"),
      make_decoded_row<Recurrent, Naive>("recurrent_naive",
                                         RM_KERNEL_FALLBACK | RM_KERNEL_DETERMINISTIC)};
  return rows;
}

}  // namespace rm::cpu
