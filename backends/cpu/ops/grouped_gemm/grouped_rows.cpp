// Rows of grouped_gemm: a kernel of gemm for the rows of one group after the other. A kernel is made
// for a number of rows, so one is made for each group as a launch finds it, which costs some
// comparisons and no memory.
//
// What a row of x gives does not depend on the rows beside it, since gemm's kernels keep that.
#include "ops/grouped_gemm/rows.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common/decoded_row.hpp"
#include "ops/gemm/kinds.hpp"
#include "ops/grouped_gemm/problem.hpp"

namespace rm::cpu {

namespace gemm {
namespace {

constexpr int64_t kMostRows = 256;  // of a product: workspaces are sized by the largest of all sizes

/// Of gemm's kernels one kind, which is given at most kRows rows at a time.
template <class Kind, int64_t kRows>
struct Groups : Kind {
  static constexpr int64_t kRowsAtOnce = kRows;
  static const char* reject(const GroupedProblem& p) {
    GemmProblem g = p.product;
    g.m = std::min(g.m, kRows);
    return Kind::reject(g);
  }
  static Roof roof(const GroupedProblem& p) { return Kind::roof(p.product); }
};

template <class Of>
class GroupedGemm {
 public:
  using Product = typename Of::Kernel;

  explicit GroupedGemm(GroupedProblem problem)
      : p_(std::move(problem)), element_bytes_(dtype_bytes(p_.product.dtype[kA])) {
    const int64_t most = std::min(p_.product.m, Of::kRowsAtOnce);
    for (int64_t rows = 1; rows <= most; ++rows) {
      workspace_bytes_ = std::max(workspace_bytes_, product(rows).workspace_bytes());
    }
  }

  uint64_t workspace_bytes() const { return workspace_bytes_; }

  bool packs(size_t operand) const {
    if constexpr (requires(const Product& one) { one.packs(operand); }) {
      return operand == kWeights && p_.groups > 0 && product(1).packs(kB);
    } else {
      return false;
    }
  }
  uint64_t packed_bytes(size_t) const { return static_cast<uint64_t>(p_.groups) * packed_step(); }
  const char* layout(size_t) const {
    if constexpr (kCanPack) {
      return product(1).layout(kB);
    } else {
      return "";
    }
  }
  /// One matrix behind the other, each as gemm has it.
  void prepack(size_t, const rm_tensor& source, void* packed) const {
    if constexpr (kCanPack) {
      for (int64_t e = 0; e < p_.groups; ++e) {
        rm_tensor matrix = source;
        matrix.byte_offset += static_cast<uint64_t>(e * p_.group_step * element_bytes_);
        product(1).prepack(kB, matrix,
                           static_cast<char*>(packed) + static_cast<uint64_t>(e) * packed_step());
      }
    }
  }

  rm_status* launch(const rm_launch& l) const {
    const GemmProblem& g = p_.product;
    int64_t begin = 0;
    for (int64_t e = 0; e < p_.groups; ++e) {
      const int64_t end = p_.offset(l.inputs[kOffsets], e);
      if (end < begin || end > g.m) return misplaced(e, begin, end);
      begin = end;
    }
    if (g.n == 0) return nullptr;
    begin = 0;
    for (int64_t e = 0; e < p_.groups; ++e) {
      const int64_t end = p_.offset(l.inputs[kOffsets], e);
      const int64_t parts = (end - begin + Of::kRowsAtOnce - 1) / Of::kRowsAtOnce;
      for (int64_t i = 0; i < parts; ++i) {
        const int64_t first = begin + (end - begin) * i / parts;
        multiply(l, e, first, begin + (end - begin) * (i + 1) / parts - first);
      }
      begin = end;
    }
    clear(static_cast<char*>(l.outputs[0]), begin);
    return nullptr;
  }

 private:
  static constexpr bool kCanPack = requires(const Product& one) { one.packs(size_t{}); };

  Product product(int64_t rows) const {
    GemmProblem g = p_.product;
    g.m = rows;
    return Of::build(std::move(g));
  }

  uint64_t packed_step() const {
    if constexpr (kCanPack) {
      return product(1).packed_bytes(kB);
    } else {
      return 0;
    }
  }

