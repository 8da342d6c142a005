// Entry points of the ewise interpreter at one level: one function an (opcode, class) pair, one a
// conversion.  Blocks are dense; `dst` may equal any source of the same element size.
#pragma once

#include "common/types.hpp"

namespace rm::cpu {

/// The class a value is computed in. Comparison results of f32 stay 0.0/1.0 in f32 blocks until
/// something needs them as integers.
enum class Class : uint8_t { f32, f64, i64 };

using EwiseFn = void (*)(void* dst, const void* a, const void* b, const void* c, int64_t n);
using EwiseLoad = void (*)(void* dst, const void* src, int64_t stride, int64_t n);
using EwiseStore = void (*)(const void* src, void* dst, int64_t stride, int64_t n);

struct EwiseTable {
  /// nullptr: no such opcode. The integer divisions set *(int*)c when they meet a zero divisor.
  EwiseFn (*find)(int opcode, Class cls);
  EwiseFn (*convert)(Class from, Class to);
  EwiseLoad (*load)(DType from, Class to);
  EwiseStore (*store)(Class from, DType to);
  /// gelu's derivative in f32, what gelu_slopes() finds written out.
  EwiseFn (*gelu_slope)();
};

}  // namespace rm::cpu
