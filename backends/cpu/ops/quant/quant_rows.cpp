// The rows of quant_linear, one a level.
#include "ops/quant/rows.hpp"

#include <omp.h>

#include <algorithm>

#include "common/row.hpp"
#include "ops/quant/amx.hpp"
#include "ops/quant/few.hpp"
#include "ops/quant/linear.hpp"

namespace rm::cpu {
namespace gemm {
RM_CPU_TABLE(KernelSet, gemm_kernels)
#if RM_CPU_X86
namespace amx_bf16 {
extern const AmxSet amx_kernels;
}
#endif
}
namespace quant {
RM_CPU_TABLE(QuantSet, quant_kernels)
RM_CPU_TABLE(TileSet, tile_kernels)
#if RM_CPU_X86
namespace avx2 {
extern const FewSet few_kernels;
}
namespace avx512 {
extern const FewSet few_kernels;
}
namespace avx512_vnni {
extern const TileSet tile_kernels;
extern const FewSet few_kernels;
}
namespace avx_vnni {
extern const TileSet tile_kernels;
extern const FewSet few_kernels;
}
namespace amx_bf16 {
extern const AmxFill amx_fill;
}
namespace amx_int8 {
extern const FewSet few_kernels;
}
#endif
}  // namespace quant
namespace {

const gemm::KernelSet& tiles_of(Isa isa) {
  using namespace gemm;
  return *RM_CPU_PICK(isa, gemm_kernels);
}
const quant::QuantSet& kernels_of(Isa isa) {
  using namespace quant;
  return *RM_CPU_PICK(isa, quant_kernels);
}

const quant::TileSet& rounded_of(Isa isa) {
  using namespace quant;
  return *RM_CPU_PICK(isa, tile_kernels);
}

double weight_bytes(const quant::QuantProblem& q) {
  return double(q.gemm.n) * double(q.blocks() * 4 * q.bits);
}

/// Reading the weight (14 GB/s a thread) and `block` nanoseconds of arithmetic for each block of 32
/// elements of 16 columns.
double rounded_cost(const quant::QuantProblem& q, double block) {
  const double blocks = double(q.gemm.n) * double(q.blocks()) / quant::kStrip;
  return 1000 + (weight_bytes(q) / 14 + blocks * block) / omp_get_max_threads();
}

/// Whether QuantLinear rounds x to 8 bits.
bool rounds(const quant::QuantProblem& q) {
  return q.x_bits == 8 && q.gemm.m <= quant::QuantLinear::kFewRows && q.gemm.outer.empty();
}

class Row {
 public:
  static constexpr const char* kOp = "quant_linear";
  static constexpr const char* kAlgorithm = "grouped";

  static const char* reject(const Problem& p) {
    return quant::QuantLinear::reject(quant::decode_linear(p.raw()));
  }
  /// Of rows that are not rounded the larger of reading the weight (14 GB/s a thread) and multiplying
  /// (half of gemm's rate).
  static double cost_ns(const Problem& p) {
    const quant::QuantProblem q = quant::decode_linear(p.raw());
    if (rounds(q)) return rounded_cost(q, 10 * double(q.gemm.m));
    return 1000 + std::max(weight_bytes(q) / 14, q.gemm.flops() / 50) / omp_get_max_threads();
  }
  static std::vector<rm_edge> edges(Isa isa) {
    std::vector<rm_edge> sizes = {{'M', 0, quant::QuantLinear::kFewRows},
                                  {'N', 0, quant::kTile},
                                  {'N', 0, quant::kStreams},
                                  {'K', 0, quant::kBlock}};
    for (const rm_edge& edge : gemm::PackedGemm::edges(tiles_of(isa))) {
      if (edge.axis != 'K') sizes.push_back(edge);  // many rows: on the tiles of gemm
    }
    return sizes;
  }
  Row(const Problem& p, Isa isa) : Row(p, isa, rounded_of(isa)) {}
  Row(const Problem& p, Isa isa, const quant::TileSet& rounded)
      : linear_(quant::decode_linear(p.raw()), kernels_of(isa), rounded, tiles_of(isa)) {}
  uint64_t workspace_bytes() const { return linear_.workspace_bytes(); }
  rm_status* launch(const rm_launch& l) const {
    linear_.launch(l);
    return nullptr;
  }

