// The kernels of our own that gemm's rows and those of operators made of products choose among: what
// each takes, what it costs, and how it is made of a problem. Row sources only.
#pragma once

#include <utility>
#include <vector>

#include "common/row.hpp"
#include "ops/gemm/amx.hpp"
#include "ops/gemm/cost.hpp"
#include "ops/gemm/direct.hpp"
#include "ops/gemm/naive.hpp"
#include "ops/gemm/packed.hpp"
#include "ops/gemm/split.hpp"
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
extern const SplitSet split_kernels;
}
#endif

/// A level's tiles, for operators that make products of their own order.
template <Isa kIsa>
const KernelSet& tiles_of() {
  return *RM_CPU_PICK(kIsa, gemm_kernels);
}

/// Throughput of one thread, GFLOP/s, by level (benchmarks/cpp/gemm.cpp: AVX2 on Zen 3, AVX-512 on
/// a Xeon with AMX; baseline scaled by width): only orders the rows.
inline constexpr double kPackedGflops[] = {15, 95, 190};

/// Of the packed rate, once reading the weight is not the bound (8 rows, AVX2 on Zen 3).
inline constexpr double kDirectShare = 0.5;

/// Of the packed rate, b read from the second-level cache (8 rows, AVX2 on Zen 3).
inline constexpr double kUnpackedShare = 1.0;

/// What differs between the rows. Kernel is the state of a prepared problem; build() allocates nothing of
/// its own.
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
  static Kernel build(GemmProblem g) {
    return PackedGemm(std::move(g), *RM_CPU_PICK(kIsa, gemm_kernels));
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
  static Kernel build(GemmProblem g) {
    return PackedGemm(std::move(g), avx512_bf16::gemm_kernels);
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
  static Kernel build(GemmProblem g) {
    return DirectGemm(std::move(g), *RM_CPU_PICK(kIsa, direct_kernels),
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
  static Kernel build(GemmProblem g) {
    return DirectGemm(std::move(g), avx512_bf16::direct_kernels,
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
  static Kernel build(GemmProblem g) {
    return AmxGemm(std::move(g), amx_bf16::amx_kernels);
  }
  static std::vector<rm_edge> edges() { return AmxGemm::edges(); }
};

struct Split {
  using Kernel = SplitGemm;
  static const char* reject(const GemmProblem& g) {
    if (!extras().amx_bf16) return "this machine (or the option cpu_isa) has no AMX for bf16";
    return SplitGemm::reject(g);
  }
  static double cost_ns(const GemmProblem& g) { return SplitGemm::cost_ns(g); }
  static Kernel build(GemmProblem g) {
    return SplitGemm(std::move(g), amx_bf16::split_kernels, *RM_CPU_PICK(Isa::avx512, gemm_kernels));
  }
  static std::vector<rm_edge> edges() { return SplitGemm::edges(); }
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
  static Kernel build(GemmProblem g) {
    return UnpackedGemm(std::move(g), *RM_CPU_PICK(kIsa, unpacked_kernels));
  }
  static std::vector<rm_edge> edges() {
    return UnpackedGemm::edges(*RM_CPU_PICK(kIsa, unpacked_kernels));
  }
};

struct Naive {
  using Kernel = NaiveGemm;
  static const char* reject(const GemmProblem&) { return nullptr; }
  static Roof roof(const GemmProblem&) { return {0.5, 500, 0}; }
  static Kernel build(GemmProblem g) { return NaiveGemm(std::move(g)); }
};

}  // namespace gemm
}  // namespace rm::cpu
