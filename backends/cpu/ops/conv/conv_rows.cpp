// Fills in the kernel rows: oneDNN, our own tiles by instruction set, then the plain loop.
#include "ops/conv/rows.hpp"

#include <stdexcept>
#include <vector>

#include "common/row.hpp"
#include "ops/conv/direct.hpp"
#include "ops/conv/naive.hpp"
#include "ops/conv/onednn.hpp"

namespace rm::cpu {
namespace conv {
RM_CPU_TABLE(DirectSet, direct_set)
namespace {

/// Throughput of one thread, GFLOP/s, by level: only orders the rows.
constexpr double kDirectGflops[] = {8, 40, 70};

struct OneDnn {
  using Kernel = OneDnnConv;
  static const char* reject(const ConvProblem& c) { return OneDnnConv::reject(c); }
  static double gflops() { return 1.5 * kDirectGflops[static_cast<int>(selected_isa())]; }
  static Kernel* make(ConvProblem c) { return new OneDnnConv(std::move(c)); }
};

template <Isa kIsa>
struct Direct {
  using Kernel = DirectConv;
  static const char* reject(const ConvProblem& c) {
    if (!supported(kIsa)) return "this machine (or the option cpu_isa) has no such instruction set";
    return DirectConv::reject(c);
  }
  static double gflops() { return kDirectGflops[static_cast<int>(kIsa)]; }
  static Kernel* make(ConvProblem c) {
    return new DirectConv(std::move(c), *RM_CPU_PICK(kIsa, direct_set));
  }
};

struct Naive {
  using Kernel = NaiveConv;
  static const char* reject(const ConvProblem& c) { return NaiveConv::reject(c); }
  static double gflops() { return 0.5; }
  static Kernel* make(ConvProblem c) { return new NaiveConv(std::move(c)); }
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
      return 2000 + decode(*p).flops() / Row::gflops();
    } catch (const std::exception&) {
      return 1e18;
    }
  }
  static rm_status* prepare(const rm_problem* p, const rm_device_info*, uint32_t,
                            rm_kernel_state** out) {
    return plugin::guard([&] {
      ConvProblem c = decode(*p);
      if (const char* why = Row::reject(c)) throw std::invalid_argument(why);
      *out = reinterpret_cast<rm_kernel_state*>(Row::make(std::move(c)));
    });
  }
  static void release(rm_kernel_state* s) { delete self(s); }
  static uint64_t workspace(const rm_kernel_state* s) { return self(s)->workspace_bytes(); }
  static void packing(const rm_kernel_state* s, size_t input, rm_packing* out) {
    *out = {sizeof(rm_packing), 0, 64, 0, {}};
    if (input != kW || !self(s)->prepacked()) return;
    out->bytes = self(s)->packed_bytes();
    out->layout = plugin::str(self(s)->layout());
  }
  static rm_status* prepack(const rm_kernel_state* s, size_t input, const rm_tensor* src,
                            void* dst) {
    return plugin::guard([&] {
      if (input != kW || !self(s)->prepacked()) {
        throw std::invalid_argument("[conv] expected operand 1 to prepack, got " +
                                    std::to_string(input));
      }
      self(s)->prepack(static_cast<const char*>(src->data) + src->byte_offset, dst);
    });
  }
  static rm_status* launch(const rm_launch* l) {
    return plugin::guard([&] { self(l->state)->launch(*l); });
  }
};

template <class Row>
rm_kernel make_row(const char* name, uint32_t traits) {
  using E = Entries<Row>;
  rm_kernel row{};
  row.struct_size = sizeof(row);
  row.op = plugin::str("conv");
  row.name = plugin::str(name);
  row.digest = plugin::str(build_id());
  row.traits = traits;
  row.num_configs = 1;
  row.supports = E::supports;
  row.cost_ns = E::cost_ns;
  row.prepare = E::prepare;
  row.release = E::release;
  row.launch = E::launch;
  if constexpr (requires(const typename Row::Kernel& k) { k.prepacked(); }) {
    row.workspace = E::workspace;
    row.packing = E::packing;
    row.prepack = E::prepack;
  }
  return row;
}

}  // namespace
}  // namespace conv

std::span<const rm_kernel> conv_rows() {
  static const std::vector<rm_kernel> rows = {
      conv::make_row<conv::OneDnn>("conv_onednn", 0),
#if RM_CPU_X86
      conv::make_row<conv::Direct<Isa::avx512>>("conv_direct_avx512", RM_KERNEL_DETERMINISTIC),
      conv::make_row<conv::Direct<Isa::avx2>>("conv_direct_avx2", RM_KERNEL_DETERMINISTIC),
#endif
      conv::make_row<conv::Direct<Isa::baseline>>("conv_direct_baseline", RM_KERNEL_DETERMINISTIC),
      conv::make_row<conv::Naive>("conv_naive", RM_KERNEL_FALLBACK | RM_KERNEL_DETERMINISTIC)};
  return rows;
}

}  // namespace rm::cpu