 private:
  quant::QuantLinear linear_;
};

#if RM_CPU_X86
constexpr const char* kNoVnni = "this machine (or the option cpu_isa) has no VNNI of this width";

template <Isa kIsa>
bool has_vnni() {
  const Extras e = extras();
  return kIsa == Isa::avx512 ? e.avx512_vnni : e.avx_vnni;
}

/// The same with the byte products of AVX512-VNNI or AVX-VNNI, where x is rounded to 8 bits.
template <Isa kIsa>
class VnniRow : public Row {
 public:
  static constexpr const char* kAlgorithm = "grouped_vnni";
  static const char* reject(const Problem& p) {
    if (!has_vnni<kIsa>()) return kNoVnni;
    if (p.attr_int("x_bits", 16) != 8) return "vnni: activations of 8 bits only";
    return Row::reject(p);
  }
  static double cost_ns(const Problem& p) {
    const quant::QuantProblem q = quant::decode_linear(p.raw());
    return rounds(q) ? rounded_cost(q, 6.8 * double(q.gemm.m)) : 0.95 * Row::cost_ns(p);
  }
  VnniRow(const Problem& p, Isa isa)
      : Row(p, isa,
            kIsa == Isa::avx512 ? quant::avx512_vnni::tile_kernels
                                : quant::avx_vnni::tile_kernels) {}
};

/// Many rows of bf16 on matrix tiles.
struct AmxRow {
  using State = quant::AmxLinear;
  static const char* why_not(const rm_problem& raw, const rm_device_info*) {
    if (!extras().amx_bf16) return "this machine (or the option cpu_isa) has no AMX for bf16";
    const quant::QuantProblem q = quant::decode_linear(raw);
    if (q.gemm.m <= quant::QuantLinear::kFewRows) return "amx: few rows";
    return quant::AmxLinear::reject(q);
  }
  /// Making bf16 of the weight and multiplying, 5 elements and 800 operations a nanosecond.
  static double cost_ns(const rm_problem& raw, const rm_device_info*) {
    const quant::QuantProblem q = quant::decode_linear(raw);
    return 1000 + (double(q.gemm.n) * double(q.gemm.k) / 5 + q.gemm.flops() / 800) / omp_get_max_threads();
  }
  static quant::AmxLinear* make(const rm_problem& raw, const rm_device_info*) {
    return new quant::AmxLinear(quant::decode_linear(raw),
                                {quant::amx_bf16::amx_fill, kernels_of(Isa::avx512),
                                 gemm::amx_bf16::amx_kernels});
  }
  static std::span<const rm_edge> edges() {
    static const std::vector<rm_edge> edges = {{'M', 0, gemm::kAmxRows}, {'M', 0, 2 * gemm::kAmxRows},
                                               {'N', 0, quant::kTile}, {'N', 0, gemm::kAmxColumns},
                                               {'N', 0, 2 * gemm::kAmxColumns}, {'K', 0, quant::kBlock}};
    return edges;
  }
};

std::vector<rm_edge> few_edges() {
  return {{'M', 0, quant::kMostFewRows}, {'N', 0, quant::kTile},    {'N', 0, quant::kStrip},
          {'N', 0, 2 * quant::kStrip},   {'K', 0, 2 * quant::kBlock}, {'K', 0, 4 * quant::kBlock}};
}

/// A few rows, rounded to 8 bits: the weight is unpacked once for all of them.
template <Isa kIsa, bool kVnni>
class FewRow {
 public:
  static constexpr const char* kOp = "quant_linear";
  static constexpr const char* kAlgorithm = kVnni ? "few_vnni" : "few";

