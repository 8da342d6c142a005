// quant_linear of a few rows of x, rounded to 8 bits, by kernels that unpack the weight once for all
// of them; it lies in tiles of eight rows.
//
// The bits are those of TiledLinear; neither the number of threads nor that of rows changes one.
#pragma once

#include "ops/quant/few_kernels.hpp"
#include "ops/quant/linear.hpp"

namespace rm::cpu::quant {

class FewLinear {
 public:
  struct Kernels {
    const FewSet& multiply;
    const TileSet& rounded;
    const gemm::KernelSet& tiles;
  };

  /// Static string, or null when the problem is supported.
  static const char* reject(const QuantProblem& q);

  FewLinear(QuantProblem problem, const Kernels& kernels);

  uint64_t workspace_bytes() const;
  void launch(const rm_launch& l) const;

 private:
  /// Rows of x: [block][row] of values, scales and sums.
  struct Rounded {
    int8_t* values;
    float* scales;
    int32_t *sums, *offsets;
  };
  /// What a thread has for itself.
  struct Own {
    float* acc;  // a panel
    Rounded row;  // one row of x alone
  };

  uint64_t lay_out(char* base, Rounded* x) const;
  uint64_t lay_out(char* base, Own* own) const;
  void round(const Operands& o, const Rounded& x, int64_t begin, int64_t end) const;
  void run(const Operands& o, const Rounded& x, int64_t begin, int64_t end, const Own& own) const;
  void strip(const Operands& o, const Rounded& x, int64_t n, bool whole, float* acc) const;
  void lone_rows(const Operands& o, const Rounded& x, int64_t n, int64_t count, float* acc,
                 const Rounded& row) const;

  QuantProblem q_;
  Kernels k_;
  gemm::TileType type_;
  int64_t panels_;
  int threads_;
};

}  // namespace rm::cpu::quant
