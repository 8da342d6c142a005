// What the ISA sources of reduce offer: one function folds a run of elements into an accumulator.
#pragma once

#include "common/types.hpp"

namespace rm::cpu {

enum class ReduceKind : uint8_t { sum, mean, max, min, prod, any, all, argmax, argmin };

/// Elements that are summed in f32 before their total goes to f64.
constexpr int64_t kReducePiece = 4096;

/// Values of float types are kept as f64, others as i64. `index` is the winner of argmax, argmin.
struct ReduceState {
  double real;
  int64_t whole;
  int64_t index;
};

/// Folds x[0], x[stride] ... into the state; `first` is the index of x[0] in the reduced axes.
using ReduceFn = void (*)(const void* x, int64_t stride, int64_t n, int64_t first, ReduceState*);
/// Folds `rows` rows of `columns` dense elements into f32 accumulators, one a column.
using ReduceColumnsFn = void (*)(const void* x, int64_t row_stride, int64_t rows, int64_t columns,
                                 float* acc);

struct ReduceTable {
  ReduceFn (*find)(DType, ReduceKind);
  ReduceColumnsFn (*columns)(DType, ReduceKind);  // nullptr: no fast form
};

}  // namespace rm::cpu