  void multiply(const rm_launch& l, int64_t group, int64_t first, int64_t rows) const {
    const GemmProblem& g = p_.product;
    const auto at = [&](const void* base, int64_t elements) {
      return static_cast<const char*>(base) + elements * element_bytes_;
    };
    const void* inputs[kOperands - 1] = {at(l.inputs[kX], first * g.row[kA])};
    if (packs(kWeights)) {
      inputs[kB] = static_cast<const char*>(l.inputs[kWeights]) +
                   static_cast<uint64_t>(group) * packed_step();
    } else {
      inputs[kB] = at(l.inputs[kWeights], group * p_.group_step);
    }
    void* outputs[] = {const_cast<char*>(at(l.outputs[0], first * g.row[kC]))};
    rm_launch one = l;
    one.inputs = inputs;
    one.outputs = outputs;
    product(rows).launch(one);
  }

  /// Rows behind the last group are zeros.
  void clear(char* y, int64_t first) const {
    const GemmProblem& g = p_.product;
    for (int64_t i = first; i < g.m; ++i) {
      char* row = y + i * g.row[kC] * element_bytes_;
      if (g.col[kC] == 1) {
        std::memset(row, 0, static_cast<size_t>(g.n * element_bytes_));
        continue;
      }
      for (int64_t j = 0; j < g.n; ++j) {
        std::memset(row + j * g.col[kC] * element_bytes_, 0, static_cast<size_t>(element_bytes_));
      }
    }
  }

  rm_status* misplaced(int64_t group, int64_t begin, int64_t end) const {
    return plugin::fail(RM_OUT_OF_RANGE, "[grouped_gemm] expected offsets that do not fall and end in [0, " +
                                             std::to_string(p_.product.m) + "], got " + std::to_string(end) +
                                             " behind " + std::to_string(begin) + " for group " +
                                             std::to_string(group));
  }

  GroupedProblem p_;
  int64_t element_bytes_;
  uint64_t workspace_bytes_ = 0;
};

template <class Kind, int64_t kRows = kMostRows>
struct GroupedRow : Groups<Kind, kRows> {
  using Kernel = GroupedGemm<Groups<Kind, kRows>>;
  static Kernel* make(GroupedProblem p) { return new Kernel(std::move(p)); }
};

struct Grouped {
  static constexpr const char* kOp = "grouped_gemm";
  static GroupedProblem decode(const rm_problem& p) { return decode_grouped(p); }
  template <class Of>
  static double cost_ns(const GroupedProblem& p) {
    return static_cast<double>(p.groups_met()) * roofline_ns(p.typical(), Of::roof(p));
  }
};

}  // namespace
}  // namespace gemm

std::span<const rm_kernel> grouped_gemm_rows() {
  using namespace gemm;
  constexpr int64_t kFew = DirectGemm::kMostRows;
  static const std::vector<rm_kernel> rows = {
#if RM_CPU_X86
    make_decoded_row<Grouped, GroupedRow<Amx>>("grouped_gemm_direct_amx_bf16"),
    make_decoded_row<Grouped, GroupedRow<DirectBf16, kFew>>("grouped_gemm_direct_avx512_bf16"),
    make_decoded_row<Grouped, GroupedRow<Direct<Isa::avx512>, kFew>>("grouped_gemm_direct_avx512"),
    make_decoded_row<Grouped, GroupedRow<Direct<Isa::avx2>, kFew>>("grouped_gemm_direct_avx2"),
    make_decoded_row<Grouped, GroupedRow<PackedBf16>>("grouped_gemm_packed_avx512_bf16"),
    make_decoded_row<Grouped, GroupedRow<Packed<Isa::avx512>>>("grouped_gemm_packed_avx512"),
    make_decoded_row<Grouped, GroupedRow<Packed<Isa::avx2>>>("grouped_gemm_packed_avx2"),
#endif
    make_decoded_row<Grouped, GroupedRow<Direct<Isa::baseline>, kFew>>("grouped_gemm_direct_baseline"),
    make_decoded_row<Grouped, GroupedRow<Packed<Isa::baseline>>>("grouped_gemm_packed_baseline"),
    make_decoded_row<Grouped, GroupedRow<Naive>>("grouped_gemm_naive",
                                                 RM_KERNEL_FALLBACK | RM_KERNEL_DETERMINISTIC)
  };
  return rows;
}

}  // namespace rm::cpu
