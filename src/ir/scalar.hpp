// Loads and stores of one element of any DType as double, and the bf16/f16 conversions.
//
// i64 values beyond 2^53 lose bits through double: integer code uses load_int/store_int.
#pragma once

#include <cstdint>

#include "ir/type.hpp"

namespace rm::ir {

float bf16_to_float(uint16_t bits);
uint16_t float_to_bf16(float value);  // round to nearest even, NaN stays NaN
float f16_to_float(uint16_t bits);
uint16_t float_to_f16(float value);   // round to nearest even, overflow to inf

double load_element(DType dtype, const void* address);
/// Rounds to the type: nearest even for floats, truncation for integers, != 0 for bool.
void store_element(DType dtype, void* address, double value);
int64_t load_int(DType dtype, const void* address);
void store_int(DType dtype, void* address, int64_t value);

}  // namespace rm::ir
