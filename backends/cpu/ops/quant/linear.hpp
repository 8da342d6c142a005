// quant_linear: few rows of x straight on the weight's bytes (tiles.hpp: rounded to 8 bits), many
// on panels widened a few at a time.
//
// Neither the number of threads nor, for up to kFewRows rows, the number of rows changes a bit.
#pragma once

#include <memory>

#include "ops/gemm/packed.hpp"
#include "ops/quant/kernels.hpp"
#include "ops/quant/problem.hpp"
#include "ops/quant/tiles.hpp"
#include "rm/kernels.h"

namespace rm::cpu::quant {

class QuantLinear {
 public:
  static constexpr int64_t kFewRows = 8;
  static const char* reject(const QuantProblem& q);

  QuantLinear(QuantProblem problem, const QuantSet& kernels, const TileSet& rounded,
              const gemm::KernelSet& tiles);

  uint64_t workspace_bytes() const;
  void launch(const rm_launch& l) const;

 private:
  class Panels;  // widened weights for the packed gemm
  struct Scratch {
    char* values;  // of all rows of x
    float *scales, *sums, *factors, *acc;
  };

  uint64_t lay_out(char* base, Scratch* s) const;
  void run(const Operands& o, int64_t chunk0, int64_t chunk1, char* memory) const;
  void dot_rows(const Operands& o, const Scratch& s, const int64_t* columns,
                float* const* out) const;

  QuantProblem q_;
  const QuantSet& k_;
  const TileSet& tile_kernels_;
  const gemm::KernelSet& tiles_;
  gemm::TileType type_;
  int64_t element_bytes_, chunks_;
  int threads_ = 1;
  std::unique_ptr<gemm::PanelSource> panels_;
  std::unique_ptr<gemm::PackedGemm> many_;
  std::unique_ptr<TiledLinear> rounded_;
};

}  // namespace rm::cpu::quant
