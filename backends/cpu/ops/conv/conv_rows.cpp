// Fills in the kernel rows: oneDNN, our own tiles by instruction set, then the plain loop.
#include "ops/conv/rows.hpp"

#include <cmath>
#include <utility>
#include <vector>

#include "common/decoded_row.hpp"
#include "common/row.hpp"
#include "ops/conv/direct.hpp"
#include "ops/conv/naive.hpp"
#include "ops/conv/onednn.hpp"
#include "ops/conv/packed.hpp"
#include "ops/gemm/kinds.hpp"

namespace rm::cpu {
namespace conv {
RM_CPU_TABLE(DirectSet, direct_set)
RM_CPU_TABLE(PackedSet, packed_set)
namespace {

/// Throughput of one thread, GFLOP/s, by level: only orders the rows.
constexpr double kDirectGflops[] = {8, 40, 70};

/// Of a thread, of products whose weights are near. Measured: a Xeon with AVX-512 and AMX, oneDNN
/// 3.2, the layers of ResNet-50 on 2 threads; on AVX2 the same machine with fewer instructions.
constexpr double kProductGflops[] = {15, 100, 185};
constexpr double kFarNsPerByte = 0.08;  // the library asks for weights only when it needs them

struct OneDnn {
  using Kernel = OneDnnConv;
  static const char* reject(const ConvProblem& c) { return OneDnnConv::reject(c); }
  static double cost_ns(const ConvProblem& c) {
    return 2000 + c.flops() / kProductGflops[static_cast<int>(selected_isa())] +
           kFarNsPerByte * 4 * c.weights();
  }
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

template <Isa kIsa>
struct Packed {
  using Kernel = PackedConv;
  static const char* reject(const ConvProblem& c) {
    if (!supported(kIsa)) return kNoSuchIsa;
    return PackedConv::reject(c);
  }
  static Kernel* make(ConvProblem c) {
    return new PackedConv(std::move(c), gemm::tiles_of<kIsa>(),
                          *RM_CPU_PICK(kIsa, packed_set));
  }
  static double cost_ns(const ConvProblem& c) {
    // Of the library's rate on near weights, ResNet-50's layers at batch 1 and 8. Sums of larger kernels
    // wait in memory, a channel block at a time; a residual comes in beside the products here.
    const bool one = c.k == Triple{1, 1, 1}, plain = c.activation == kNone || c.activation == kRelu;
    const double from = double(c.from);
    const double product = one && c.given[kResidual] ? 1.0
                           : one                     ? (plain ? 0.97 : 0.93)
                                                     : 1.1 * from / (from + 16);
    const double nr = gemm::tiles_of<kIsa>().nr, columns = nr * std::ceil(double(c.to) / nr);
    const double share = product * double(c.to) / columns;
    return 2000 + c.flops() / (share * kProductGflops[static_cast<int>(kIsa)]) +
           (c.constant_w ? 0 : c.weights());
  }
};

struct Naive {
  using Kernel = NaiveConv;
  static const char* reject(const ConvProblem& c) { return NaiveConv::reject(c); }
  static double gflops() { return 0.5; }
  static Kernel* make(ConvProblem c) { return new NaiveConv(std::move(c)); }
};

struct Conv {
  static constexpr const char* kOp = "conv";
  static ConvProblem decode(const rm_problem& p) { return conv::decode(p); }
  template <class Of>
  static double cost_ns(const ConvProblem& c) {
    if constexpr (requires { Of::cost_ns(c); }) {
      return Of::cost_ns(c);
    } else {
      return 2000 + c.flops() / Of::gflops();
    }
  }
};

}  // namespace
}  // namespace conv

std::span<const rm_kernel> conv_rows() {
  using namespace conv;
  static const std::vector<rm_kernel> rows = {
      make_decoded_row<Conv, OneDnn>("conv_onednn", 0),
#if RM_CPU_X86
      make_decoded_row<Conv, Packed<Isa::avx512>>("conv_packed_avx512"),
      make_decoded_row<Conv, Packed<Isa::avx2>>("conv_packed_avx2"),
      make_decoded_row<Conv, Direct<Isa::avx512>>("conv_direct_avx512"),
      make_decoded_row<Conv, Direct<Isa::avx2>>("conv_direct_avx2"),
#endif
      make_decoded_row<Conv, Packed<Isa::baseline>>("conv_packed_baseline"),
      make_decoded_row<Conv, Direct<Isa::baseline>>("conv_direct_baseline"),
      make_decoded_row<Conv, Naive>("conv_naive", RM_KERNEL_FALLBACK | RM_KERNEL_DETERMINISTIC)};
  return rows;
}

}  // namespace rm::cpu
