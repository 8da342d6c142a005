// The element types of matrices as vectors of f32 (common/vec.hpp): a type says how its elements are
// stored, loaded and rounded.
#pragma once

#include "common/vec.hpp"
#include "ops/gemm/tile.hpp"

namespace rm::cpu::gemm::RM_ISA {

using namespace rm::cpu::RM_ISA;

namespace {

constexpr int kNr = 2 * kWidth;  // columns of a panel

struct F32 {
  using Scalar = float;
  RM_INLINE vf load(const float* p) { return vload(p); }
  RM_INLINE void store(float* p, vf v) { vstore(p, v); }
};

struct BF16 {
  using Scalar = uint16_t;
  RM_INLINE vf load(const uint16_t* p) { return vload(reinterpret_cast<const bf16*>(p)); }
  RM_INLINE void store(uint16_t* p, vf v) { vstore(reinterpret_cast<bf16*>(p), v); }
};

struct F16 {
  using Scalar = uint16_t;
  RM_INLINE vf load(const uint16_t* p) { return vload(reinterpret_cast<const f16*>(p)); }
  RM_INLINE void store(uint16_t* p, vf v) { vstore(reinterpret_cast<f16*>(p), v); }
};

}  // namespace
}  // namespace rm::cpu::gemm::RM_ISA
