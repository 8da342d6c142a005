// Products of f32 operands that both change from call to call, on matrix tiles of bf16 (AMX): six tile products
// stand for one of f32 (isa_split.cpp), which is two to three times the rate of its multiply-adds.
//
// Results are as near as those of f32 while magnitudes lie within wide limits; where a part of an operand does not
// (NaN and infinity among them), the packed kernel computes the whole. They do not depend on the number of rows or threads.
#pragma once

#include <atomic>
#include <vector>

#include "ops/gemm/packed.hpp"
#include "ops/gemm/split_kernels.hpp"

namespace rm::cpu::gemm {

class SplitGemm {
 public:
  /// Static string, or null when the problem is supported.
  static const char* reject(const GemmProblem& g);

  /// rm_kernel.edges of the row.
  static std::vector<rm_edge> edges();

  /// Nanoseconds, to order the rows.
  static double cost_ns(const GemmProblem& g);

  SplitGemm(GemmProblem problem, const SplitSet& kernels, const KernelSet& packed);

  uint64_t workspace_bytes() const;
  void launch(const rm_launch& l) const;

 private:
  /// Rows of a or columns of b.
  struct Side {
    bool columns;
    int64_t count, strips, row_stride, k_stride;
  };
  /// Magnitudes of parts of an operand, as bits: the largest, and that of the part where it is smallest.
  struct Range {
    std::atomic<uint32_t> largest{0}, smallest{UINT32_MAX};
    void add(uint32_t most);
  };
  struct Call;

  Side side(bool columns) const;
  uint32_t pack(const Call& c, const Side& s, int64_t strip, int64_t k0, char* dst) const;
  int64_t block_steps(int64_t k0) const;
  bool within_limits(const Range& near, uint32_t most) const;
  void pack_near(Call& c, int64_t first, int64_t count, int64_t thread, int64_t team) const;
  void run(Call& c, int64_t first, int64_t count, int64_t begin, int64_t end, char* memory) const;
  void store(const Call& c, const float* sums, int64_t row_strip, int64_t column_strip) const;
  SplitAhead lines_of(const Call& c, Operand o, int64_t row_strip, int64_t column_strip) const;
  SplitAhead source_of(const Call& c, const Side& s, int64_t strip, int64_t k0) const;

  GemmProblem g_;
  const SplitSet& k_;
  const KernelSet& stores_;
  PackedGemm packed_;
  Side near_, passing_;  // the shorter one lies packed as a whole, the longer one passes strip by strip
  int64_t steps_, depth_;  // of k; of a block of it
  int64_t near_strips_;    // that are packed at a time
  int64_t passing_strips_;  // whose sums stay between blocks of k
  int threads_;
  uint64_t near_bytes_, thread_bytes_;
};

}  // namespace rm::cpu::gemm