  static const char* reject(const Problem& p) {
    if (kVnni && !has_vnni<kIsa>()) return kNoVnni;
    return quant::FewLinear::reject(quant::decode_linear(p.raw()));
  }
  static double cost_ns(const Problem& p) {
    const quant::QuantProblem q = quant::decode_linear(p.raw());
    // Nanoseconds of a block: unpacking it, and its products with a row of x (`rm_bench_quant`).
    struct Rates {
      double unpacking, row;
    };
    constexpr bool kWide = kIsa == Isa::avx512;
    constexpr Rates kEight = kVnni ? (kWide ? Rates{14, 2.6} : Rates{20, 4.2})
                                   : (kWide ? Rates{13, 5.8} : Rates{18, 7.8});
    constexpr Rates kFour = kVnni ? (kWide ? Rates{8, 2.6} : Rates{20, 4.2})
                                  : (kWide ? Rates{8, 3.4} : Rates{22, 4.8});
    const Rates& rates = q.bits == 8 ? kEight : kFour;
    return rounded_cost(q, rates.unpacking + rates.row * double(q.gemm.m));
  }
  static std::vector<rm_edge> edges(Isa) { return few_edges(); }
  FewRow(const Problem& p, Isa isa)
      : linear_(quant::decode_linear(p.raw()), {kernels(), rounded_of(isa), tiles_of(isa)}) {}
  uint64_t workspace_bytes() const { return linear_.workspace_bytes(); }
  rm_status* launch(const rm_launch& l) const {
    linear_.launch(l);
    return nullptr;
  }

 private:
  static const quant::FewSet& kernels() {
    using namespace quant;
    if constexpr (kIsa == Isa::avx512) {
      return kVnni ? avx512_vnni::few_kernels : avx512::few_kernels;
    } else {
      return kVnni ? avx_vnni::few_kernels : avx2::few_kernels;
    }
  }

  quant::FewLinear linear_;
};

/// The same on matrix tiles.
struct AmxFewRow {
  using State = quant::FewLinear;
  static const char* why_not(const rm_problem& raw, const rm_device_info*) {
    if (!extras().amx_int8) return "this machine (or the option cpu_isa) has no AMX for int8";
    return quant::FewLinear::reject(quant::decode_linear(raw));
  }
  static double cost_ns(const rm_problem& raw, const rm_device_info*) {
    const quant::QuantProblem q = quant::decode_linear(raw);
    return rounded_cost(q, 16 + 1.2 * double(q.gemm.m));
  }
  static quant::FewLinear* make(const rm_problem& raw, const rm_device_info*) {
    return new quant::FewLinear(quant::decode_linear(raw), {quant::amx_int8::few_kernels,
                                                            rounded_of(Isa::avx512),
                                                            tiles_of(Isa::avx512)});
  }
  static std::span<const rm_edge> edges() {
    static const std::vector<rm_edge> edges = few_edges();
    return edges;
  }
};
#endif

}  // namespace

std::span<const rm_kernel> quant_linear_rows() {
  static const std::vector<rm_kernel> rows = {
#if RM_CPU_X86
    plugin::kernel_row<AmxFewRow>("quant_linear", "quant_linear_grouped_amx_int8", build_id(),
                                  RM_KERNEL_DETERMINISTIC),
    plugin::kernel_row<AmxRow>("quant_linear", "quant_linear_grouped_amx_bf16", build_id(),
                               RM_KERNEL_DETERMINISTIC),
    make_row<FewRow<Isa::avx512, true>, Isa::avx512>(),
    make_row<FewRow<Isa::avx512, false>, Isa::avx512>(),
    make_row<FewRow<Isa::avx2, true>, Isa::avx2>(),
    make_row<FewRow<Isa::avx2, false>, Isa::avx2>(),
    make_row<VnniRow<Isa::avx512>, Isa::avx512>(),
    make_row<VnniRow<Isa::avx2>, Isa::avx2>(),
    make_row<Row, Isa::avx512>(),
    make_row<Row, Isa::avx2>(),
#endif
    make_row<Row, Isa::baseline>(),
  };
  return rows;
}

}  // namespace rm::cpu
