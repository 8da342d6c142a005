// Fills in the kernel rows: own packed kernels by instruction set, then the plain loop.
#include "ops/gemm/rows.hpp"

#include <string>
#include <utility>
#include <vector>

#include "common/decoded_row.hpp"
#include "common/row.hpp"
#include "ops/gemm/amx.hpp"
#include "ops/gemm/cost.hpp"
#include "ops/gemm/direct.hpp"
#include "ops/gemm/naive.hpp"
#include "ops/gemm/onednn.hpp"
#include "ops/gemm/packed.hpp"
#include "ops/gemm/unpacked.hpp"

namespace rm::cpu {

namespace gemm {
RM_CPU_TABLE(KernelSet, gemm_kernels)
RM_CPU_TABLE(DirectSet, direct_kernels)
RM_CPU_TABLE(UnpackedSet, unpacked_kernels)
#if RM_CPU_X86
namespace avx512_bf16 {
extern const KernelSet gemm_kernels;
extern const DirectSet direct_kernels;
}
namespace amx_bf16 {
extern const AmxSet amx_kernels;
}
#endif

namespace {

/// Throughput of one thread, GFLOP/s, by level (benchmarks/cpp/gemm.cpp: AVX2 on Zen 3, AVX-512 on
/// a Xeon with AMX; baseline scaled by width): only orders the rows.
constexpr double kPackedGflops[] = {15, 95, 190};

/// Of the packed rate, once reading the weight is not the bound (8 rows, AVX2 on Zen 3).
constexpr double kDirectShare = 0.5;

/// Of the packed rate, b read from the second-level cache (8 rows, AVX2 on Zen 3).
constexpr double kUnpackedShare = 1.0;

/// What differs between the rows. Kernel is the state of a prepared problem.
template <Isa kIsa>
struct Packed {
  using Kernel = PackedGemm;
  static const char* reject(const GemmProblem& g) {
    if (!supported(kIsa)) return kNoSuchIsa;
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
    if (!supported(kIsa)) return kNoSuchIsa;
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

#if RM_CPU_X86
struct Amx {
  using Kernel = AmxGemm;
  static const char* reject(const GemmProblem& g) {
    if (!extras().amx_bf16) return "this machine (or the option cpu_isa) has no AMX for bf16";
    return AmxGemm::reject(g);
  }
  static Roof roof(const GemmProblem&) { return {900, 800, 0}; }
  static Kernel* make(GemmProblem g) {
    return new AmxGemm(std::move(g), amx_bf16::amx_kernels, *RM_CPU_PICK(Isa::avx512, gemm_kernels));
  }
  static std::vector<rm_edge> edges() { return AmxGemm::edges(); }
};
#endif

template <Isa kIsa>
struct Unpacked {
  using Kernel = UnpackedGemm;
  static const char* reject(const GemmProblem& g) {
    if (!supported(kIsa)) return kNoSuchIsa;
    return UnpackedGemm::reject(g);
  }
  static Roof roof(const GemmProblem&) {
    return {kUnpackedShare * kPackedGflops[static_cast<int>(kIsa)], 300, 0};
  }
  static Kernel* make(GemmProblem g) {
    return new UnpackedGemm(std::move(g), *RM_CPU_PICK(kIsa, unpacked_kernels));
  }
  static std::vector<rm_edge> edges() {
    return UnpackedGemm::edges(*RM_CPU_PICK(kIsa, unpacked_kernels));
  }
};

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

struct Gemm {
  static constexpr const char* kOp = "gemm";
  static GemmProblem decode(const rm_problem& p) { return gemm::decode(p); }
  template <class Of>
  static double cost_ns(const GemmProblem& g) {
    return roofline_ns(g, Of::roof(g));
  }
};

}  // namespace
}  // namespace gemm

std::span<const rm_kernel> gemm_rows() {
  using namespace gemm;
  static const std::vector<rm_kernel> rows = {
#if RM_CPU_X86
    make_decoded_row<Gemm, Amx>("gemm_direct_amx_bf16"),
    make_decoded_row<Gemm, DirectBf16>("gemm_direct_avx512_bf16"),
    make_decoded_row<Gemm, Direct<Isa::avx512>>("gemm_direct_avx512"),
    make_decoded_row<Gemm, Direct<Isa::avx2>>("gemm_direct_avx2"),
    // None for AVX-512 before it ran on a processor that has it.
    make_decoded_row<Gemm, Unpacked<Isa::avx2>>("gemm_unpacked_avx2"),
    make_decoded_row<Gemm, PackedBf16>("gemm_packed_avx512_bf16"),
    make_decoded_row<Gemm, Packed<Isa::avx512>>("gemm_packed_avx512"),
    make_decoded_row<Gemm, Packed<Isa::avx2>>("gemm_packed_avx2"),
#endif
    make_decoded_row<Gemm, OneDnn>("gemm_onednn", 0),
    make_decoded_row<Gemm, Direct<Isa::baseline>>("gemm_direct_baseline"),
    make_decoded_row<Gemm, Unpacked<Isa::baseline>>("gemm_unpacked_baseline"),
    make_decoded_row<Gemm, Packed<Isa::baseline>>("gemm_packed_baseline"),
    make_decoded_row<Gemm, Naive>("gemm_naive", RM_KERNEL_FALLBACK | RM_KERNEL_DETERMINISTIC)
  };
  return rows;
}

std::string gemm_library_fingerprint() {
  const onednn::Api& library = onednn::api();
  return library.why_not.empty() ? ";onednn=" + library.version_text : std::string();
}

}  // namespace rm::cpu
