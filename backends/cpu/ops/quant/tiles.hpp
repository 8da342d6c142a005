// quant_linear on a few rows of x rounded to 8 bits and weights in tiles of eight rows.
//
// Neither the number of threads nor that of rows changes a bit.
#pragma once

#include "ops/quant/problem.hpp"
#include "ops/quant/tile.hpp"
#include "rm/kernels.h"

namespace rm::cpu::quant {

/// A launch's operands; null where there is none.
struct Operands {
  const char* x;
  const uint8_t* q;
  const uint16_t *scale, *zero;
  const char *bias, *residual;
  char* c;
};

Operands operands(const QuantProblem& q, const rm_launch& l);

inline gemm::TileType tile_type(DType t) {
  return t == DType::f32 ? gemm::kF32 : t == DType::bf16 ? gemm::kBF16 : gemm::kF16;
}

/// Finishes columns [n, n + cols) of all rows of x: bias, activation, residual, rounding.
void store_columns(const QuantProblem& q, const gemm::KernelSet& kernels, gemm::TileType type,
                   const Operands& o, const float* acc, int64_t n, int64_t cols);

class TiledLinear {
 public:
  TiledLinear(const QuantProblem& problem, const TileSet& kernels, const gemm::KernelSet& tiles,
              gemm::TileType type);

  uint64_t workspace_bytes() const;
  void launch(const Operands& o, void* workspace) const;

 private:
  struct Scratch {
    int8_t* values;  // of all rows of x
    float* scales;
    int32_t* sums;
    float* acc;  // two panels
  };
  uint64_t lay_out(char* base, Scratch* s) const;
  void run(const Operands& o, int64_t panel0, int64_t panel1, char* memory) const;
  /// Columns from n[0] and, with two, n[1] on, `count` tiles each, all rows of x.
  void tiles(const Operands& o, const Scratch& s, const int64_t* n, int streams,
             int64_t count) const;
  void rows(const Operands& o, const Scratch& s, int64_t panel, int64_t from, int64_t to) const;
  TileArgs args(const Scratch& s, int64_t row) const;

  const QuantProblem& q_;
  const TileSet& k_;
  const gemm::KernelSet& tiles_;
  gemm::TileType type_;
  int64_t element_bytes_, panels_;
  int threads_ = 1;
};

}  // namespace rm::cpu::quant
