// Fills in the kernel rows: own packed kernels by instruction set, then the plain loop.
#include "ops/gemm/rows.hpp"

#include <stdexcept>
#include <string>
#include <vector>

#include "common/row.hpp"
#include "ops/gemm/cost.hpp"
#include "ops/gemm/direct.hpp"
#include "ops/gemm/naive.hpp"
#include "ops/gemm/onednn.hpp"
#include "ops/gemm/packed.hpp"

namespace rm::cpu {

namespace gemm {
RM_CPU_TABLE(KernelSet, gemm_kernels)
RM_CPU_TABLE(DirectSet, direct_kernels)
#if RM_CPU_X86
namespace avx512_bf16 {
extern const KernelSet gemm_kernels;
extern const DirectSet direct_kernels;
}
#endif

namespace {

/// Throughput of one thread, GFLOP/s, by level (benchmarks/cpp/gemm.cpp: AVX2 on Zen 3, AVX-512 on
/// a Xeon with AMX; baseline scaled by width): only orders the rows.
constexpr double kPackedGflops[] = {15, 95, 190};

/// Of the packed rate, once reading the weight is not the bound (8 rows, AVX2 on Zen 3).
constexpr double kDirectShare = 0.5;

/// What differs between the rows. Kernel is the state of a prepared problem.
template <Isa kIsa>
struct Packed {
  using Kernel = PackedGemm;
  static const char* reject(const GemmProblem& g) {
    if (!supported(kIsa)) return "this machine (or the option cpu_isa) has no such instruction set";
    return PackedGemm::reject(g);
  }
  static Roof roof(const GemmProblem&) {
    return {kPackedGflops[static_cast<int>(kIsa)], 500, 0.35};
  }
  static Kernel* make(GemmProblem g) {
    return new PackedGemm(std::move(g), *RM_CPU_PICK(kIsa, gemm_kernels));
  }
  static std::vector<rm_edge> edges() {
    return PackedGemm::edges(*RM_CPU_PICK(kIsa, gemm_kernels));
  }
};

#if RM_CPU_X86
struct PackedBf16 {
  using Kernel = PackedGemm;
  static const char* reject(const GemmProblem& g) {
    if (!extras().avx512_bf16) return "this machine (or the option cpu_isa) has no AVX512-BF16";
    if (g.dtype[kA] != DType::bf16) return "packed: bf16 only";
    return PackedGemm::reject(g);
  }
  /// Processors with AMX run vdpbf16ps at a quarter of AMD's rate (measured: 105 GFLOP/s a thread),
  /// slower than widening to f32.
  static Roof roof(const GemmProblem&) { return {extras().amx_bf16 ? 105.0 : 240.0, 500, 0.4}; }
  static Kernel* make(GemmProblem g) {
    return new PackedGemm(std::move(g), avx512_bf16::gemm_kernels);
  }
  static std::vector<rm_edge> edges() { return PackedGemm::edges(avx512_bf16::gemm_kernels); }
};
#endif

template <Isa kIsa>
struct Direct {
  using Kernel = DirectGemm;
  static const char* reject(const GemmProblem& g) {
    if (!supported(kIsa)) return "this machine (or the option cpu_isa) has no such instruction set";
    return DirectGemm::reject(g);
  }
  static Roof roof(const GemmProblem&) {
    return {kDirectShare * kPackedGflops[static_cast<int>(kIsa)], 500, 0};
  }
  static Kernel* make(GemmProblem g) {
    return new DirectGemm(std::move(g), *RM_CPU_PICK(kIsa, direct_kernels),
                          *RM_CPU_PICK(kIsa, gemm_kernels));
  }
  static std::vector<rm_edge> edges() {
    return DirectGemm::edges(*RM_CPU_PICK(kIsa, direct_kernels), *RM_CPU_PICK(kIsa, gemm_kernels));
  }
};

#if RM_CPU_X86
struct DirectBf16 {
  using Kernel = DirectGemm;
  static const char* reject(const GemmProblem& g) {
    if (!extras().avx512_bf16) return "this machine (or the option cpu_isa) has no AVX512-BF16";
    if (g.dtype[kA] != DType::bf16) return "direct: bf16 only";
    return DirectGemm::reject(g);
  }
  /// As PackedBf16; with AMX behind the row that widens.
  static Roof roof(const GemmProblem&) {
    return {kDirectShare * (extras().amx_bf16 ? 105.0 : 300.0), 500, 0};
  }
  static Kernel* make(GemmProblem g) {
    return new DirectGemm(std::move(g), avx512_bf16::direct_kernels,
                          *RM_CPU_PICK(Isa::avx512, gemm_kernels));
  }
  static std::vector<rm_edge> edges() {
    return DirectGemm::edges(avx512_bf16::direct_kernels, *RM_CPU_PICK(Isa::avx512, gemm_kernels));
  }
};
#endif

struct OneDnn {
  using Kernel = OneDnnGemm;
  static const char* reject(const GemmProblem& g) { return OneDnnGemm::reject(g); }
  /// Worth its packing and call overhead only where it has matrix instructions that we have not.
  static Roof roof(const GemmProblem& g) {
    const bool bf16 = g.dtype[kA] == DType::bf16;
    const double wide = extras().amx_bf16 ? 1000 : extras().avx512_bf16 ? 220 : 70;
    return {bf16 ? wide : 0.9 * kPackedGflops[static_cast<int>(selected_isa())], 2500, 0.4};
  }
  static Kernel* make(GemmProblem g) { return new OneDnnGemm(std::move(g)); }
};

struct Naive {
  using Kernel = NaiveGemm;
  static const char* reject(const GemmProblem&) { return nullptr; }
  static Roof roof(const GemmProblem&) { return {0.5, 500, 0}; }
  static Kernel* make(GemmProblem g) { return new NaiveGemm(std::move(g)); }
};

template <class Row>
struct Entries {
  using Kernel = typename Row::Kernel;
  static const Kernel* self(const rm_kernel_state* s) { return reinterpret_cast<const Kernel*>(s); }

