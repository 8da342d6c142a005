// quant_linear of many rows of bf16 on matrix tiles (AMX): 32 rows of the weight at a time become
// bf16 in the second-level cache and are multiplied with a block of rows of x that stays there too.
//
// Neither the number of threads nor that of rows changes a bit.
#pragma once

#include "ops/gemm/near_rows.hpp"
#include "ops/quant/amx_kernels.hpp"
#include "ops/quant/tiles.hpp"

namespace rm::cpu::quant {

class AmxLinear {
 public:
  struct Kernels {
    const AmxFill& fill;
    const QuantSet& widen;
    const gemm::AmxSet& multiply;
  };

  /// Static string, or null when the problem is supported.
  static const char* reject(const QuantProblem& q);

  AmxLinear(QuantProblem problem, const Kernels& kernels);

  uint64_t workspace_bytes() const;
  void launch(const rm_launch& l) const;

 private:
  struct Scratch {
    char* chunk;     // of the weight
    char* lone;      // as many rows of it that lie alone, as bf16
    float* row;      // one row of it
    float* acc;      // [2 * kAmxRows][kAmxColumns]
    float* partial;  // of pairs of groups, between parts of k
  };

  uint64_t lay_out(char* base, Scratch* s) const;
  uint64_t x_bytes() const;
  int64_t lone_bytes() const { return (q_.blocks() + 1) * kBlock * 2; }  // lines of a tile in several sets
  void run(const Operands& o, const char* x, int64_t begin, int64_t end, const Scratch& s) const;
  void chunk(const Operands& o, const char* x, int64_t group0, int64_t group1, int64_t chunk,
             const Scratch& s) const;
  void pairs(const Operands& o, const char* x, int64_t group0, int64_t group1, int64_t chunk,
             int64_t b, int64_t end, const Scratch& s) const;
  void fill(const Operands& o, int64_t chunk, const Scratch& s, char* to) const;
  void fill_row(const Operands& o, int64_t n, const Scratch& s) const;
  void store(const Operands& o, const float* acc, int64_t row, int64_t rows, int64_t chunk) const;

  QuantProblem q_;
  Kernels k_;
  int64_t groups_, chunks_;
  int64_t blocks_;        // of k that are multiplied: without those of padding
  int64_t block_k_;       // blocks of k that are multiplied with all rows before the next
  int64_t block_groups_;  // of rows of x that stay near while the weight passes
  gemm::NearRows rows_;
  int threads_;
};

}  // namespace rm::cpu::quant
