// The gemm on matrix tiles (AMX) for bf16: the weight is read where and as it lies ([N, K], K
// dense), so no packed copy exists and none is made in a call; rows of a are put in order once.
//
// Results do not depend on the number of rows or threads.
#pragma once

#include <vector>

#include "ops/gemm/near_rows.hpp"
#include "ops/gemm/problem.hpp"
#include "rm/kernels.h"

namespace rm::cpu::gemm {

class AmxGemm {
 public:
  /// Static string, or null when the problem is supported.
  static const char* reject(const GemmProblem& g);

  /// rm_kernel.edges of the row.
  static std::vector<rm_edge> edges();

  AmxGemm(GemmProblem problem, const AmxSet& kernels);

  uint64_t workspace_bytes() const;
  void launch(const rm_launch& l) const;

 private:
  struct Operands : Pointers {
    using Pointers::Pointers;
    const char* x = nullptr;  // rows of a in order
  };
  /// A block of rows of a and a range of chunks of the weight.
  struct Share {
    int64_t group0, group1, chunk0, chunk1;
  };

  int64_t tile_bytes() const;
  int64_t units() const;
  void order(const Operands& o, int64_t begin, int64_t end, char* to) const;
  void run(const Operands& o, int64_t begin, int64_t end, float* acc) const;
  void few_rows(const Operands& o, const Share& s, float* acc) const;
  void many_rows(const Operands& o, const Share& s, float* acc) const;
  void near_rows(const Operands& o, const Share& s, float* acc) const;
  int64_t room() const;
  /// First column of a chunk: the last one begins early enough to be whole.
  int64_t column(int64_t chunk) const;
  const char* weight(const Operands& o, int64_t chunk) const;
  const char* rows(const Operands& o, int64_t group) const;
  void store(const Operands& o, const float* acc, int64_t group, int64_t chunk,
             int64_t rows = kAmxRows) const;

  GemmProblem g_;
  const AmxSet& k_;
  int64_t row_bytes_;  // of the weight
  int64_t groups_, chunks_, blocks_;
  int64_t block_groups_;  // of rows that stay near while the weight passes
  int64_t block_k_;       // blocks of k that are multiplied with all rows before the next
  bool copies_;           // those of the weight are copied
  NearRows near_;         // beside copies
  bool own_tiles_;        // every thread puts rows of a in order for itself
  int threads_;
};

}  // namespace rm::cpu::gemm