  static int supports(const rm_problem* p, const rm_device_info*, rm_str* why_not) {
    const char* why = nullptr;
    try {
      why = Row::reject(decode(*p));
    } catch (const std::invalid_argument&) {  // decode(): operands outside the schema
      why = "the problem does not match the operator's schema";
    }
    if (why && why_not) *why_not = plugin::str(why);
    return why == nullptr;
  }

  static double cost_ns(const rm_problem* p, const rm_device_info*, uint32_t) {
    try {
      const GemmProblem g = decode(*p);
      return roofline_ns(g, Row::roof(g));
    } catch (const std::invalid_argument&) {
      return 1e18;
    }
  }

  static rm_status* prepare(const rm_problem* p, const rm_device_info*, uint32_t,
                            rm_kernel_state** out) {
    return plugin::guard([&] {
      GemmProblem g = decode(*p);
      if (const char* why = Row::reject(g)) throw std::invalid_argument(why);
      *out = reinterpret_cast<rm_kernel_state*>(Row::make(std::move(g)));
    });
  }

  static void release(rm_kernel_state* s) { delete self(s); }
  static uint64_t workspace(const rm_kernel_state* s) { return self(s)->workspace_bytes(); }

  static void packing(const rm_kernel_state* s, size_t input, rm_packing* out) {
    *out = {sizeof(rm_packing), 0, 64, 0, {}};
    if (input != kB || !self(s)->prepacked()) return;
    out->bytes = self(s)->packed_bytes();
    out->layout = plugin::str(self(s)->layout());
  }

  static rm_status* prepack(const rm_kernel_state* s, size_t input, const rm_tensor* src,
                            void* dst) {
    return plugin::guard([&] {
      if (input != kB || !self(s)->prepacked()) {
        throw std::invalid_argument("[gemm] expected operand 1 to prepack, got " +
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
  row.op = plugin::str("gemm");
  row.name = plugin::str(name);
  row.digest = plugin::str(build_id());
  row.traits = traits;
  row.num_configs = 1;
  row.supports = E::supports;
  row.cost_ns = E::cost_ns;
  row.prepare = E::prepare;
  row.release = E::release;
  row.workspace = E::workspace;
  row.launch = E::launch;
  if constexpr (requires(const typename Row::Kernel& k) { k.prepacked(); }) {
    row.packing = E::packing;
    row.prepack = E::prepack;
  }
  if constexpr (requires { Row::edges(); }) {
    static const std::vector<rm_edge> edges = Row::edges();
    row.edges = edges.data();
    row.num_edges = edges.size();
  }
  return row;
}

}  // namespace
}  // namespace gemm

std::span<const rm_kernel> gemm_rows() {
  using namespace gemm;
  static const std::vector<rm_kernel> rows = {
#if RM_CPU_X86
    gemm::make_row<DirectBf16>("gemm_direct_avx512_bf16", RM_KERNEL_DETERMINISTIC),
    gemm::make_row<Direct<Isa::avx512>>("gemm_direct_avx512", RM_KERNEL_DETERMINISTIC),
    gemm::make_row<Direct<Isa::avx2>>("gemm_direct_avx2", RM_KERNEL_DETERMINISTIC),
    gemm::make_row<PackedBf16>("gemm_packed_avx512_bf16", RM_KERNEL_DETERMINISTIC),
    gemm::make_row<Packed<Isa::avx512>>("gemm_packed_avx512", RM_KERNEL_DETERMINISTIC),
    gemm::make_row<Packed<Isa::avx2>>("gemm_packed_avx2", RM_KERNEL_DETERMINISTIC),
#endif
    gemm::make_row<OneDnn>("gemm_onednn", 0),
    gemm::make_row<Direct<Isa::baseline>>("gemm_direct_baseline", RM_KERNEL_DETERMINISTIC),
    gemm::make_row<Packed<Isa::baseline>>("gemm_packed_baseline", RM_KERNEL_DETERMINISTIC),
    gemm::make_row<Naive>("gemm_naive", RM_KERNEL_FALLBACK | RM_KERNEL_DETERMINISTIC)
  };
  return rows;
}

std::string gemm_library_fingerprint() {
  const onednn::Api& library = onednn::api();
  return library.why_not.empty() ? ";onednn=" + library.version_text : std::string();
}

}  // namespace rm::cpu
