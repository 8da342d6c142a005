// What the ISA sources of ewise share with each other, inside one level.
#pragma once

#include "ops/ewise/kernels.hpp"

namespace rm::cpu::RM_ISA {
EwiseFn find_f32(int opcode);
EwiseFn find_gelu_slope();
EwiseFn find_f64(int opcode);
EwiseFn find_i64(int opcode);
EwiseFn find_convert(Class from, Class to);
EwiseLoad find_load(DType from, Class to);
EwiseStore find_store(Class from, DType to);
}  // namespace rm::cpu::RM_ISA
