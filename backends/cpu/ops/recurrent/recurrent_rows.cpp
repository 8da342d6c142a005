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
    if (!supported(kIsa)) return "this machine (or the option cpu_isa) has no such instruction set";
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

template <class Row>
struct Entries {
  using Kernel = typename Row::Kernel;
  static const Kernel* self(const rm_kernel_state* s) { return reinterpret_cast<const Kernel*>(s); }

  static int supports(const rm_problem* p, const rm_device_info*, rm_str* why_not) {
    const char* why = nullptr;
    try {
      why = Row::reject(decode(*p));
    } catch (const std::exception&) {  // decode(): operands outside the schema
      why = "the problem does not match the operator's schema";
    }
    if (why && why_not) *why_not = plugin::str(why);
    return why == nullptr;
  }
  static double cost_ns(const rm_problem* p, const rm_device_info*, uint32_t) {
    try {
      const RecurrentProblem r = decode(*p);
      return 1000 + static_cast<double>(r.steps) * (100 + r.step_flops() / Row::gflops());
    } catch (const std::exception&) {
      return 1e18;
    }
  }
  static rm_status* prepare(const rm_problem* p, const rm_device_info*, uint32_t,
                            rm_kernel_state** out) {
    return plugin::guard([&] {
      const RecurrentProblem r = decode(*p);
      if (const char* why = Row::reject(r)) throw std::invalid_argument(why);
      *out = reinterpret_cast<rm_kernel_state*>(Row::make(r));
    });
  }
  static void release(rm_kernel_state* s) { delete self(s); }
  static uint64_t workspace(const rm_kernel_state* s) { return self(s)->workspace_bytes(); }
  static void packing(const rm_kernel_state* s, size_t input, rm_packing* out) {
    *out = {sizeof(rm_packing), 0, 64, 0, {}};
    if (!self(s)->packs(input)) return;
    out->bytes = self(s)->packed_bytes(input);
    out->layout = plugin::str(self(s)->layout(input));
  }
  static rm_status* prepack(const rm_kernel_state* s, size_t input, const rm_tensor* src,
                            void* dst) {
    return plugin::guard([&] {
      if (!self(s)->packs(input)) {
        throw std::invalid_argument("[recurrent] expected a weight to prepack, got operand " +
                                    std::to_string(input));
      }
      self(s)->prepack(input, static_cast<const char*>(src->data) + src->byte_offset, dst);
    });
  }
  static rm_status* launch(const rm_launch* l) {
    return plugin::guard([&] { self(l->state)->launch(*l); });
  }
};

template <class Row>
rm_kernel make_row(const char* name, uint32_t traits = 0) {
  using E = Entries<Row>;
  rm_kernel row{};
  row.struct_size = sizeof(row);
  row.op = plugin::str("recurrent");
  row.name = plugin::str(name);
  row.digest = plugin::str(build_id());
  row.traits = traits | RM_KERNEL_DETERMINISTIC;
  row.num_configs = 1;
  row.supports = E::supports;
  row.cost_ns = E::cost_ns;
  row.prepare = E::prepare;
  row.release = E::release;
  row.workspace = E::workspace;
  row.launch = E::launch;
  if constexpr (requires { Row::edges(); }) {
    row.packing = E::packing;
    row.prepack = E::prepack;
    static const std::vector<rm_edge> edges = Row::edges();
    row.edges = edges.data();
    row.num_edges = edges.size();
  }
  return row;
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
