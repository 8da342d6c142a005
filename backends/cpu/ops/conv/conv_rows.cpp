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
    if (!supported(kIsa)) return kNoSuchIsa;
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

/// One of the above over a decoded problem, which throws where operands are outside the schema.
template <class Of>
struct Row {
  using State = typename Of::Kernel;
  static const char* why_not(const rm_problem& p, const rm_device_info*) {
    return Of::reject(decode(p));
  }
  static double cost_ns(const rm_problem& p, const rm_device_info*) {
    return 2000 + decode(p).flops() / Of::gflops();
  }
  static State* make(const rm_problem& p, const rm_device_info*) {
    ConvProblem c = decode(p);
    if (const char* why = Of::reject(c)) throw std::invalid_argument(why);
    return Of::make(std::move(c));
  }
};

template <class Of>
rm_kernel make_row(const char* name, uint32_t traits) {
  return plugin::kernel_row<Row<Of>>("conv", name, build_id(), traits);
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
