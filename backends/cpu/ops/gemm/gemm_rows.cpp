// Fills in the kernel rows: own packed kernels by instruction set, then the plain loop.
#include "ops/gemm/rows.hpp"

#include <string>
#include <utility>
#include <vector>

#include "common/decoded_row.hpp"
#include "ops/gemm/kinds.hpp"
#include "ops/gemm/onednn.hpp"

namespace rm::cpu {

namespace gemm {
namespace {

struct OneDnn {
  using Kernel = OneDnnGemm;
  static const char* reject(const GemmProblem& g) { return OneDnnGemm::reject(g); }
  /// Worth its packing and call overhead only where it has matrix instructions that we have not.
  static Roof roof(const GemmProblem& g) {
    const bool bf16 = g.dtype[kA] == DType::bf16;
    const double wide = extras().amx_bf16 ? 1000 : extras().avx512_bf16 ? 220 : 70;
    return {bf16 ? wide : 0.9 * kPackedGflops[static_cast<int>(selected_isa())], 2500, 0.4};
  }
  static Kernel build(GemmProblem g) { return OneDnnGemm(std::move(g)); }
};

/// As rows have it (common/decoded_row.hpp).
template <class Of>
struct Row : Of {
  static typename Of::Kernel* make(GemmProblem g) {
    return new typename Of::Kernel(Of::build(std::move(g)));
  }
};

struct Gemm {
  static constexpr const char* kOp = "gemm";
  static GemmProblem decode(const rm_problem& p) { return gemm::decode(p); }
  template <class Of>
  static double cost_ns(const GemmProblem& g) {
    if constexpr (requires { Of::cost_ns(g); }) return Of::cost_ns(g);
    else return roofline_ns(g, Of::roof(g));
  }
};

}  // namespace
}  // namespace gemm

std::span<const rm_kernel> gemm_rows() {
  using namespace gemm;
  static const std::vector<rm_kernel> rows = {
#if RM_CPU_X86
    make_decoded_row<Gemm, Row<Amx>>("gemm_direct_amx_bf16"),
    make_decoded_row<Gemm, Row<Split>>("gemm_split_amx"),
    make_decoded_row<Gemm, Row<DirectBf16>>("gemm_direct_avx512_bf16"),
    make_decoded_row<Gemm, Row<Direct<Isa::avx512>>>("gemm_direct_avx512"),
    make_decoded_row<Gemm, Row<Direct<Isa::avx2>>>("gemm_direct_avx2"),
    // None for AVX-512 before it ran on a processor that has it.
    make_decoded_row<Gemm, Row<Unpacked<Isa::avx2>>>("gemm_unpacked_avx2"),
    make_decoded_row<Gemm, Row<PackedBf16>>("gemm_packed_avx512_bf16"),
    make_decoded_row<Gemm, Row<Packed<Isa::avx512>>>("gemm_packed_avx512"),
    make_decoded_row<Gemm, Row<Packed<Isa::avx2>>>("gemm_packed_avx2"),
#endif
    make_decoded_row<Gemm, Row<OneDnn>>("gemm_onednn", 0),
    make_decoded_row<Gemm, Row<Direct<Isa::baseline>>>("gemm_direct_baseline"),
    make_decoded_row<Gemm, Row<Unpacked<Isa::baseline>>>("gemm_unpacked_baseline"),
    make_decoded_row<Gemm, Row<Packed<Isa::baseline>>>("gemm_packed_baseline"),
    make_decoded_row<Gemm, Row<Naive>>("gemm_naive", RM_KERNEL_FALLBACK | RM_KERNEL_DETERMINISTIC)
  };
  return rows;
}

std::string gemm_library_fingerprint() {
  const onednn::Api& library = onednn::api();
  return library.why_not.empty() ? ";onednn=" + library.version_text : std::string();
}

}  // namespace rm::cpu
